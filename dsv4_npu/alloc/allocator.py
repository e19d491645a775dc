"""The owner of every KV page: rows, transactions, prefixes, eviction, epochs, mirrors, audit."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from dsv4_npu import addressing
from dsv4_npu.alloc.audit import audit
from dsv4_npu.alloc.epochs import Epochs
from dsv4_npu.alloc.export import RowPages, row_pages
from dsv4_npu.alloc.ledger import Backend, make_ledger
from dsv4_npu.alloc.mirrors import Mirrors
from dsv4_npu.alloc.spec import AllocSpec
from dsv4_npu.alloc.state import C128, FAMILY_NAMES, FREE, HELD, I32, I64, PEAK, ROW
from dsv4_npu.alloc.transaction import OutCacheLoc, Transaction
from dsv4_npu.errors import CapacityError, InputError, OwnershipError

Ids = Sequence[int] | npt.NDArray[np.integer]


class Holder(Protocol):
    """A holder of pages outside of the rows, such as a prefix cache."""

    def held_pages(self) -> tuple[Ids, Ids, Ids]:
        """FULL pages held; those of them whose SWA page is held too; the multiset of C128 pages held."""


@dataclass(frozen=True)
class Cleanup:
    """What must be cleared on the device before anyone else uses it: nothing here is a page to give back.

    ``row``: the request row whose banks (C128 rings; C4 rings where the request owns them) become empty.
    ``swa_pages``: int32, SWA pages that went free; where they own C4 state, their banks become empty.
    """

    row: int
    swa_pages: I32
    c4_request_bank: bool


def _ids(values: Ids) -> I64:
    array = np.ascontiguousarray(values, dtype=np.int64)
    if array.ndim != 1:
        raise InputError(f"ids of shape {array.shape}: one dimension is needed")
    return array


def _pairs(rows: Ids, values: Ids) -> tuple[I64, I64]:
    listed, numbers = _ids(rows), _ids(values)
    if len(listed) != len(numbers):
        raise InputError(f"{len(listed)} rows and {len(numbers)} lengths: one length for each row is needed")
    return listed, numbers


class KVAllocator:
    """Ownership of FULL, SWA and C128 pages and of the request rows. Holds no payload.

    Args:
        spec: the sizes.
        device: where the mirrors live.
        backend: ``auto`` (the compiled ledger where it is there), ``cpp`` or ``python``.

    Every call raises before it changes anything. Lengths and positions count tokens.
    """

    def __init__(self, spec: AllocSpec, *, device: str | torch.device = "cpu", backend: Backend = "auto") -> None:
        self.spec = spec
        self.ledger, self.state = make_ledger(spec, backend)
        self.epochs = Epochs()
        self.mirrors = Mirrors(self.ledger, self.state, self.epochs, torch.device(device))
        self.holders: dict[str, Holder] = {}
        self.transactions: set[Transaction] = set()
        self._rid_of: dict[int, Hashable] = {}
        self._row_of: dict[Hashable, int] = {}

    def open(self, rid: Hashable) -> int:
        """Give a request a row (>= 1); CapacityError when none is free."""
        if rid in self._row_of:
            raise OwnershipError(f"request {rid!r} has row {self._row_of[rid]} already")
        row = self.ledger.open_row()
        self._rid_of[row] = rid
        self._row_of[rid] = row
        return row

    def close(self, row: int, rid: Hashable | None = None) -> Cleanup:
        """Release everything a row names and the row itself; finish, abort and retract all end here, exactly once.

        What is released is read from the row's content, whatever its lengths say. A second call raises OwnershipError
        unless the row was given out again, so pass ``rid`` to make that an error too.
        """
        if rid is not None and self._rid_of.get(row, rid) != rid:
            raise OwnershipError(f"row {row} belongs to request {self._rid_of[row]!r}, not to {rid!r}")
        swa = self.ledger.close(row)
        self._row_of.pop(self._rid_of.pop(row))
        return Cleanup(row, swa, self.spec.c4_state_owner == "request")

    def rid_of(self, row: int) -> Hashable:
        """The request of an open row."""
        if row not in self._rid_of:
            raise OwnershipError(f"row {row} is not open")
        return self._rid_of[row]

    def row_of(self, rid: Hashable) -> int:
        """The row of a request."""
        if rid not in self._row_of:
            raise OwnershipError(f"request {rid!r} has no row")
        return self._row_of[rid]

    def requests(self) -> dict[int, Hashable]:
        """Open rows and their requests."""
        return dict(self._rid_of)

    def rows(self) -> list[int]:
        """Open rows, ascending."""
        return np.flatnonzero(self.state.page_state[ROW] == HELD).tolist()

    def committed(self, row: int) -> int:
        """Length of the valid history of a row."""
        return int(self.state.committed[row])

    def allocated(self, row: int) -> int:
        """Positions that a row has slots for."""
        return int(self.state.allocated[row])

    def shared(self, row: int) -> int:
        """Leading positions of a row that a holder outside owns."""
        return int(self.state.shared_cols[row]) * self.spec.page_size

    def admit_check(self, total_len: int) -> None:
        """Refuse (CapacityError) a request that no row, or no empty pool, could ever hold: ``total_len`` tokens.

        ``total_len`` counts everything that will be allocated at once: history and decode reserve.
        """
        need = addressing.ceil_to(total_len, self.spec.page_size)
        if need > self.spec.row_width:
            raise CapacityError(
                f"a request of {total_len} tokens needs a row of {need} tokens: row_width = {self.spec.row_width}"
            )
        pages = addressing.pages_for(total_len, self.spec.page_size)
        c128 = 0 if self.spec.full_only else addressing.c128_columns(total_len, self.spec.c128_page_size)
        for name, count, total in (("FULL", pages, self.spec.full_pages), ("C128", c128, self.spec.c128_pages)):
            if count > total:
                raise CapacityError(f"a request of {total_len} tokens needs {count} {name} pages: {total} exist")

    def transaction(self) -> Transaction:
        """Begin to plan a batch."""
        return Transaction(self.ledger, self.state, self.transactions)

    def decode_step(self, rows: Ids, reserve: int, width: int | None = None) -> OutCacheLoc:
        """Plan, reserve and commit one decode of a batch in one call, all rows or none.

        Each row gets ``max(allocated, ceil_page(committed + reserve))`` positions. Returns the slots of the next
        ``width`` positions of each row, ``[committed, committed + width)`` (``spec.verify_width`` by default):
        what a verify writes. Row 0 is padding: its slots are 0.
        """
        wanted = self.spec.verify_width if width is None else width
        return OutCacheLoc(*self.ledger.decode_step(_ids(rows), reserve, wanted))

    def commit(self, row: int, length: int) -> None:
        """Set the committed length of a row: forwards only, at most allocated."""
        self.ledger.commit(np.array([row], np.int64), np.array([length], np.int64))

    def commit_batch(self, rows: Ids, lens: Ids) -> None:
        """Set the committed lengths of a batch, all or none; row 0 is ignored."""
        self.ledger.commit(*_pairs(rows, lens))

    def slots(self, row: int, start: int, stop: int) -> OutCacheLoc:
        """Slots of positions ``[start, stop)`` of a row; a hole raises OwnershipError, never slot of the dummy."""
        return OutCacheLoc(*self.ledger.slots(row, start, stop))

    def window(self, rows: Ids, starts: Ids, width: int) -> OutCacheLoc:
        """Slots of ``[start, start + width)`` of each row of a batch; row 0 is padding: its slots are 0."""
        return OutCacheLoc(*self.ledger.window(*_pairs(rows, starts), width))

    def row_pages(self, row: int, length: int) -> RowPages:
        """Pages of the first ``length`` committed tokens of a row, to be sent elsewhere; a hole raises."""
        return row_pages(self, row, length)

    def attach_prefix(self, row: int, full_pages: Ids, c128_pages: Ids, length: int) -> None:
        """Make ``length`` leading tokens of a row a shared prefix whose pages a holder outside owns.

        ``length`` is a multiple of the page and of the C128 group. Own pages in the replaced columns are freed; the
        row retains the new C128 pages before it releases the old ones. An empty row then has ``committed =
        allocated = length``. OwnershipError when a page is not held outside, or when the sliding window before the
        committed end has no SWA page.
        """
        self.ledger.attach(row, _ids(full_pages), _ids(c128_pages), length)

    def replace_c128_prefix(self, row: int, c128_pages: Ids) -> None:
        """Replace the leading C128 columns of a row: new pages are retained first, then the old ones released."""
        self.ledger.replace_c128(row, _ids(c128_pages))

    def take_over(self, row: int, columns: int) -> tuple[I32, I32]:
        """Hand the first ``columns`` FULL pages (with their SWA pages) of a row to a holder outside, exactly once.

        Returns the FULL pages that changed hands and the C128 pages of complete groups among them, which were
        retained for the holder. The row keeps reading them as its shared prefix. Only committed history changes hands.
        """
        return self.ledger.take_over(row, columns)

    def retain_c128(self, pages: Ids) -> None:
        """Count a holder for each entry of a multiset of C128 pages."""
        self.ledger.retain_c128(_ids(pages))

    def release_c128(self, pages: Ids) -> None:
        """Take off a holder for each entry of a multiset of C128 pages."""
        self.ledger.release_c128(_ids(pages))

    def free_pages(self, full_pages: Ids) -> None:
        """Free FULL pages held outside that no row reads, with the SWA pages that they still map."""
        self.ledger.free_pages(_ids(full_pages))

    def free_swa(self, full_pages: Ids) -> None:
        """Free the SWA pages of FULL pages held outside; unmapped ones are left alone."""
        self.ledger.free_swa(_ids(full_pages))

    def free_slots(self, slots: Ids) -> None:
        """Free the whole FULL page, and its SWA page, of every slot (callers align); C128 is not touched.

        A row that owned such a page can only be closed afterwards.
        """
        self.ledger.free_slots(_ids(slots))

    def free_swa_slots(self, slots: Ids) -> None:
        """Free the SWA page of every slot's FULL page; an unmapped one is left alone."""
        self.ledger.free_swa_slots(_ids(slots))

    def trim(self, row: int, boundary: int) -> None:
        """Give back the pages wholly behind ``boundary`` (from ``ceil_page(boundary)``) and set the lengths.

        C128 columns behind ``boundary // 128`` entries are released. The boundary may not lie inside the shared prefix.
        """
        self.ledger.trim(row, boundary)

    def rewind(self, row: int, target: int) -> None:
        """Set the committed length back; pages stay. Raises where the SWA window before ``target`` was evicted.

        Whether the compressor state allows it is for the caller to prove.
        """
        self.ledger.rewind(row, target)

    def evict_window(self, row: int, verify_width: int | None = None) -> int:
        """Free the row's own SWA pages wholly before ``floor_page(committed - max(window, D))``; returns how many."""
        return self.ledger.evict(row, self.spec.verify_width if verify_width is None else verify_width)

    def launch(self) -> int:
        """Begin an epoch: a forward that may read every page mapped now. Flush the mirrors before."""
        epoch = self.epochs.launch()
        self.ledger.set_tag(self.epochs.tag)
        return epoch

    def done(self, epoch: int) -> None:
        """End an epoch; pages freed while it and earlier ones were in flight become reusable."""
        self.epochs.done(epoch)
        self.ledger.set_tag(self.epochs.tag)
        self.ledger.drain(self.epochs.horizon)

    def drain_freed_swa(self) -> I32:
        """SWA pages freed since the last call. On A2/A3 their C4 state must be cleared before the next forward."""
        return self.ledger.drain_swa_log()

    def flush(self) -> int:
        """Send all pending table changes to the mirrors in one asynchronous copy; returns the entries sent."""
        return self.mirrors.flush()

    def register_holder(self, name: str, holder: Holder) -> None:
        """Let the audit count the pages of a holder outside of the rows."""
        if name in self.holders:
            raise InputError(f"holder {name!r} is registered already")
        self.holders[name] = holder

    def audit(self, deep: bool = True) -> None:
        """Check every invariant; raises AuditError that names family, page, holders and step."""
        audit(self, deep)

    def usage(self) -> dict[str, tuple[int, int, int]]:
        """Per family (``FULL``, ``SWA``, ``C128``, ``ROW``): pages out of the free list, their peak, the total.

        Families that the model has not are left out.
        """
        state = self.state
        return {
            name: (state.total(f) - state.free(f), int(state.counters[PEAK + f]), state.total(f))
            for f, name in enumerate(FAMILY_NAMES)
            if state.total(f)
        }

    def resize_c128(self, pages: int) -> None:
        """Change the number of usable C128 pages; pages above a smaller number must be free."""
        if pages < 1:
            raise InputError(f"c128 pages = {pages}: 1 or more is allowed")
        if self.spec.full_only:
            raise InputError(f"c128 pages = {pages}: the allocator has FULL pages alone")
        used = np.flatnonzero(self.state.page_state[C128][pages + 1 :] != FREE)
        if len(used):
            raise OwnershipError(f"C128 page {pages + 1 + int(used[0])} is in use: resize to {pages} pages is refused")
        self.state.resize_c128(pages)
        self.ledger.bind()
