"""SGLang 0.5.23's own DSV4 NPU allocator, driven on a CPU: the other side of the allocator benchmark.

Only what cannot be had on a CPU is replaced, and each replacement is the cheaper choice for SGLang: ``torch_npu`` is
imported by a module on the way but never called; the Triton kernel of ``sgl_kernel_npu`` that fills the slots of an
extension becomes SGLang's own vectorised ``alloc_extend_naive``; the clear of a finished request's compressor state is
counted instead of executed, because the benchmark compares bookkeeping.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch

PAGE, C128_PAGE = 128, 16


def _module(name: str, package: bool = False) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=package)
    if package:
        module.__path__ = []
    sys.modules[name] = module
    return module


class _ExtendKernel:
    """Stands in for ``alloc_extend_kernel[grid](...)``."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

        def launch(prefix: Any, seq: Any, last: Any, pages: Any, out: Any, _bs: int, page: int, _max: int) -> None:
            alloc_extend_naive(prefix, seq, last, pages, out, page, "cpu")

        return launch


def prepare() -> None:
    """Make SGLang's memory modules importable on this machine and set the arguments that they ask for."""
    vision = torch.library.Library("torchvision", "DEF")  # the CUDA wheel of torchvision cannot register these itself
    for op in ("nms", "qnms"):
        vision.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    prepare.keep = vision  # type: ignore[attr-defined]
    _module("torch_npu")
    _module("sgl_kernel_npu", package=True)
    _module("sgl_kernel_npu.mem_cache", package=True)
    _module("sgl_kernel_npu.mem_cache.allocator").alloc_extend_kernel = _ExtendKernel()  # type: ignore[attr-defined]
    from sglang.srt.runtime_context import get_context

    get_context().override_server_args(
        page_size=PAGE, c128_page_size=C128_PAGE, device="cpu", attention_backend="torch_native"
    ).install()


