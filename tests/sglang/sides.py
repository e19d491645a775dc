"""SGLang's own memory classes and ours behind one small face, so that one sequence of calls drives both.

``sides()`` gives (theirs, ours). SGLang's classes come from before the replacement; what they need of an NPU is the
one kernel that fills the slots of an extension, for which SGLang's own torch function stands in.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.runtime_context import get_context

from dsv4_npu.sglang import names
from dsv4_npu.sglang.plugin import ORIGINALS
from dsv4_npu.sglang.targets import MEMORY

PAGE, UNIT, GROUP = 128, 16, 2048


class Parts(NamedTuple):
    """The replaced classes and functions of one side, by the last part of SGLang's name."""

    pool: Any
    allocator: Any
    requests: Any
    component: Any
    hooks: dict[str, Any]


def parts(ours: bool) -> Parts:
    """Ours, or SGLang's own from before the replacement."""
    found = {}
    for target in MEMORY:
        last = target.theirs.rsplit(":", 1)[1]
        found[last] = names.value(target.ours) if ours else ORIGINALS[target.theirs][0]
    return Parts(
        found["DSV4NPUTokenToKVPool"],
        found["DSV4NPUTokenToKVPoolAllocator"],
        found["DSV4NPUReqToTokenPool"],
        found["C128SidecarComponent"],
        {name: value for name, value in found.items() if name.startswith(("maybe_", "dsv4_"))},
    )


class _ExtendKernel:
    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

        def launch(prefix: Any, seq: Any, last: Any, pages: Any, out: Any, _bs: int, page: int, _most: int) -> None:
            alloc_extend_naive(prefix, seq, last, pages, out, page, "cpu")

        return launch


def prepare() -> None:
    """The settings that SGLang's classes read, and the kernel that they import."""
    for name in ("sgl_kernel_npu", "sgl_kernel_npu.mem_cache", "sgl_kernel_npu.mem_cache.allocator"):
        if name not in sys.modules:
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=not name.endswith("allocator"))
            module.__path__ = []  # type: ignore[attr-defined]
            sys.modules[name] = module
    sys.modules["sgl_kernel_npu.mem_cache.allocator"].alloc_extend_kernel = _ExtendKernel()  # type: ignore[attr-defined]
    get_context().override_server_args(
        page_size=PAGE, c128_page_size=UNIT, device="cpu", attention_backend="torch_native"
    ).install()


