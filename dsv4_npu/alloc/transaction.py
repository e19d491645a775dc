"""A transaction: plan a batch from host lengths, reserve every family or none, commit, or roll back."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple

import numpy as np

from dsv4_npu import addressing
from dsv4_npu.alloc.ledger import Ledger
from dsv4_npu.alloc.py_extend import NO_TAIL
from dsv4_npu.alloc.spec import FamilyCounts
from dsv4_npu.alloc.state import C128, FULL, I32, I64, SWA, LedgerState
from dsv4_npu.errors import InputError


class OutCacheLoc(NamedTuple):
    """Slots (int64) of a range of positions per request, requests joined in batch order.

    ``out_swa`` is 0, a slot of the dummy page, where a position has no SWA page. ``out_c4`` lists the positions that
    close a C4 window (``p % 4 == 3``), ``out_c128`` those that close a C128 window (``p % 128 == 127``).
    """

    out_full: I64
    out_swa: I64
    out_c4: I64
    out_c128: I64


class Transaction:
    """Use as a context manager: leaving the block without :meth:`commit` restores every family.

    The planned rows may not change their allocated length between planning and commit (OwnershipError at commit,
    nothing changed). A row can be planned once per transaction.
    """

    def __init__(self, ledger: Ledger, state: LedgerState, open_transactions: set[Transaction]) -> None:
        self._ledger, self._state = ledger, state
        self._open = open_transactions
        self._parts: list[tuple[I64, I64, I64, I64]] = []
        self._planned: set[int] = set()
        self._taken: tuple[I32, I32, I32] | None = None
        self._need = FamilyCounts(0, 0, 0)
        self._closed = False

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rollback()

    def extend(self, row: int, new_len: int, swa_tail: int | None = None) -> None:
        """Plan positions ``[allocated, new_len)`` of a row; a shorter ``new_len`` plans none.

        ``swa_tail`` = N gives SWA pages only to the pages that cover the last N positions (0: none of the new ones).
        Raises CapacityError when the row is too narrow; nothing is clamped.
        """
        self.extend_batch(np.array([row], np.int64), np.array([new_len], np.int64), swa_tail)

    def extend_batch(self, rows: I64, new_lens: I64, swa_tail: int | None = None) -> None:
        """:meth:`extend` for a batch: ``rows`` and ``new_lens`` int64 of one length."""
        if swa_tail is not None and swa_tail < 0:
            raise InputError(f"swa_tail = {swa_tail}: 0 or more is allowed")
        self._check_running()
        if self._taken is not None:
            raise InputError("the transaction has reserved its pages: nothing more can be planned in it")
        if rows.ndim != 1 or rows.shape != new_lens.shape:
            raise InputError(f"rows {rows.shape} and lengths {new_lens.shape}: one dimension and one length are needed")
        listed = rows.tolist()
        if len(set(listed)) < len(listed) or not self._planned.isdisjoint(listed):
            raise InputError(f"rows {listed}: a transaction plans a row once")
        tails = np.full(len(listed), NO_TAIL if swa_tail is None else swa_tail, np.int64)
        need = self._ledger.plan(rows, new_lens, tails)
        old = self._state.allocated[rows]
        self._parts.append((rows.copy(), old, np.maximum(old, new_lens), tails))
        self._planned.update(listed)
        self._need = FamilyCounts(*(a + b for a, b in zip(self._need, need, strict=True)))

    def reserve_decode(self, row: int, reserve: int) -> None:
        """Plan ``max(allocated, ceil_page(committed + reserve))`` for the next decode of a row."""
        if reserve < 0:
            raise InputError(f"reserve = {reserve}: 0 or more is allowed")
        zero = np.zeros(1, np.int64)
        self._ledger.plan(zero + row, zero, zero)
        wanted = addressing.ceil_to(int(self._state.committed[row]) + reserve, self._state.spec.page_size)
        self.extend(row, max(int(self._state.allocated[row]), wanted))

    @property
    def need(self) -> FamilyCounts:
        """New pages of each family that the plan needs, after the room in partly filled pages."""
        return self._need

    def fits(self) -> bool:
        """Whether every family has the free pages that the plan needs."""
        need = self.need
        return all(need[family] <= self._state.free(family) for family in (FULL, SWA, C128))

    def reserve(self) -> None:
        """Take the pages of every family, or of none: CapacityError names family, need and free pages."""
        self._check_running()
        if self._taken is not None:
            raise InputError("the transaction has reserved its pages already")
        self._taken = self._ledger.take(*self.need)
        self._open.add(self)

    def commit(self, slots: bool = True) -> OutCacheLoc:
        """Write the pages into the rows; returns the slots of the newly covered positions (empty if not ``slots``)."""
        self._check_running()
        if self._taken is None:
            self.reserve()
        assert self._taken is not None
        rows, old, new, tails = self._arrays()
        out = self._ledger.write(rows, old, new, tails, *self._taken, slots)
        self._taken = None
        self._finish()
        return OutCacheLoc(*out)

    def rollback(self) -> None:
        """Give every taken page back; after a commit, or a second time, nothing is left to do."""
        if self._taken is not None:
            self._ledger.untake(*self._taken)
            self._taken = None
        self._finish()

    def taken(self) -> tuple[I32, I32, I32]:
        """Pages of (FULL, SWA, C128) reserved and not yet written, for the audit."""
        none = np.zeros(0, np.int32)
        return self._taken if self._taken is not None else (none, none, none)

    def _arrays(self) -> tuple[I64, I64, I64, I64]:
        if len(self._parts) == 1:
            return self._parts[0]
        none = np.zeros(0, np.int64)
        rows, old, new, tails = (np.concatenate([none, *(part[i] for part in self._parts)]) for i in range(4))
        return rows, old, new, tails

    def _check_running(self) -> None:
        if self._closed:
            raise InputError("the transaction is over: begin another")

    def _finish(self) -> None:
        self._closed = True
        self._open.discard(self)
