"""SGLang's tables as ours, and what must be true of them before a forward may use them.

A forward of the emulation reaches every row through what SGLang's scheduler allocated: ``req_to_token``, the C128
sidecar and the mapping from FULL to SWA slots. SGLang keeps slots per token where this package keeps pages, so the
pages are taken from the first slot of each page and every slot that the forward uses is compared with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dsv4_npu import addressing
from dsv4_npu.emulation.device import held
from dsv4_npu.emulation.forward import Tables

#: Names of the sub-allocators of SGLang's DeepSeek-V4 allocator, by family.
FAMILIES = {"FULL": "full_attn_allocator", "SWA": "swa_attn_allocator", "C128": "c128_attn_allocator"}


class EngineTables:
    """What the scheduler of one process has allocated, read at the moment of a forward.

    Args:
        req_to_token_pool, allocator: SGLang's objects, of its own classes or of ours.
        window: tokens of the sliding window.
    """

    def __init__(self, req_to_token_pool: Any, allocator: Any, window: int) -> None:
        self.rows, self.allocator, self.window = req_to_token_pool, allocator, window
        # On the emulated device this is the memory behind the tables, which SGLang changes in place.
        self.req_to_token: torch.Tensor = held(req_to_token_pool.req_to_token)
        self.sidecar: torch.Tensor = held(req_to_token_pool.req_to_c128_sidecar)
        self.page = int(allocator.page_size)
        self.c128_page = int(req_to_token_pool.c128_page_size)

    def tables(self) -> Tables:
        """Page tables of all requests, as :func:`~dsv4_npu.emulation.forward.plan_batch` takes them."""
        return Tables(
            (self.req_to_token[:, :: self.page] // self.page).to(torch.int32),
            (self._mapping[:: self.page] // self.page).to(torch.int32),
            self.sidecar,
        )

    @property
    def _mapping(self) -> torch.Tensor:
        # The last element answers for the slot -1.
        mapping: torch.Tensor = held(self.allocator.full_to_swa_index_mapping)
        return mapping[:-1]

    def violations(
        self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int], written: torch.Tensor
    ) -> list[str]:
        """What is wrong with the tables for the batch ``[start, start + length)`` per request; empty when nothing is.

        written: int64 ``[sum of lengths]``, the slots that the scheduler gives to the new rows (``out_cache_loc``).
        """
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        found = self._slots(rows, starts, ends, written)
        return found + self._owners(rows, starts, ends) + self._free(rows, starts, ends)

    def _slots(
        self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int], written: torch.Tensor
    ) -> list[str]:
        found, at = [], 0
        for row, start, end in zip(rows, starts, ends, strict=True):
            slots = self.req_to_token[row, :end].to(torch.int64)
            offset = torch.arange(end) % self.page
            full = slots[:: self.page].repeat_interleave(self.page)[:end]
            if not torch.equal(slots, full + offset) or bool((slots < self.page).any()):
                found.append(f"row {row}: FULL slots of positions 0 to {end - 1} are not whole pages in order")
            if not torch.equal(slots[start:], written[at : at + end - start].to(torch.int64)):
                found.append(f"row {row}: req_to_token of positions {start} to {end - 1} is not out_cache_loc")
            at += end - start
            first = max(0, start - self.window + 1)
            swa = self._mapping[slots[first:]].to(torch.int64)
            pages = self._mapping[slots // self.page * self.page][first:].to(torch.int64)
            if not torch.equal(swa, pages + offset[first:]) or bool((swa < self.page).any()):
                found.append(f"row {row}: SWA slots of positions {first} to {end - 1} are not whole mapped pages")
            columns = self.sidecar[row, : addressing.c128_columns(end, self.c128_page)]
            if bool((columns <= 0).any()):
                found.append(f"row {row}: the sidecar has a hole in {columns.tolist()} with {end} tokens")
        return found

    def _pages(self, row: int, start: int, end: int) -> dict[str, list[int]]:
        """Pages that a forward of ``row`` writes, by family."""
        slots = self.req_to_token[row, start:end].to(torch.int64)
        first, last = start // 128 // self.c128_page, addressing.c128_columns(end, self.c128_page)
        closes = end // 128 > start // 128
        return {
            "FULL": torch.unique(slots // self.page).tolist(),
            "SWA": torch.unique(self._mapping[slots] // self.page).tolist(),
            "C128": self.sidecar[row, first:last].tolist() if closes else [],
        }

    def _owners(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> list[str]:
        """A page that is written belongs to one request alone."""
        found = []
        seen: dict[tuple[str, int], int] = {}
        for row, start, end in zip(rows, starts, ends, strict=True):
            for family, pages in self._pages(row, start, end).items():
                for page in pages:
                    other = seen.setdefault((family, page), row)
                    if other != row:
                        found.append(f"{family} page {page} is written by rows {other} and {row}")
        for row, start, end in zip(rows, starts, ends, strict=True):
            for page in self._pages(row, start, end)["C128"]:
                count = int(held(self.allocator.c128_page_refcount)[page])
                if count != 1:
                    found.append(f"C128 page {page}, which row {row} writes, is held {count} times")
        return found

    def free_pages(self) -> dict[str, set[int]]:
        """Pages on the free list of each family."""
        return {
            family: set(held(getattr(self.allocator, name).get_all_free_pages()).tolist())
            for family, name in FAMILIES.items()
        }

    def _free(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> list[str]:
        """What a request reads or writes is not free."""
        free = self.free_pages()
        found = []
        for row, start, end in zip(rows, starts, ends, strict=True):
            slots = self.req_to_token[row, :end].to(torch.int64)
            near = slots[max(0, start - self.window + 1) :]
            used = {
                "FULL": set((slots // self.page).tolist()),
                "SWA": set((self._mapping[near] // self.page).tolist()),
                "C128": set(self.sidecar[row, : addressing.c128_columns(end, self.c128_page)].tolist()),
            }
            for family, pages in used.items():
                both = sorted(pages & free[family])
                if both:
                    found.append(f"row {row}: {family} pages {both} are in use and free")
        return found

    def held(self) -> dict[str, int]:
        """What is not free: pages per family, counts of C128 pages, entries of the tables; all 0 after a flush."""
        totals = {family: int(getattr(self.allocator, name).num_pages) for family, name in FAMILIES.items()}
        free = self.free_pages()
        return {
            **{f"{family} pages": totals[family] - len(free[family]) for family in FAMILIES},
            "C128 holders": int(held(self.allocator.c128_page_refcount).sum()),
            "sidecar entries": int((self.sidecar != 0).sum()),
            "mapped SWA slots": int((self._mapping != 0).sum()),
            "request rows": int(self.rows.size) - int(self.rows.available_size()),
        }
