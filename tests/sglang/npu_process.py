"""SGLang on the emulated ``npu`` device, in a process of its own: its NPU branches and our classes, as far as they go.

Run with SGLANG_PLATFORM=dsv4_npu; prints one JSON object per step. What SGLang imports of the Ascend stack is stood in
for (:mod:`dsv4_npu.sglang.engine_npu`); nothing of our own memory is among it.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dsv4_npu.sglang import engine_npu

MODULES = (
    "mem_cache.allocation",
    "mem_cache.unified_radix_cache",
    "hardware_backend.npu.dsv4.dsv4_memory_pool",
    "hardware_backend.npu.dsv4.dsv4_allocator",
    "hardware_backend.npu.dsv4.dsv4_req_to_token_pool",
    "hardware_backend.npu.attention.ascend_dsv4_backend",
    "speculative.eagle_worker_v2",
    "speculative.dspark_components.dspark_worker_v2",
    "disaggregation.decode",
    "models.deepseek_v4",
    "model_executor.model_runner",
    "managers.scheduler",
    "entrypoints.engine",
)


def step(name: str, run: Callable[[], Any]) -> Any:
    """Run one step and print what it gave, or how it failed."""
    try:
        value, error = run(), None
    except Exception as failure:
        value, error = None, f"{type(failure).__name__}: {failure}"
    shown = value if isinstance(value, dict | list | str | bool) else None
    print(json.dumps({"step": name, "value": shown, "error": error}), flush=True)
    return value


def counted(run: Callable[[], Any]) -> dict[str, Any]:
    """What ``run`` returns and what it costs the device."""
    from dsv4_npu.emulation.stream import EVENTS

    before = EVENTS.copy()
    value = run()
    events = EVENTS.since(before)
    return {"value": value, "launches": dict(events.launches), "reads": sum(events.reads.values())}


class Memory:
    """Pools, allocator and request rows by the names under which SGLang's configurator makes them."""

    def __init__(self) -> None:
        from sglang.srt.hardware_backend.npu.dsv4 import dsv4_allocator, dsv4_memory_pool, dsv4_req_to_token_pool
        from sglang.srt.managers.schedule_batch import ReqKvInfo
        from sglang.srt.runtime_context import get_context

        from dsv4_npu.sglang.engine_forward import ForwardSetup
        from dsv4_npu.sglang.engine_launch import write_model

        model = write_model(ForwardSetup(draft_tokens=3), Path(tempfile.mkdtemp()) / "model")
        arguments = {
            "model_path": str(model),
            "page_size": 128,
            "c128_page_size": 16,
            "device": "npu",
            "attention_backend": "ascend",
        }
        speculation = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4, "speculative_num_steps": 3}
        get_context().override_server_args(**arguments, **speculation, speculative_eagle_topk=1).install()
        full = 64 * 128
        self.pool = dsv4_memory_pool.DSV4NPUTokenToKVPool(
            max_num_reqs=4,
            num_req_slots=5,
            swa_size=full,
            c4_size=full // 4,
            c128_size=full // 128 + 64,
            c4_state_pool_size=64 * 16,
            c128_state_pool_size=4 * 256,
            page_size=128,
            swa_page_size=128,
            sliding_window=128,
            dtype=torch.bfloat16,
            c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32,
            qk_nope_head_dim=24,
            qk_rope_head_dim=8,
            indexer_head_dim=128,
            layer_num=4,
            device="npu",
            enable_memory_saver=False,
            compression_ratios=[0, 4, 128, 128],
            start_layer=0,
            end_layer=4,
            enable_hisparse=False,
            online_mtp_max_draft_tokens=4,
            unified_fp8=None,
            kv_source_layers=[],
            full_size=full,
        )
        self.allocator = dsv4_allocator.DSV4NPUTokenToKVPoolAllocator(
            full, full, page_size=128, dtype=torch.bfloat16, device="npu", kvcache=self.pool, need_sort=False
        )
        self.rows = dsv4_req_to_token_pool.DSV4NPUReqToTokenPool(
            size=4, max_context_len=4096, device="npu", enable_memory_saver=False
        )
        self.rows.register_dsv4_allocator(self.allocator)
        self.free = self.available()
        self.reqs = [SimpleNamespace(kv=ReqKvInfo()) for _ in range(2)]
        self.indices = torch.tensor(self.rows.alloc(self.reqs))
        self.lengths = torch.tensor([300, 2175])

    def available(self) -> list[int]:
        one = self.allocator
        return [
            one.full_available_size(),
            one.swa_available_size(),
            one.c128_attn_allocator.available_size(),
        ]

    def names(self) -> list[str]:
        return [type(one).__module__ for one in (self.pool, self.allocator, self.rows)]

    def batch(self, bundle: Any) -> SimpleNamespace:
        return SimpleNamespace(
            out_cache_loc_dsv4=bundle,
            req_to_token_pool=self.rows,
            req_pool_indices=self.indices.to("npu"),
            req_pool_indices_cpu=self.indices,
        )

    def extend(self) -> list[int]:
        from sglang.srt.hardware_backend.npu.dsv4 import dsv4_common_hooks as hooks

        start, end = torch.zeros_like(self.lengths), self.lengths
        bundle = self.allocator.alloc_extend(
            start.to("npu"),
            start,
            end.to("npu"),
            end,
            torch.tensor([-1, -1]).to("npu"),
            int(end.sum()),
            req_pool_indices=self.indices.to("npu"),
            req_to_token_pool=self.rows,
        )
        at = 0
        for req, row, length in zip(self.reqs, self.indices.tolist(), end.tolist(), strict=True):
            self.rows.write((row, slice(0, length)), bundle.out_full_loc[at : at + length].int())
            at += length
            req.kv.kv_allocated_len = req.kv.kv_committed_len = length
        hooks.maybe_write_dsv4_extend(self.batch(bundle), self.indices, start, end)
        return list(bundle.out_full_loc.shape)

    def decode(self) -> list[int]:
        from sglang.srt.hardware_backend.npu.dsv4 import dsv4_common_hooks as hooks

        self.lengths = self.lengths + 1
        ends, rows = self.lengths.to("npu"), self.indices.to("npu")
        last = self.rows.req_to_token[rows, ends - 2].long()
        bundle = self.allocator.alloc_decode(
            ends, self.lengths, last, req_pool_indices=rows, req_to_token_pool=self.rows
        )
        self.rows.write((rows, ends - 1), bundle.out_full_loc.int())
        hooks.maybe_write_dsv4_decode(self.batch(bundle), self.lengths, 1)
        for req in self.reqs:
            req.kv.kv_allocated_len += 1
            req.kv.kv_committed_len += 1
        return list(bundle.out_full_loc.shape)

    def clear(self) -> None:
        accepted = torch.tensor([1, 2], dtype=torch.int32).to("npu")
        self.pool.clear_unaccepted_c128_draft_states(self.indices.to("npu"), self.lengths.to("npu"), accepted, 4)

    def release(self) -> list[int]:
        for req, row in zip(self.reqs, self.indices.tolist(), strict=True):
            held = self.rows.req_to_token[row, : req.kv.kv_allocated_len].long()
            self.allocator.free_segment(held, start_pos=0)
            self.rows.free(req)
        return self.available()


