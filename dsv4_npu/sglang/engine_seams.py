"""What is put into SGLang's scheduler process so that its model is computed by the emulation.

Three seams, in the scheduler process alone: the attention backend (one that computes nothing), the forward of the
model runner, and methods of the scheduler that ``Engine.collective_rpc`` calls to ask what happened.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dsv4_npu.emulation.device import held, on_device
from dsv4_npu.sglang import engine_dspark, engine_kernels
from dsv4_npu.sglang.engine_drafts import draft
from dsv4_npu.sglang.engine_forward import EngineForward, ForwardSetup
from dsv4_npu.sglang.engine_tampers import TAMPERS


class EngineSeams:
    """The forward of one scheduler process, made when the first batch arrives."""

    def __init__(self, setup: ForwardSetup) -> None:
        self.setup = setup
        self.forward: EngineForward | None = None

    def of(self, runner: Any) -> EngineForward:
        """The forward over the memory of ``runner``."""
        if self.forward is None:
            self.forward = EngineForward(self.setup, runner.req_to_token_pool, runner.token_to_kv_pool_allocator)
            self._follow_clears(runner.token_to_kv_pool_allocator.get_kvcache())
        return self.forward

    def _follow_clears(self, pool: Any) -> None:
        """Clear the states beside SGLang's pool whenever it clears its own."""
        theirs, forward = pool.clear_request_scoped_state, self.forward
        assert forward is not None

        def clear(row: int) -> None:
            theirs(row)
            forward.clear_state(int(row))

        pool.clear_request_scoped_state = clear

    def run(self, runner: Any, batch: Any) -> Any:
        """``ModelRunner._forward_raw``: float64 logits ``[rows to sample, V]`` of the target or of its drafter."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.model_executor.model_runner import ModelRunnerOutput

        forward, mode = self.of(runner), batch.forward_mode
        device, batch = batch.input_ids.device, _Held(batch)
        name = mode.name.lower()
        if runner.is_draft_worker:
            forward.book.forwards[f"draft {name}"] += 1
            logits = draft(forward, batch)
        else:
            forward.book.forwards[name] += 1
            logits = self._target(forward, batch)
        out = LogitsProcessorOutput(next_token_logits=on_device(logits, device))
        if self.setup.draft_tokens:
            # The drafter has no use for hidden states, but the worker hands them on.
            count = len(logits) if runner.is_draft_worker else len(batch.input_ids)
            out.hidden_states = torch.zeros((count, runner.model_config.hidden_size), device=device)
        return ModelRunnerOutput(logits_output=out, can_run_graph=False)

    @staticmethod
    def _target(forward: EngineForward, batch: Any) -> torch.Tensor:
        mode, count = batch.forward_mode, batch.batch_size
        if mode.is_idle():
            return torch.zeros((0, forward.spec.vocab_size), dtype=torch.float64)
        if mode.is_target_verify():
            width = batch.spec_info.draft_token_num
            starts, lengths, keep = batch.seq_lens.tolist(), [width] * count, width
        elif mode.is_decode():
            starts, lengths, keep = (batch.seq_lens - 1).tolist(), [1] * count, 1
        else:
            starts, lengths, keep = list(batch.extend_prefix_lens_cpu), list(batch.extend_seq_lens_cpu), 1
        rows = batch.req_pool_indices.tolist()
        rids = batch.rids or [str(row) for row in rows]
        return torch.cat(forward.compute(rids, rows, starts, lengths, batch.input_ids, batch.out_cache_loc, keep))

    def install(self) -> None:
        """Replace the seams in this process; before SGLang's scheduler is made."""
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.speculative.draft_utils import DraftBackendFactory

        torch.set_num_threads(1)
        ATTENTION_BACKENDS["dsv4"] = no_attention
        DraftBackendFactory.create_decode_backend = no_draft_attention
        DraftBackendFactory.create_draft_extend_backend = no_attention
        _give_float64_pools()
        engine_kernels.install()
        if self.setup.algorithm == "DSPARK":
            engine_dspark.install(self.of)
        if not hasattr(torch.cpu, "empty_cache"):
            # SGLang calls it of any device once the draft model shares the target's head.
            vars(torch.cpu)["empty_cache"] = lambda: None
        seams = self

        def forward_raw(runner: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Any:
            return seams.run(runner, batch)

        ModelRunner._forward_raw = forward_raw
        Scheduler.dsv4_npu_report = lambda scheduler, path: seams.report(scheduler, Path(path))
        Scheduler.dsv4_npu_tamper = lambda scheduler, name: seams.tamper(scheduler, name)

    def report(self, scheduler: Any, path: Path) -> None:
        """Write what happened and what is held as JSON to ``path``; violations are told once."""
        forward = self.of(scheduler.tp_worker.model_runner)
        book = forward.book
        pool = forward.tables.allocator.get_kvcache()
        data = {
            "forwards": dict(book.forwards),
            "rows": book.rows,
            "most requests": book.most_requests,
            "violations": book.violations,
            "held": forward.tables.held(),
            "classes": {
                "pool": _name(pool),
                "allocator": _name(forward.tables.allocator),
                "request rows": _name(forward.tables.rows),
                "tree": _name(scheduler.tree_cache),
                "components": [_name(c) for c in getattr(scheduler.tree_cache, "_components_tuple", ())],
            },
            "rows in": "the pools beside SGLang's" if forward.own_pools else "the pools of the KV pool",
        }
        book.violations = []
        path.write_text(json.dumps(data, indent=1), encoding="utf-8")

    def tamper(self, scheduler: Any, name: str) -> None:
        """From now on forwards see tables or states that ``name`` spoils; an empty name ends it."""
        self.of(scheduler.tp_worker.model_runner).tamper = TAMPERS[name]() if name else None


def _give_float64_pools() -> None:
    """Let our KV pool keep rows and states in float64; SGLang has no name for a cache of that type."""
    from sglang.srt.hardware_backend.npu.dsv4 import dsv4_memory_pool
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    theirs = KVCacheConfigurator._build_dsv4_kv_pool

    def build(configurator: Any, **arguments: Any) -> Any:
        from dsv4_npu.sglang.kv_pool import KVPool

        if not issubclass(dsv4_memory_pool.DSV4NPUTokenToKVPool, KVPool):
            return theirs(configurator, **arguments)
        named = configurator.kv_cache_dtype
        configurator.kv_cache_dtype = torch.float64
        try:
            return theirs(
                configurator, **(arguments | {"c4_state_dtype": torch.float64, "c128_state_dtype": torch.float64})
            )
        finally:
            configurator.kv_cache_dtype = named

    KVCacheConfigurator._build_dsv4_kv_pool = build


def _name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def no_attention(runner: Any) -> Any:
    """An attention backend without attention: the forward that would use it is not SGLang's."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    class NoAttention(AttentionBackend):  # type: ignore[misc]
        """Plans nothing and computes nothing."""

        def init_forward_metadata(self, forward_batch: Any) -> None:
            """Nothing to plan."""

    return NoAttention()


class _Held:
    """A batch of SGLang whose tensors are in memory that the host may look at; on a CPU they are."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._batch, name)
        return held(value) if isinstance(value, torch.Tensor) else value


class _Steps:
    """One attention backend per draft step, as the EAGLE worker holds them."""

    def __init__(self, steps: int) -> None:
        self.attn_backends = [no_attention(None) for _ in range(steps)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing to plan."""


def no_draft_attention(factory: Any) -> _Steps:
    """The backends of the draft steps, which compute nothing either."""
    return _Steps(factory.speculative_num_steps)


def run_scheduler(setup: ForwardSetup, *args: Any, **kwargs: Any) -> Any:
    """``run_scheduler_process`` of an engine whose model is computed by the emulation."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins import load_plugins

    load_plugins()
    EngineSeams(setup).install()
    return run_scheduler_process(*args, **kwargs)
