"""One page family as SGLang sees an allocator: sizes, free pages, and frees by slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

from dsv4_npu.alloc.state import C128, FULL, SWA
from dsv4_npu.errors import CapacityError, InputError

if TYPE_CHECKING:
    from dsv4_npu.sglang.allocator import KVAllocator


class Family(BaseTokenToKVPoolAllocator):  # type: ignore[misc]
    """A view of FULL, SWA or C128 of a :class:`~dsv4_npu.sglang.allocator.KVAllocator`; it owns nothing itself.

    ``size`` counts slots (C128: entries), ``page_size`` slots of a page.
    """

    debug_mode = False

    def __init__(self, owner: KVAllocator, family: int, size: int, page_size: int, kvcache: Any) -> None:
        self._owner, self._family = owner, family
        self.size, self.page_size, self.num_pages = size, page_size, size // page_size
        self.dtype, self.device, self.need_sort = owner.dtype, owner.device, owner.need_sort
        self._kvcache = kvcache
        self.free_group = None
        self.release_pages = None

    @property
    def free_pages(self) -> torch.Tensor:
        """Ids of the free pages, ascending."""
        self._owner.settle()
        state = self._owner.pages.state
        listed = np.sort(state.free_list[self._family][: state.free(self._family)]).astype(np.int64)
        return torch.from_numpy(listed).to(self.device)

    def get_all_free_pages(self) -> torch.Tensor:
        """Ids of the free pages, ascending."""
        return self.free_pages

    def available_size(self) -> int:
        """Slots of the free pages, those included whose ids are still on their way to the host."""
        return self._owner.free_tokens(self._family)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Whole pages of this family alone (a copy from the host fills them); None when they are not there."""
        count = need_size // self.page_size
        wanted = [0, 0, 0]
        wanted[self._family] = count
        try:
            taken = self._owner.take(*wanted)[self._family]
        except CapacityError:
            return None
        pages = torch.from_numpy(taken.astype(np.int64)).to(self.device)
        return (pages[:, None] * self.page_size + torch.arange(self.page_size, device=self.device)).reshape(-1)

    def free(self, free_index: torch.Tensor) -> None:
        """Free the pages of an arbitrary set of slots."""
        if free_index.numel():
            self._release(free_index // self.page_size, False)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """Free the pages of consecutive slots that begin with a page."""
        if start_pos % self.page_size:
            raise InputError(f"start_pos = {start_pos}; a multiple of the page, {self.page_size}, is needed")
        if free_index.numel():
            self._release(free_index[:: self.page_size] // self.page_size, True)

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        """Free exactly these pages."""
        if page_ids.numel():
            self._release(page_ids, True)

    def clear(self) -> None:
        """The owner begins anew with all families at once."""
        raise InputError("a family is not cleared alone; clear the allocator")

    def _release(self, pages: torch.Tensor, distinct: bool) -> None:
        pick = (lambda ids: ids) if distinct else np.unique
        core = self._owner.pages
        calls = {FULL: core.free_full, SWA: core.free_swa_ids, C128: core.give_back_c128}
        call = calls[self._family]
        self._owner.later(pages, lambda ids: call(pick(ids)), {self._family: pages.numel()} if distinct else None)