def greedy() -> list[Any]:
    """SGLang's greedy verify of a chain with three drafts."""
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func

    out = verify_tree_greedy_func(
        torch.zeros(8, dtype=torch.int32).to("npu"),
        torch.full((2, 4), -1, dtype=torch.int32).to("npu"),
        torch.zeros(2, dtype=torch.int32).to("npu"),
        torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]]).to("npu"),
        torch.arange(8).view(2, 4).to("npu"),
        torch.tensor([[1, 2, 3, -1]] * 2).to("npu"),
        torch.full((2, 4), -1).to("npu"),
        torch.tensor([[6, 7, 9, 9], [9, 9, 9, 9]]).to("npu"),
        topk=1,
    )
    return [one.cpu().tolist() for one in out[1:]]


def main() -> None:
    engine_npu.prepare()
    from sglang.srt.platforms import current_platform
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import is_npu

    step("platform", lambda: type(current_platform).__name__)
    step("is_npu", is_npu)
    step("plugins", load_plugins)
    from dsv4_npu.sglang.verify import targets_report

    step("targets", lambda: sorted({one.state for one in targets_report()}))
    for name in MODULES:
        step(f"import {name}", lambda name=name: bool(importlib.import_module(f"sglang.srt.{name}")))
    step("pools without the compressor", Memory)
    from dsv4_npu.sglang import start

    # The probe of the compressor's save rule: there is none to be probed.
    start.probe_before_serving = lambda *_args, **_kwargs: None
    memory = step("pools", Memory)
    if memory is None:
        return
    step("classes", memory.names)
    step("extend", lambda: counted(memory.extend))
    step("decode", lambda: counted(memory.decode))
    step("clear", lambda: counted(memory.clear))
    step("greedy", greedy)
    step("release", lambda: memory.release() == memory.free)


if __name__ == "__main__":
    main()
