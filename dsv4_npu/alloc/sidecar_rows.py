"""The C128 sidecar of a scheduler's request rows: one C128 page id per column, each entry a counted holder."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsv4_npu import addressing
from dsv4_npu.alloc.slot_pages import SlotPages
from dsv4_npu.alloc.state import I32, I64
from dsv4_npu.errors import CapacityError, InputError, OwnershipError


class Changed(NamedTuple):
    """Table entries that changed, for the device's copy: ``table[rows, columns] = pages``."""

    rows: I64
    columns: I64
    pages: I32


_NOTHING = Changed(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32))


class SidecarRows:
    """Request rows over the C128 pages of a :class:`SlotPages`.

    Attributes:
        table: int32 ``[rows, columns]``, 0 = empty. Row 0 is the dummy row and stays empty.
        entries: int64 ``[rows]``, C128 entries that the row has slots for; what it can grow without another page is
            ``columns filled · c128_page - entries``.
    """

    def __init__(self, rows: int, columns: int, c128_page: int) -> None:
        self.c128_page = c128_page
        self.table: I32 = np.zeros((rows, columns), np.int32)
        self.entries: I64 = np.zeros(rows, np.int64)
        self._room = 0

    @property
    def tail_entries(self) -> int:
        """Entries that the rows together can still take in pages that they hold already."""
        return self._room

    def write(self, pages: SlotPages, rows: I64, old: I64, new: I64, given: I32 | I64) -> Changed:
        """Count and store the pages that a batch was given: row ``b`` grows from ``old[b]`` to ``new[b]`` entries.

        ``given`` holds the new pages of all rows, in order: the columns ``[ceil(old / page), ceil(new / page))`` of
        each. Writing what is there already changes nothing.
        """
        unit = self.c128_page
        first, last = -(-old // unit), -(-new // unit)
        counts = np.maximum(last - first, 0)
        total = int(counts.sum())
        if total != len(given):
            raise InputError(f"{len(given)} C128 pages for {total} columns of {len(rows)} rows")
        if not total:
            self._grow(rows, new)
            return _NOTHING
        if int(last.max()) > self.table.shape[1]:
            row = int(rows[int(last.argmax())])
            raise CapacityError(f"row {row}: {int(last.max())} C128 pages, the row has {self.table.shape[1]} columns")
        starts = np.cumsum(counts) - counts
        at = np.repeat(rows, counts)
        columns = np.arange(total) + np.repeat(first - starts, counts)
        changed = self._store(pages, at, columns, given)
        self._grow(rows, new)
        return changed

    def replace(self, pages: SlotPages, row: int, given: I32 | I64) -> Changed:
        """Replace the leading columns of a row: the new pages are counted before the old ones are released."""
        if not 1 <= row < len(self.table):
            raise InputError(f"row {row}: 1 to {len(self.table) - 1} is allowed")
        count = len(given)
        if count > self.table.shape[1]:
            raise CapacityError(f"row {row}: {count} C128 pages, the row has {self.table.shape[1]} columns")
        differ = np.flatnonzero(self.table[row, :count] != given)
        changed = _NOTHING
        if len(differ):
            changed = self._store(pages, np.full(len(differ), row), differ, given[differ])
        more = count * self.c128_page - int(self.entries[row])
        if more > 0:
            self._room -= more
            self.entries[row] += more
        return changed

    def replace_batch(self, pages: SlotPages, rows: I64, counts: I64, given: I32 | I64) -> Changed:
        """:meth:`replace` for a batch of different rows: ``counts[b]`` leading pages of each, joined in ``given``."""
        if len(counts) and int(counts.max()) > self.table.shape[1]:
            raise CapacityError(f"{int(counts.max())} C128 pages, a row has {self.table.shape[1]} columns")
        starts = np.cumsum(counts) - counts
        columns = np.arange(len(given)) - np.repeat(starts, counts)
        changed = self._store(pages, np.repeat(rows, counts), columns, given)
        self._grow(rows, counts * self.c128_page)
        return changed

    def clear(self, pages: SlotPages, row: int) -> Changed:
        """Release what the content of a row names, whatever lengths say, and zero it."""
        columns = np.flatnonzero(self.table[row])
        held = self.table[row, columns]
        pages.release_c128(held)
        self.table[row, columns] = 0
        self._room -= len(columns) * self.c128_page - int(self.entries[row])
        self.entries[row] = 0
        return Changed(np.full(len(columns), row), columns, np.zeros(len(columns), np.int32))

    def least_tail(self) -> int:
        """The fewest entries that a row with pages can still take in them; 0 without such a row."""
        pages = np.count_nonzero(self.table, axis=1)
        used = pages > 0
        return int((pages[used] * self.c128_page - self.entries[used]).min()) if used.any() else 0

    def reset(self) -> None:
        """Forget every row without releasing anything: the pages began anew."""
        self.table[:] = 0
        self.entries[:] = 0
        self._room = 0

    def held(self) -> I64:
        """The pages that all rows name, as a multiset."""
        return self.table[self.table > 0].astype(np.int64)

    def prefix(self, row: int, start: int, stop: int) -> I32:
        """Pages of columns ``[start, stop)`` for a list that leaves the process; a hole raises OwnershipError."""
        pages = self.table[row, start:stop].copy()
        holes = np.flatnonzero(pages < 1)
        if len(holes) or len(pages) < stop - start:
            column = start + int(holes[0]) if len(holes) else self.table.shape[1]
            raise OwnershipError(f"row {row}: C128 column {column} is empty; {stop} columns are needed")
        return pages

    def _store(self, pages: SlotPages, rows: I64, columns: I64, given: I32 | I64) -> Changed:
        old = self.table[rows, columns]
        if not old.any():
            stored = given.astype(np.int32, copy=False)
            pages.retain_c128(stored)
            self.table[rows, columns] = stored
            self._room += len(stored) * self.c128_page
            return Changed(rows, columns, stored)
        differ = old != given
        if not differ.any():
            return _NOTHING
        if not differ.all():
            rows, columns, given, old = rows[differ], columns[differ], given[differ], old[differ]
        stored = given.astype(np.int32)
        pages.retain_c128(stored)
        pages.release_c128(old[old > 0])
        self.table[rows, columns] = stored
        self._room += int(np.count_nonzero(old == 0)) * self.c128_page
        return Changed(rows, columns, stored)

    def _grow(self, rows: I64, entries: I64) -> None:
        now = np.maximum(self.entries[rows], entries)
        self._room -= int((now - self.entries[rows]).sum())
        self.entries[rows] = now


def entries_of(tokens: I64) -> I64:
    """C128 entries that exist once ``tokens`` positions are history."""
    return addressing.compressed_len(tokens, addressing.C128_RATIO)
