"""The ledger: who holds which page. One contract, two implementations on one :class:`LedgerState`.

``cpp`` is the compiled core (``dsv4_npu._ledger``, no libtorch), ``python`` its twin: the oracle of the tests and the
fallback where nothing was compiled.
"""

from __future__ import annotations

import importlib
from typing import Literal, Protocol

from dsv4_npu.alloc.py_extend import Slots
from dsv4_npu.alloc.py_ledger import PyLedger
from dsv4_npu.alloc.spec import AllocSpec
from dsv4_npu.alloc.state import I32, I64, LedgerState
from dsv4_npu.errors import InputError, UnavailableError

Backend = Literal["auto", "cpp", "python"]


class Ledger(Protocol):
    """Calls of the core. Lengths and positions are tokens; ids are page ids; a failing call changes nothing.

    ``Slots`` are int64 arrays ``(full, swa, c4, c128)`` of a range of positions: FULL slots; SWA slots (0, a slot of
    the dummy page, where a position has no SWA page); C4 slots of the positions that close a C4 window
    (``p % 4 == 3``); C128 slots of those that close a C128 window (``p % 128 == 127``). Of a batch: in the order of
    ``rows``, joined. Row 0 in a batch is padding: nothing is allocated for it and its slots are 0.
    """

    backend: str

    def bind(self) -> None:
        """Take up the state's arrays again after a resize replaced some."""

    def take(self, full: int, swa: int, c128: int) -> tuple[I32, I32, I32]:
        """Take pages for a transaction, all or none (CapacityError)."""

    def untake(self, full: I32, swa: I32, c128: I32) -> None:
        """Give taken pages back in the reverse order."""

    def drain(self, horizon: int) -> None:
        """Free the pages that waited for epochs below ``horizon``."""

    def set_tag(self, epoch: int) -> None:
        """Epoch that pages freed from now on wait for; 0: none."""

    def open_row(self) -> int:
        """Take a request row."""

    def close(self, row: int) -> I32:
        """Release everything that the content of a row names, zero it, free it; returns the SWA pages it freed."""

    def commit(self, rows: I64, lens: I64) -> None:
        """Set committed lengths; forwards only, within allocated."""

    def rewind(self, row: int, target: int) -> None:
        """Set the committed length back, where the SWA window before the target is resident."""

    def plan(self, rows: I64, new_lens: I64, tails: I64) -> tuple[int, int, int]:
        """Pages of (FULL, SWA, C128) that extending the rows to ``new_lens`` needs; tail -1: all SWA pages mapped.

        A row is never shortened; C128 pages that a trim took from below ``allocated`` are counted again.
        """

    def write(
        self, rows: I64, old_lens: I64, new_lens: I64, tails: I64, full: I32, swa: I32, c128: I32, want: bool
    ) -> Slots:
        """Write taken pages into planned rows; the slots of ``[old, new)`` of each if ``want``, else empty arrays."""

    def decode_step(self, rows: I64, reserve: int, width: int) -> Slots:
        """Reserve ``ceil_page(committed + reserve)`` in all rows or none; slots of the next ``width`` positions."""

    def window(self, rows: I64, starts: I64, width: int) -> Slots:
        """Slots of ``[start, start + width)`` of each row."""

    def slots(self, row: int, start: int, stop: int) -> Slots:
        """Slots of ``[start, stop)`` of one row."""

    def attach(self, row: int, pages: I64, c128: I64, length: int) -> None:
        """Make pages held outside the row's leading columns; its own pages in these columns are freed."""

    def replace_c128(self, row: int, pages: I64) -> None:
        """Replace the leading C128 columns; the new pages are retained before the old ones are released."""

    def take_over(self, row: int, columns: int) -> tuple[I32, I32]:
        """Hand the leading columns to a holder outside; returns its FULL pages and the C128 pages retained for it."""

    def trim(self, row: int, boundary: int) -> None:
        """Give back whole pages behind ``boundary``."""

    def evict(self, row: int, width: int) -> int:
        """Free SWA pages wholly before the window; returns how many."""

    def free_slots(self, slots: I64) -> None:
        """Free the FULL and SWA page of every slot."""

    def free_swa_slots(self, slots: I64) -> None:
        """Free the SWA page of every slot where still mapped."""

    def free_pages(self, pages: I64) -> None:
        """Free FULL pages held outside, with their SWA pages."""

    def free_swa(self, pages: I64) -> None:
        """Free the SWA pages of FULL pages held outside."""

    def retain_c128(self, pages: I64) -> None:
        """Count holders of a multiset of pages."""

    def release_c128(self, pages: I64) -> None:
        """Take holders off a multiset of pages."""

    def collect(self, index: I64, value: I64) -> int:
        """Move the changed table entries into staging arrays."""

    def drain_swa_log(self) -> I32:
        """SWA pages freed since the last call."""


def compiled_ledger_available() -> bool:
    """Whether the compiled core can be imported."""
    try:
        importlib.import_module("dsv4_npu._ledger")
    except ImportError:
        return False
    return True


def make_ledger(spec: AllocSpec, backend: Backend = "auto") -> tuple[Ledger, LedgerState]:
    """A ledger with an empty state. ``auto`` takes the compiled core where it is there."""
    if backend not in ("auto", "cpp", "python"):
        raise InputError(f"backend = {backend!r}: 'auto', 'cpp' or 'python' is allowed")
    state = LedgerState(spec)
    compiled = backend != "python" and compiled_ledger_available()
    if backend == "cpp" and not compiled:
        raise UnavailableError(
            "the compiled ledger dsv4_npu._ledger is not there: install the package with a C++20 compiler and pybind11"
        )
    if not compiled:
        return PyLedger(state), state
    module = importlib.import_module("dsv4_npu._ledger")
    ledger: Ledger = module.Ledger(state)
    return ledger, state
