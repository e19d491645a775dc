"""How pages come back: SGLang names them by slots on the device, the ledger by ids on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dsv4_npu.alloc.slot_pages import SlotPages
from dsv4_npu.alloc.state import FULL, SWA
from dsv4_npu.errors import InputError, OwnershipError
from dsv4_npu.sglang.late_reads import LateReads

I64 = npt.NDArray[np.int64]


class Releases:
    """The part of the allocator that frees and moves pages; mixed into it.

    On a CPU the ledger judges a call at once, so a refused one leaves the device's mapping alone. On a device the ids
    arrive late and the error is raised by a later call.
    """

    pages: SlotPages
    page_size: int
    free_group: list[torch.Tensor] | None
    full_to_swa_index_mapping: torch.Tensor
    _kvcache: Any
    _mapping: torch.Tensor
    _late: LateReads
    _promised: list[int]
    _uncounted: int

    def settle(self) -> None:
        """Learn every freed page whose ids are still on their way from the device."""
        self._late.settle()

    def later(self, ids: torch.Tensor, call: Callable[[I64], Any], counts: dict[int, int] | None) -> None:
        """Do ``call`` with page ids of the device once they are here; ``counts`` says how many pages go free by it.

        Without ``counts`` the host has to wait for the ids before it can say what is free.
        """
        if counts is None:
            self._uncounted += 1
        else:
            for family, count in counts.items():
                self._promised[family] += count

        def done(values: I64) -> None:
            if counts is None:
                self._uncounted -= 1
            else:
                for family, count in counts.items():
                    self._promised[family] -= count
            call(values)

        self._late.submit(ids, done)

    def free(self, free_index: torch.Tensor | None = None, *, req: Any = None, req_to_token_pool: Any = None) -> None:
        """Free the FULL and SWA pages of a set of slots; with ``req``, what hangs on the request's row.

        The row's C128 pages are released by its content, whatever lengths the request says, and its states are
        emptied before the row can be given out again.
        """
        if free_index is not None and free_index.numel():
            ids = free_index.to(torch.int64) // self.page_size
            self.later(ids, lambda found: self.pages.free_both(np.unique(found)), None)
            self._forget(ids)
        if req is None or req_to_token_pool is None or req.kv.req_pool_idx is None:
            return
        row = int(req.kv.req_pool_idx)
        req_to_token_pool.clear_row(row)
        self._kvcache.clear_request_scoped_state(row)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """Free the FULL and SWA pages of consecutive positions from ``start_pos``, a multiple of the page."""
        if free_index.numel():
            ids = self._segment(free_index, start_pos)
            count = ids.numel()
            self.later(ids, self.pages.free_both, {FULL: count, SWA: count})
            self._forget(ids)

    def free_full(self, free_index: torch.Tensor) -> None:
        """Free the FULL pages of slots whose SWA pages went before; OwnershipError where one did not."""
        if free_index.numel():
            self.later(free_index.to(torch.int64) // self.page_size, lambda ids: self._full_only(np.unique(ids)), None)

    def free_full_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """:meth:`free_full` of consecutive positions."""
        if free_index.numel():
            ids = self._segment(free_index, start_pos)
            self.later(ids, self._full_only, {FULL: ids.numel()})

    def free_swa(self, free_index: torch.Tensor) -> None:
        """Free the SWA pages of a set of FULL slots; slots without one are left alone."""
        if free_index.numel():
            ids = free_index.to(torch.int64) // self.page_size
            self.later(ids, lambda found: self.pages.free_peers(np.unique(found)), None)
            self._forget(ids)

    def free_swa_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """:meth:`free_swa` of consecutive positions."""
        if free_index.numel():
            ids = self._segment(free_index, start_pos)
            self.later(ids, self.pages.free_peers, {SWA: ids.numel()})
            self._forget(ids)

    def free_group_begin(self) -> None:
        """Frees take effect at once, so a group is only a mark."""
        if self.free_group is not None:
            raise InputError("free groups cannot be nested")
        self.free_group = []

    def free_group_end(self) -> None:
        """See :meth:`free_group_begin`."""
        self.free_group = None

    def set_full_to_swa_mapping(self, full_indices: torch.Tensor, swa_indices: torch.Tensor) -> None:
        """Give loose SWA pages to FULL pages, both named by all their slots; slots 0 name no page."""
        if not full_indices.numel():
            return
        if full_indices.numel() != swa_indices.numel():
            raise InputError(f"{full_indices.numel()} FULL and {swa_indices.numel()} SWA slots: as many are needed")
        full, swa = full_indices.to(torch.int64), swa_indices.to(torch.int64)
        pairs = torch.stack((full[:: self.page_size], swa[:: self.page_size])) // self.page_size

        def attach(ids: I64) -> None:
            known = ids[1] > 0
            self.pages.attach(ids[0][known], ids[1][known])

        self.later(pairs, attach, {})
        self.full_to_swa_index_mapping[full] = swa

    def clear_full_to_swa_mapping(self, full_indices: torch.Tensor) -> None:
        """Take the SWA pages away from FULL pages without freeing them: the next mapping names their owner."""
        if full_indices.numel():
            ids = full_indices.to(torch.int64)[:: self.page_size] // self.page_size
            self.later(ids, self.pages.detach, {})
            self._forget(ids)

    def _segment(self, free_index: torch.Tensor, start_pos: int) -> torch.Tensor:
        if start_pos % self.page_size:
            raise InputError(f"start_pos = {start_pos}; a multiple of the page, {self.page_size}, is needed")
        return free_index[:: self.page_size].to(torch.int64) // self.page_size

    def _forget(self, full_ids: torch.Tensor) -> None:
        self._mapping.index_fill_(0, full_ids.view(-1), 0)

    def _full_only(self, ids: I64) -> None:
        mapped = ids[self.pages.state.full_to_swa[ids] != 0]
        if len(mapped):
            raise OwnershipError(f"FULL page {mapped[0]} still has an SWA page: free_segment frees both")
        self.pages.free_full(ids)
