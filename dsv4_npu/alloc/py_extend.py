"""Capacity in plain Python: plan and write an extension, reserve a decode step, turn positions into slots.

Pages are the atom: no loop here runs over tokens, and none over the columns of a row that did not change.
"""

from __future__ import annotations

import numpy as np

from dsv4_npu import addressing
from dsv4_npu.alloc.py_pages import PyPages
from dsv4_npu.alloc.state import C128, FULL, GAP, HELD, HOLES, I32, I64, ROW, SWA
from dsv4_npu.errors import CapacityError, InputError, OwnershipError

Slots = tuple[I64, I64, I64, I64]
#: The SWA tail of an extension that gives every new page an SWA page.
NO_TAIL = -1


class PyExtend(PyPages):
    """How rows grow; see :class:`~dsv4_npu.alloc.ledger.Ledger` for the contract of each call."""

    def plan(self, rows: I64, new_lens: I64, tails: I64) -> tuple[int, int, int]:
        full = swa = c128 = 0
        for row, new, tail in zip(rows.tolist(), new_lens.tolist(), tails.tolist(), strict=True):
            self._check_extend(row, new)
            need = self._need(row, max(new, int(self.state.allocated[row])), tail)
            full, swa, c128 = full + need[0], swa + need[1], c128 + need[2]
        return full, swa, c128

    def write(
        self, rows: I64, old_lens: I64, new_lens: I64, tails: I64, full: I32, swa: I32, c128: I32, want: bool
    ) -> Slots:
        for row, old in zip(rows.tolist(), old_lens.tolist(), strict=True):
            self._check_open(row)
            if self.state.allocated[row] != old:
                raise OwnershipError(
                    f"row {row}: allocated changed from {old} to {self.state.allocated[row]} since it was planned"
                )
        need = self.plan(rows, new_lens, tails)
        if need != (len(full), len(swa), len(c128)):
            raise OwnershipError(f"the rows changed since they were planned: need {need} pages now")
        for family, pages in ((FULL, full), (SWA, swa), (C128, c128)):
            self._check_taken(family, pages)
        self._step()
        for row, new, tail in zip(rows.tolist(), new_lens.tolist(), tails.tolist(), strict=True):
            a, b, c = self._need(row, new, tail)
            self._write_row(row, new, tail, full[:a], swa[:b], c128[:c])
            full, swa, c128 = full[a:], swa[b:], c128[c:]
        if not want:
            return _join([])
        spans = zip(rows.tolist(), old_lens.tolist(), new_lens.tolist(), strict=True)
        return _join([self._slots(row, old, max(old, new)) for row, old, new in spans])

    def decode_step(self, rows: I64, reserve: int, width: int) -> Slots:
        if not 0 <= width <= reserve:
            raise InputError(f"width = {width}: 0 to reserve = {reserve} is allowed")
        live = [row for row in rows.tolist() if row != 0]
        need, growing = [0, 0, 0], False
        for row in live:
            self._check_open(row)
            self._check_whole(row)
            self._check_window(row, int(self.state.committed[row]), "decode")
            new = self._decode_len(row, reserve)
            self._check_width(row, new)
            for family, count in enumerate(self._need(row, new, NO_TAIL)):
                need[family] += count
            growing |= new > self.state.allocated[row]
        self._check_room((need[0], need[1], need[2]))
        if growing or any(need):
            self._step()
            for row in live:
                new = self._decode_len(row, reserve)
                a, b, c = self._need(row, new, NO_TAIL)
                pages = self._pop(FULL, a, HELD), self._pop(SWA, b, HELD), self._pop(C128, c, HELD)
                self._write_row(row, new, NO_TAIL, *pages)
        return self.window(rows, self.state.committed[rows], width)

    def window(self, rows: I64, starts: I64, width: int) -> Slots:
        for row, start in zip(rows.tolist(), starts.tolist(), strict=True):
            if row != 0:
                self._check_span(row, start, start + width)
        zero = np.zeros(width, np.int64), np.zeros(width, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
        return _join(
            [
                self._slots(row, start, start + width) if row else zero
                for row, start in zip(rows.tolist(), starts.tolist(), strict=True)
            ]
        )

    def slots(self, row: int, start: int, stop: int) -> Slots:
        self._check_span(row, start, stop)
        return self._slots(row, start, stop)

    def _check_open(self, row: int) -> None:
        total = self.state.total(ROW)
        if not 1 <= row <= total:
            raise InputError(f"row {row}: 1 to {total} is allowed")
        if self.state.page_state[ROW][row] != HELD:
            raise OwnershipError(f"row {row} is not open")

    def _check_whole(self, row: int) -> None:
        if self.state.flags[row] & HOLES:
            raise OwnershipError(f"row {row}: pages were freed by slot; it can only be closed")

    def _check_width(self, row: int, length: int) -> None:
        if length > self.spec.row_width:
            raise CapacityError(f"row {row}: {length} tokens, the row holds {self.spec.row_width}")

    def _check_extend(self, row: int, new: int) -> None:
        self._check_open(row)
        self._check_whole(row)
        if new < 0:
            raise InputError(f"row {row}: new length {new}: 0 or more is allowed")
        self._check_width(row, new)

    def _readable(self, row: int, length: int) -> bool:
        first = max(0, length - self.spec.window + 1)
        return int(self.state.swa_start[row]) * self.spec.page_size <= first

    def _check_window(self, row: int, length: int, what: str) -> None:
        if not self._readable(row, length):
            raise OwnershipError(
                f"row {row}: {what} at {length} reads SWA from position {max(0, length - self.spec.window + 1)}, "
                f"resident from {int(self.state.swa_start[row]) * self.spec.page_size}"
            )

    def _check_span(self, row: int, start: int, stop: int) -> None:
        self._check_open(row)
        limit = int(self.state.allocated[row])
        if not 0 <= start <= stop <= limit:
            raise InputError(f"row {row}: positions [{start}, {stop}): within 0 to {limit} (allocated) is allowed")
        page, ratio = self.spec.page_size, addressing.C128_RATIO * self.spec.c128_page_size
        if start < stop:
            for column in range(start // page, (stop - 1) // page + 1):
                if not self.state.block_table[row, column]:
                    raise OwnershipError(f"row {row}: FULL column {column} is empty")
        if start // addressing.C128_RATIO < stop // addressing.C128_RATIO and not self.spec.full_only:
            last = (stop // addressing.C128_RATIO - 1) // self.spec.c128_page_size
            for column in range(start // ratio, last + 1):
                if not self.state.c128_table[row, column]:
                    raise OwnershipError(f"row {row}: C128 column {column} is empty")

    def _decode_len(self, row: int, reserve: int) -> int:
        wanted = addressing.ceil_to(int(self.state.committed[row]) + reserve, self.spec.page_size)
        return max(int(self.state.allocated[row]), wanted)

    def _swa_from(self, row: int, new: int, tail: int) -> int:
        """First column that the extension to ``new`` must leave with an SWA page."""
        page, old = self.spec.page_size, int(self.state.allocated[row])
        if new <= old or tail == 0:
            return max(addressing.pages_for(new, page), int(self.state.held_cols[row]))
        if tail == NO_TAIL:
            return old // page
        return max(old // page, max(0, new - tail) // page)

    def _remap(self, row: int, first: int) -> bool:
        """Whether the partly filled last page of the row lacks an SWA page that the extension writes to."""
        state, held = self.state, int(self.state.held_cols[row])
        if first >= held or held == 0 or self.spec.full_only:
            return False
        last = state.block_table[row, held - 1]
        return bool(state.full_owner[last] == row and state.full_to_swa[last] == 0)

    def _need(self, row: int, new: int, tail: int) -> tuple[int, int, int]:
        held = int(self.state.held_cols[row])
        columns = max(held, addressing.pages_for(new, self.spec.page_size))
        if self.spec.full_only:
            return columns - held, 0, 0
        first = self._swa_from(row, new, tail)
        swa = max(0, columns - max(first, held)) + self._remap(row, first)
        return columns - held, swa, max(0, self._c128_columns(new) - int(self.state.c128_cols[row]))

    def _write_row(self, row: int, new: int, tail: int, full: I32, swa: I32, c128: I32) -> None:
        state = self.state
        held = int(state.held_cols[row])
        columns = held + len(full)
        first = self._swa_from(row, new, tail)
        if self._remap(row, first):
            self._map(state.block_table[row, held - 1 : held], swa[:1])
            swa = swa[1:]
            if state.swa_start[row] == held:
                state.swa_start[row] = held - 1
        self._put_columns(row, np.arange(held, columns), full)
        state.page_state[FULL][full] = HELD
        state.full_owner[full] = row
        if len(swa):
            self._map(full[-len(swa) :], swa)
        if first > held and not self.spec.full_only:
            state.swa_start[row] = first
            state.flags[row] |= GAP
        side = int(state.c128_cols[row])
        self._put_sidecar(row, np.arange(side, side + len(c128)), c128)
        state.page_state[C128][c128] = HELD
        state.c128_count[c128] = 1
        state.c128_cols[row] = side + len(c128)
        state.held_cols[row] = columns
        state.allocated[row] = max(int(state.allocated[row]), new)

    def _put_columns(self, row: int, columns: I64, pages: I32 | I64 | int) -> None:
        self.state.block_table[row, columns] = pages
        self._mark(row * self.spec.columns + columns)

    def _put_sidecar(self, row: int, columns: I64, pages: I32 | I64 | int) -> None:
        self.state.c128_table[row, columns] = pages
        self._mark(self.state.c128_base + row * self.spec.sidecar_columns + columns)

    def _slots(self, row: int, start: int, stop: int) -> Slots:
        state, page, per = self.state, self.spec.page_size, self.spec.c128_page_size
        first, last = start // page, addressing.pages_for(stop, page)
        pages = state.block_table[row, first:last].astype(np.int64)
        offsets = np.arange(page)
        cut = slice(start - first * page, stop - first * page)
        full = (pages[:, None] * page + offsets).ravel()[cut]
        swa_pages = state.full_to_swa[pages].astype(np.int64)
        swa = np.where(swa_pages[:, None] > 0, swa_pages[:, None] * page + offsets, 0).ravel()[cut]
        if self.spec.full_only:
            none = np.zeros(0, np.int64)
            return full, swa, none, none
        c4 = addressing.c4_slots(full[full % addressing.C4_RATIO == addressing.C4_RATIO - 1])
        entries = np.arange(start // addressing.C128_RATIO, stop // addressing.C128_RATIO)
        c128 = state.c128_table[row, entries // per].astype(np.int64) * per + entries % per
        return full, swa, c4, c128


def _join(parts: list[Slots]) -> Slots:
    def one(family: int) -> I64:
        return np.concatenate([np.zeros(0, np.int64), *(part[family] for part in parts)])

    return one(0), one(1), one(2), one(3)
