"""Request rows in plain Python: open, close, commit, rewind, prefixes, trim, window eviction."""

from __future__ import annotations

import numpy as np

from dsv4_npu import addressing
from dsv4_npu.alloc.py_extend import PyExtend
from dsv4_npu.alloc.state import FULL, GAP, HELD, HOLES, I32, I64, OUTSIDE, ROW
from dsv4_npu.errors import CapacityError, InputError, OwnershipError


class PyLedger(PyExtend):
    """The whole ledger; see :class:`~dsv4_npu.alloc.ledger.Ledger` for the contract of each call."""

    backend = "python"

    def open_row(self) -> int:
        if not self.state.free(ROW):
            raise CapacityError(
                f"request rows: need 1, free 0 of {self.state.total(ROW)}, "
                f"waiting for an epoch {self.state.waiting(ROW)}"
            )
        self._step()
        return int(self._pop(ROW, 1, HELD)[0])

    def close(self, row: int) -> I32:
        self._check_open(row)
        self._step()
        state = self.state
        columns = np.flatnonzero(state.block_table[row])
        pages = state.block_table[row, columns].astype(np.int64)
        owned = (state.page_state[FULL][pages] == HELD) & (state.full_owner[pages] == row)
        self._put_columns(row, columns, 0)
        state.full_readers[pages[~owned]] -= 1
        swa = self._free_full(pages[owned])
        side = np.flatnonzero(state.c128_table[row])
        held = state.c128_table[row, side].astype(np.int64)
        self._put_sidecar(row, side, 0)
        self._release(held)
        for lengths in (state.committed, state.allocated):
            lengths[row] = 0
        for columns_of in (state.held_cols, state.c128_cols, state.shared_cols, state.evict_cursor, state.swa_start):
            columns_of[row] = 0
        state.flags[row] = 0
        self._put(ROW, np.array([row], np.int32))
        return swa

    def commit(self, rows: I64, lens: I64) -> None:
        for row, length in zip(rows.tolist(), lens.tolist(), strict=True):
            if row == 0:
                continue
            self._check_open(row)
            now, limit = int(self.state.committed[row]), int(self.state.allocated[row])
            if not now <= length <= limit:
                raise OwnershipError(
                    f"row {row}: committed = {length}: {now} (committed) to {limit} (allocated) is allowed; "
                    f"only rewind goes back"
                )
        self._step()
        live = rows != 0
        self.state.committed[rows[live]] = lens[live]

    def rewind(self, row: int, target: int) -> None:
        self._check_open(row)
        state = self.state
        low, high = int(state.shared_cols[row]) * self.spec.page_size, int(state.committed[row])
        if not low <= target <= high:
            raise OwnershipError(
                f"row {row}: rewind to {target}: {low} (shared prefix) to {high} (committed) is allowed"
            )
        self._check_window(row, target, "rewind")
        self._step()
        state.committed[row] = target

    def attach(self, row: int, pages: I64, c128: I64, length: int) -> None:
        self._check_prefix(row, pages, c128, length)
        self._step()
        state, columns = self.state, len(pages)
        old = state.block_table[row, :columns]
        old = old[old > 0].astype(np.int64)
        owned = (state.page_state[FULL][old] == HELD) & (state.full_owner[old] == row)
        state.full_readers[pages] += 1
        state.full_readers[old[~owned]] -= 1
        self._put_columns(row, np.arange(columns), pages)
        self._free_full(old[owned])
        self._replace_c128(row, c128)
        if state.swa_start[row] <= columns and not self.spec.full_only:
            unmapped = np.flatnonzero(state.full_to_swa[pages] == 0)
            state.swa_start[row] = unmapped[-1] + 1 if len(unmapped) else 0
        state.shared_cols[row] = columns
        state.held_cols[row] = max(int(state.held_cols[row]), columns)
        state.allocated[row] = max(int(state.allocated[row]), length)
        state.committed[row] = max(int(state.committed[row]), length)

    def replace_c128(self, row: int, pages: I64) -> None:
        self._check_open(row)
        if len(pages) > self.spec.sidecar_columns:
            raise CapacityError(f"row {row}: {len(pages)} C128 pages, the row has {self.spec.sidecar_columns} columns")
        for page in pages.tolist():
            self._check_counted(page)
        self._step()
        self._replace_c128(row, pages)

    def take_over(self, row: int, columns: int) -> tuple[I32, I32]:
        self._check_open(row)
        state, page = self.state, self.spec.page_size
        first, limit = int(state.shared_cols[row]), int(state.committed[row]) // page
        if not first <= columns <= limit:
            raise OwnershipError(
                f"row {row}: take over {columns} columns: {first} (shared already) to {limit} "
                f"(wholly committed) is allowed"
            )
        self._check_whole(row)
        self._step()
        pages = state.block_table[row, first:columns].copy()
        state.page_state[FULL][pages] = OUTSIDE
        state.full_owner[pages] = 0
        state.full_readers[pages] += 1
        group = self.spec.group_tokens
        # Without a C128 family the sidecar has no columns, so this is empty.
        c128 = state.c128_table[row, first * page // group : columns * page // group].copy()
        for held in c128.tolist():
            state.c128_count[held] += 1
        state.shared_cols[row] = columns
        return pages, c128

    def trim(self, row: int, boundary: int) -> None:
        self._check_open(row)
        state, page = self.state, self.spec.page_size
        low, high = int(state.shared_cols[row]) * page, int(state.allocated[row])
        if not low <= boundary <= high:
            raise OwnershipError(
                f"row {row}: trim to {boundary}: {low} (shared prefix) to {high} (allocated) is allowed"
            )
        self._step()
        keep, held = addressing.pages_for(boundary, page), int(state.held_cols[row])
        columns = keep + np.flatnonzero(state.block_table[row, keep:held])
        pages = state.block_table[row, columns].astype(np.int64)
        self._put_columns(row, columns, 0)
        self._free_full(pages)
        self._cut_c128(row, self._c128_columns(boundary))
        state.held_cols[row] = min(held, keep)
        state.allocated[row] = min(high, keep * page)
        state.committed[row] = min(int(state.committed[row]), boundary)
        state.evict_cursor[row] = min(int(state.evict_cursor[row]), keep)
        state.swa_start[row] = min(int(state.swa_start[row]), keep)
        if not self._readable(row, int(state.committed[row])):
            state.flags[row] |= GAP

    def evict(self, row: int, width: int) -> int:
        self._check_open(row)
        state = self.state
        bound = (int(state.committed[row]) - max(self.spec.window, width)) // self.spec.page_size
        if bound <= state.evict_cursor[row] or self.spec.full_only:
            return 0
        self._step()
        first = max(int(state.evict_cursor[row]), int(state.shared_cols[row]))
        pages = state.block_table[row, first:bound] if first < bound else state.block_table[row, :0]
        freed = self._unmap(pages[pages > 0].astype(np.int64))
        state.evict_cursor[row] = bound
        state.swa_start[row] = max(int(state.swa_start[row]), bound)
        return len(freed)

    def free_slots(self, slots: I64) -> None:
        pages = self._slot_pages(slots)
        for page in pages.tolist():
            if self.state.page_state[FULL][page] != HELD:
                self._check_outside(page)
                if self.state.full_readers[page]:
                    raise OwnershipError(
                        f"FULL page {page} is read as a shared prefix by {self.state.full_readers[page]} rows: "
                        f"it can be freed only when no row reads it"
                    )
        self._step()
        for page in pages.tolist():
            row = int(self.state.full_owner[page])
            if row:
                self._put_columns(row, self._column_of(row, page), 0)
                self.state.flags[row] |= HOLES
        self._free_full(pages)

    def free_swa_slots(self, slots: I64) -> None:
        pages = self._slot_pages(slots)
        for page in pages.tolist():
            if self.state.page_state[FULL][page] != HELD:
                self._check_outside(page)
        self._step()
        for page in pages.tolist():
            row = int(self.state.full_owner[page])
            if row and self.state.full_to_swa[page]:
                start = int(self.state.swa_start[row])
                self.state.swa_start[row] = max(start, int(self._column_of(row, page)[0]) + 1)
                self.state.flags[row] |= GAP
        self._unmap(pages)

    def _check_prefix(self, row: int, pages: I64, c128: I64, length: int) -> None:
        self._check_open(row)
        self._check_whole(row)
        state, page, group = self.state, self.spec.page_size, self.spec.group_tokens
        whole = self.spec.full_only or (length // addressing.C128_RATIO) % self.spec.c128_page_size == 0
        if length < 0 or length % page or not whole:
            raise InputError(
                f"row {row}: prefix of {length} tokens: whole pages of {page} tokens and whole C128 pages of "
                f"{group} tokens are shared"
            )
        self._check_width(row, length)
        low = int(state.shared_cols[row]) * page
        if length < low:
            raise OwnershipError(f"row {row}: prefix of {length} tokens is shorter than the shared {low}")
        groups = 0 if self.spec.full_only else length // group
        if len(pages) != length // page or len(c128) != groups:
            raise InputError(
                f"row {row}: prefix of {length} tokens: {len(pages)} FULL and {len(c128)} C128 pages, "
                f"{length // page} and {groups} are needed"
            )
        seen: set[int] = set()
        for held in pages.tolist():
            self._check_outside(held)
            if held in seen:
                raise InputError(f"FULL page {held} appears twice in one prefix")
            seen.add(held)
        for held in c128.tolist():
            self._check_counted(held)
        first = max(0, max(int(state.committed[row]), length) - self.spec.window + 1) // page
        for column in range(first, 0 if self.spec.full_only else len(pages)):
            if not state.full_to_swa[pages[column]]:
                raise OwnershipError(
                    f"row {row}: prefix of {length} tokens: FULL page {pages[column]} in the last window "
                    f"has no SWA page"
                )

    def _replace_c128(self, row: int, pages: I64) -> None:
        state = self.state
        old = state.c128_table[row, : len(pages)]
        old = old[old > 0].astype(np.int64)
        for page in pages.tolist():
            state.c128_count[page] += 1
        self._put_sidecar(row, np.arange(len(pages)), pages)
        self._release(old)
        state.c128_cols[row] = max(int(state.c128_cols[row]), len(pages))

    def _cut_c128(self, row: int, keep: int) -> None:
        state, held = self.state, int(self.state.c128_cols[row])
        columns = np.arange(keep, max(keep, held))
        pages = state.c128_table[row, columns]
        self._put_sidecar(row, columns, 0)
        self._release(pages[pages > 0])
        state.c128_cols[row] = min(held, keep)

    def _slot_pages(self, slots: I64) -> I64:
        """The FULL pages of slots, each once, in the order of their first slot."""
        limit = (self.state.total(FULL) + 1) * self.spec.page_size
        for slot in slots.tolist():
            if not self.spec.page_size <= slot < limit:
                raise InputError(f"FULL slot {slot}: {self.spec.page_size} to {limit - 1} is allowed")
        return np.array(list(dict.fromkeys((slots // self.spec.page_size).tolist())), np.int64)

    def _column_of(self, row: int, page: int) -> I64:
        return np.flatnonzero(self.state.block_table[row] == page)
