"""How much is free, in the tokens that SGLang's scheduler counts, with C128 pages counted as what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode, page_aligned_decode_alloc_lens
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.prefill_budget import SWAPrefillBudget

from dsv4_npu import addressing
from dsv4_npu.alloc.sidecar_rows import entries_of
from dsv4_npu.alloc.slot_pages import SlotPages
from dsv4_npu.alloc.state import C128, FULL, SWA


class Capacity:
    """The part of the allocator that only answers questions; mixed into it."""

    pages: SlotPages
    page_size: int
    full_attn_allocator: Any
    swa_attn_allocator: Any
    _table: Any

    def free_tokens(self, family: int) -> int:
        """Slots of a family that are free."""
        raise NotImplementedError

    def full_available_size(self) -> int:
        """Free FULL slots."""
        return self.free_tokens(FULL)

    def swa_available_size(self) -> int:
        """Free SWA slots."""
        return self.free_tokens(SWA)

    def full_swa_available_size(self) -> int:
        """Slots free in FULL and SWA alike."""
        return min(self.full_available_size(), self.swa_available_size())

    def c128_available_tokens(self) -> int:
        """Tokens whose C128 entries still have room: in free pages, and in pages that request rows hold already."""
        return (self.free_tokens(C128) + self.c128_tail_entries()) * addressing.C128_RATIO

    def c128_tail_entries(self) -> int:
        """C128 entries that request rows can still take in pages that they hold."""
        return 0 if self._table is None else int(self._table.sidecar.tail_entries)

    def c128_least_tail(self) -> int:
        """C128 entries that every request row with pages can still take in them."""
        return 0 if self._table is None else int(self._table.sidecar.least_tail())

    def available_size(self) -> int:
        """Tokens that can be given out: the least of the three families."""
        return min(self.full_swa_available_size(), self.c128_available_tokens())

    def c128_num_pages_needed(self, prefix_lens_cpu: torch.Tensor | None, seq_lens_cpu: torch.Tensor | None) -> int:
        """New C128 pages with which the requests of a batch grow from ``prefix`` to ``seq`` tokens."""
        if prefix_lens_cpu is None or seq_lens_cpu is None:
            return 0
        unit = self.pages.spec.c128_page_size
        old, new = entries_of(prefix_lens_cpu.numpy()), entries_of(seq_lens_cpu.numpy())
        return int(np.maximum(-(-new // unit) - -(-old // unit), 0).sum())

    def ensure_c128_capacity(self, tree_cache: Any, num_pages: int) -> bool:
        """Whether ``num_pages`` C128 pages are free, after evicting from the cache only where that can help."""
        unit = self.pages.spec.c128_page_size

        def free() -> int:
            return self.free_tokens(C128) // unit

        if free() >= num_pages:
            return True
        if tree_cache is None or not tree_cache.supports_prefix_sharing():
            return False
        if free() + self.c128_of_caches() < num_pages:
            return False
        while free() < num_pages:
            if tree_cache.evict(EvictParams(num_tokens=self.page_size)).num_tokens_evicted == 0:
                return False
        return True

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache: Any, requests: Any = None, spec_algorithm: Any = None
    ) -> bool:
        """Whether the next decode of ``requests`` fits into every family; evicts from the cache where it must."""
        self.evict_to_free_tokens(tree_cache, num_tokens)  # type: ignore[attr-defined]
        if self.full_swa_available_size() < num_tokens:
            return False
        if requests is None:
            return self.c128_available_tokens() >= num_tokens
        if spec_algorithm is not None and spec_algorithm.is_some():
            old, new, _ = page_aligned_decode_alloc_lens(
                requests, reserve=get_alloc_reserve_per_decode(), page_size=self.page_size
            )
        else:
            old = [req.kv.kv_allocated_len for req in requests]
            new = [length + 1 for length in old]
        need = self.c128_num_pages_needed(torch.tensor(old, dtype=torch.int64), torch.tensor(new, dtype=torch.int64))
        return self.ensure_c128_capacity(tree_cache, need)

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> PrefillBudget:
        """The reservations of one prefill pass."""
        return PrefillBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def c128_of_caches(self) -> int:
        """C128 pages that no request row names: what evicting caches could free at most."""
        held = self.pages.state.c128_count > 0
        if self._table is not None:
            held[self._table.sidecar.held()] = False
        return int(held.sum())


class PrefillBudget(SWAPrefillBudget):  # type: ignore[misc]
    """SGLang's budget of FULL and SWA, and C128 pages beside them.

    SGLang admits by FULL and SWA alone; a batch of short requests then finds no C128 page when it allocates, which
    ends the server. A request takes whole C128 pages of its own, so admitting it costs its pages rounded up.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._c128_pages = 0

    def _pages_for(self, tokens: int) -> int:
        return addressing.c128_columns(tokens, self.allocator.pages.spec.c128_page_size)

    def _c128_fits(self, tokens: int) -> bool:
        return self._c128_pages + self._pages_for(tokens) <= self._c128_left()

    def _c128_left(self) -> int:
        """Free pages, and those of the tree that no lock keeps from being evicted."""
        spec = self.allocator.pages.spec
        evictable = min(self.allocator.c128_of_caches(), self.tree_cache.full_evictable_size() // spec.group_tokens)
        return int(self.allocator.free_tokens(C128) // spec.c128_page_size + evictable)

    def check_prefill(self, *, extend_input_len: int, max_new_tokens: int, **kwargs: Any) -> tuple[bool, int | None]:
        """Whether a request may enter, and a bound of its chunk."""
        if not self._c128_fits(self.ceil_paged_tokens(extend_input_len) + max_new_tokens):
            return False, None
        found: tuple[bool, int | None] = super().check_prefill(
            extend_input_len=extend_input_len, max_new_tokens=max_new_tokens, **kwargs
        )
        return found

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """How long the next chunk of a request in work may be; None: it waits."""
        found: int | None = super().available_chunk_tokens(chunk_limit)
        if found is None:
            return None
        spec = self.allocator.pages.spec
        # A chunk goes on in its own row, which SGLang does not name here: no row has less room than this.
        entries = self._c128_left() * spec.c128_page_size + self.allocator.c128_least_tail()
        return min(found, entries * addressing.C128_RATIO) or None

    def reserve(self, extend_input_len: int, max_new_tokens: int, **kwargs: Any) -> None:
        """Count an admitted request."""
        self._c128_pages += self._pages_for(self.ceil_paged_tokens(extend_input_len) + max_new_tokens)
        super().reserve(extend_input_len, max_new_tokens, **kwargs)