class Side:
    """One side: pools, as many SWA as FULL pages unless said otherwise, and the calls of SGLang's allocation flow."""

    def __init__(
        self,
        ours: bool,
        *,
        full_pages: int = 256,
        swa_pages: int | None = None,
        c128_pages: int | None = None,
        rows: int = 8,
        context: int = 8192,
        ratios: tuple[int, ...] = (0, 4, 128),
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
    ) -> None:
        self.device = device
        self.ours, self.parts = ours, parts(ours)
        full, swa = full_pages * PAGE, (swa_pages or full_pages) * PAGE
        entries = (full // GROUP if c128_pages is None else c128_pages) * UNIT
        self.pool = self.parts.pool(
            max_num_reqs=rows,
            num_req_slots=rows + 1,
            swa_size=swa,
            c4_size=full // 4,
            c128_size=entries,
            c4_state_pool_size=swa // PAGE * 8,
            c128_state_pool_size=rows * 128,
            page_size=PAGE,
            swa_page_size=PAGE,
            sliding_window=128,
            dtype=dtype,
            c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32,
            qk_nope_head_dim=24,
            qk_rope_head_dim=8,
            indexer_head_dim=128,
            layer_num=len(ratios),
            device=device,
            enable_memory_saver=False,
            compression_ratios=list(ratios),
            start_layer=0,
            end_layer=len(ratios),
            enable_hisparse=False,
            online_mtp_max_draft_tokens=0,
            unified_fp8=None,
            kv_source_layers=[],
            full_size=full,
        )
        self.alloc = self.parts.allocator(
            full, swa, page_size=PAGE, dtype=dtype, device=device, kvcache=self.pool, need_sort=False
        )
        self.table = self.parts.requests(size=rows, max_context_len=context, device=device, enable_memory_saver=False)
        self.table.register_dsv4_allocator(self.alloc)

    def open(self, count: int) -> list[Any] | None:
        """Requests with rows; ``evicted`` is where the window eviction stands."""
        reqs = [types.SimpleNamespace(kv=ReqKvInfo(), evicted=0) for _ in range(count)]
        return None if self.table.alloc(reqs) is None else reqs

    def extend(self, reqs: list[Any], lengths: list[int]) -> Any:
        """Allocate up to ``lengths`` and write both tables; None when it does not fit."""
        rows = torch.tensor([req.kv.req_pool_idx for req in reqs])
        old = torch.tensor([req.kv.kv_allocated_len for req in reqs])
        new = torch.tensor(lengths)
        at_rows, at_old, at_new = self._sent(rows, old, new)
        table = self.table.req_to_token
        last = torch.where(at_old > 0, table[at_rows, (at_old - 1).clamp(min=0)].long(), torch.full_like(at_old, -1))
        count = int((new - old).sum())
        bundle = self.alloc.alloc_extend(
            at_old, old, at_new, new, last, count, req_pool_indices=at_rows, req_to_token_pool=self.table
        )
        if bundle is None:
            return None
        at = 0
        for req, end in zip(reqs, lengths, strict=True):
            start = req.kv.kv_allocated_len
            slots = bundle.out_full_loc[at : at + end - start].int()
            self.table.write((req.kv.req_pool_idx, slice(start, end)), slots)
            at += end - start
            req.kv.kv_allocated_len = req.kv.kv_committed_len = end
        self.parts.hooks["maybe_write_dsv4_extend"](self._batch(bundle, rows), rows, old, new)
        return bundle

    def decode(self, reqs: list[Any]) -> Any:
        """One more position of each request; None when it does not fit."""
        rows = torch.tensor([req.kv.req_pool_idx for req in reqs])
        new = torch.tensor([req.kv.kv_allocated_len + 1 for req in reqs])
        at_rows, at_new = self._sent(rows, new)
        last = self.table.req_to_token[at_rows, at_new - 2]
        bundle = self.alloc.alloc_decode(at_new, new, last, req_pool_indices=at_rows, req_to_token_pool=self.table)
        if bundle is None:
            return None
        self.table.write((at_rows, at_new - 1), bundle.out_full_loc.int())
        self.parts.hooks["maybe_write_dsv4_decode"](self._batch(bundle, rows), new, 1)
        for req in reqs:
            req.kv.kv_allocated_len += 1
            req.kv.kv_committed_len += 1
        return bundle

    def evict_window(self, req: Any) -> None:
        """Free the SWA pages wholly before the last page of the window, as SGLang does while a request runs."""
        done = req.evicted
        target = max(done, (req.kv.kv_committed_len - PAGE) // PAGE * PAGE)
        if target > done:
            slots = self.table.req_to_token[req.kv.req_pool_idx, done:target]
            self.alloc.free_swa_segment(slots, start_pos=done)
            req.evicted = target

    def finish(self, req: Any) -> None:
        """Free everything of a request and its row."""
        row, length, dead = req.kv.req_pool_idx, req.kv.kv_allocated_len, req.evicted
        slots = self.table.req_to_token[row, :length].long()
        if dead:
            self.alloc.free_full_segments([(slots[:dead], 0)])
        self.alloc.free_segments([(slots[dead:], dead)])
        self.table.free(req)

    def counts(self) -> dict[str, int]:
        """Free slots of each family, what all together allow, and the C128 counts."""
        return {
            "full": self.alloc.full_available_size(),
            "swa": self.alloc.swa_available_size(),
            "c128": self.alloc.c128_attn_allocator.available_size(),
            "full + swa": self.alloc.full_swa_available_size(),
            "holders": int(self.alloc.c128_page_refcount.sum()),
            "rows": self.table.available_size(),
        }

    def _sent(self, *values: torch.Tensor) -> list[torch.Tensor]:
        return [value.to(self.device, non_blocking=True) for value in values]

    def _batch(self, bundle: Any, rows: torch.Tensor) -> Any:
        return types.SimpleNamespace(
            out_cache_loc_dsv4=bundle, req_to_token_pool=self.table, req_pool_indices=rows, req_pool_indices_cpu=rows
        )


class Renaming:
    """Page ids of one side as those of the other: a bijection of the pages that are in use, found as they appear."""

    def __init__(self) -> None:
        self.there: dict[int, int] = {}
        self.back: dict[int, int] = {}

    def check(self, theirs: torch.Tensor, ours: torch.Tensor, unit: int) -> None:
        """The slots lie at the same offsets of corresponding pages."""
        theirs, ours = theirs.long().view(-1), ours.long().view(-1)
        assert theirs.shape == ours.shape
        assert torch.equal(theirs % unit, ours % unit)
        pairs = set(zip((theirs // unit).tolist(), (ours // unit).tolist(), strict=True))
        for a, b in pairs:
            assert self.there.setdefault(a, b) == b, f"page {a} is {b}"
            assert self.back.setdefault(b, a) == a, f"page {b} is {a}"
            assert (a == 0) == (b == 0)