class SglangSide:
    """``batch`` requests that grow in step, over SGLang's pools."""

    name = "SGLang 0.5.23"

    def __init__(self, batch: int, context: int, pages: int) -> None:
        from sglang.srt.hardware_backend.npu.dsv4 import dsv4_common_hooks
        from sglang.srt.hardware_backend.npu.dsv4.dsv4_allocator import DSV4NPUTokenToKVPoolAllocator
        from sglang.srt.hardware_backend.npu.dsv4.dsv4_memory_pool import DSV4NPUTokenToKVPool
        from sglang.srt.hardware_backend.npu.dsv4.dsv4_req_to_token_pool import DSV4NPUReqToTokenPool
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        tokens, rows = pages * PAGE, 2 * batch
        pool = DSV4NPUTokenToKVPool(
            max_num_reqs=rows,
            num_req_slots=rows + 1,
            swa_size=tokens,
            c4_size=tokens // 4,
            c128_size=c128_pages(pages, rows) * C128_PAGE,
            c4_state_pool_size=pages * 8,
            c128_state_pool_size=rows * 128,
            page_size=PAGE,
            swa_page_size=PAGE,
            sliding_window=128,
            dtype=torch.bfloat16,
            c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32,
            qk_nope_head_dim=1,
            qk_rope_head_dim=1,
            indexer_head_dim=128,
            layer_num=3,
            device="cpu",
            enable_memory_saver=False,
            compression_ratios=[0, 4, 128],
            start_layer=0,
            end_layer=3,
            enable_hisparse=False,
            online_mtp_max_draft_tokens=0,
            unified_fp8=None,
            kv_source_layers=[],
            full_size=tokens,
        )
        self.cleared: list[int] = []
        pool.clear_request_scoped_state = self.cleared.append
        self.hooks = dsv4_common_hooks
        self.alloc: Any = DSV4NPUTokenToKVPoolAllocator(
            tokens, tokens, page_size=PAGE, dtype=torch.bfloat16, device="cpu", kvcache=pool, need_sort=False
        )
        self.table: Any = DSV4NPUReqToTokenPool(
            size=rows, max_context_len=context, device="cpu", enable_memory_saver=False
        )
        self.table.register_dsv4_allocator(self.alloc)
        self.batch = batch
        self._kv_info = ReqKvInfo
        self._flip = False

    def open(self) -> None:
        self.reqs = [types.SimpleNamespace(kv=self._kv_info()) for _ in range(self.batch)]
        self.rows = self.table.alloc(self.reqs)
        self.row_index = torch.tensor(self.rows)
        self.lens = torch.zeros(self.batch, dtype=torch.int64)

    def allocate(self, tokens: int) -> None:
        """Slots of ``tokens`` more positions per request."""
        old = self.lens
        new = old + tokens
        last = torch.where(
            old > 0, self.table.req_to_token[self.row_index, (old - 1).clamp(min=0)].long(), torch.full_like(old, -1)
        )
        self.bundle = self.alloc.alloc_extend(
            old, old, new, new, last, self.batch * tokens, req_pool_indices=self.row_index, req_to_token_pool=self.table
        )
        self._grown(new, tokens)

    def write_tables(self) -> None:
        """Write the slots of the last allocation to the request table, and its C128 pages to the sidecar."""
        slots, new = self.bundle.out_full_loc.to(torch.int32), self.lens
        tokens = len(slots) // self.batch
        for i, (row, end) in enumerate(zip(self.rows, new.tolist(), strict=True)):
            self.table.write((row, slice(end - tokens, end)), slots[i * tokens : (i + 1) * tokens])
        done = types.SimpleNamespace(out_cache_loc_dsv4=self.bundle, req_to_token_pool=self.table)
        self.hooks.maybe_write_dsv4_extend(done, self.row_index, new - tokens, new)

    def decode(self) -> None:
        """The slot of the next position of each request, written to the request table and the sidecar."""
        old = self.lens
        new = old + 1
        last = self.table.req_to_token[self.row_index, old - 1].long()
        out = self.alloc.alloc_decode(new, new, last, req_pool_indices=self.row_index, req_to_token_pool=self.table)
        self.bundle = out
        self.table.write((self.row_index, old), out.out_full_loc.to(torch.int32))
        done = types.SimpleNamespace(
            out_cache_loc_dsv4=out, req_to_token_pool=self.table, req_pool_indices=self.row_index
        )
        self.hooks.maybe_write_dsv4_decode(done, new, 1)
        self._grown(new, 1)

    def _grown(self, new: torch.Tensor, tokens: int) -> None:
        for req in self.reqs:
            req.kv.kv_allocated_len += tokens
            req.kv.kv_committed_len += tokens
        self.lens = new

    def finish(self) -> None:
        """Release every page of every request and its row; the state clear is noted."""
        self.alloc.free_group_begin()
        for req, row, length in zip(self.reqs, self.rows, self.lens.tolist(), strict=True):
            self.alloc.free_segment(self.table.req_to_token[row, :length].long(), start_pos=0)
            self.table.free(req)
        self.alloc.free_group_end()

    def shrink(self, length: int) -> None:
        """Undo: give back everything behind ``length`` (page and C128 page aligned)."""
        for req, row, end in zip(self.reqs, self.rows, self.lens.tolist(), strict=True):
            self.alloc.free_segment(self.table.req_to_token[row, length:end].long(), start_pos=length)
            sidecar = self.table.req_to_c128_sidecar[row, length // (128 * C128_PAGE) :]
            self.alloc.release_c128_pages(sidecar[sidecar > 0])
            sidecar.zero_()
            req.kv.kv_allocated_len = req.kv.kv_committed_len = length
        self.lens = torch.full_like(self.lens, length)

    def prepare_prefixes(self) -> None:
        """Two sets of two shared C128 pages per request, each held by a cache."""
        mine = self.table.req_to_c128_sidecar[self.row_index, :2].clone()
        self.alloc.retain_c128_pages(mine)
        other = self.alloc.c128_attn_allocator.alloc(2 * self.batch * C128_PAGE)[::C128_PAGE] // C128_PAGE
        self.alloc.retain_c128_pages(other)
        self.prefixes = (mine, other.view(-1, 2).to(torch.int32))

    def replace(self) -> None:
        """Give every request the other one of its two prefixes."""
        self._flip = not self._flip
        for row, pages in zip(self.rows, self.prefixes[self._flip], strict=True):
            self.alloc.replace_req_c128_prefix(row, pages, self.table)

    def between(self) -> None:
        """A forward runs: nothing to do on this side."""

    def used(self) -> tuple[int, int, int]:
        """Pages of FULL, SWA and C128 out of the free lists."""
        alloc = self.alloc
        full = alloc.full_attn_allocator
        swa, c128 = alloc.swa_attn_allocator, alloc.c128_attn_allocator
        return tuple(one.num_pages - one.available_size() // one.page_size for one in (full, swa, c128))

    def slots(self) -> tuple[torch.Tensor, ...]:
        """The last step's slots of the four families, as page-relative offsets (page ids differ between the sides)."""
        out = self.bundle
        return tuple(
            one.long().cpu() % size
            for one, size in (
                (out.out_full_loc, PAGE),
                (out.out_swa_loc, PAGE),
                (out.out_c4_loc, PAGE // 4),
                (out.out_c128_loc, C128_PAGE),
            )
        )


def c128_pages(pages: int, rows: int) -> int:
    """C128 pages beside ``pages`` FULL pages: their entries, one of slack per row, and room for shared prefixes."""
    return pages // C128_PAGE + 4 * rows
