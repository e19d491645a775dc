"""Run requests through the engine with a scripted acceptance pattern and compare with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from dsv4_npu.budget import PoolSizes, sizes_for_tokens
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec
from dsv4_npu.emulation.drafters import Drafter, ScriptedDrafter, make_drafter
from dsv4_npu.emulation.engine import Engine, EngineOptions, RequestRun
from dsv4_npu.emulation.model import build_model
from dsv4_npu.emulation.oracle import Oracle
from dsv4_npu.emulation.result import LOGIT_TOLERANCE


@dataclass(frozen=True)
class Setting:
    """Everything that a run can vary in."""

    platform: str = "a3"
    kind: str = "chain"
    width: int = 4
    page: int = 128
    c128_page: int = 2
    chunk: int = 101
    accept: str = "greedy"
    batch: int = 8
    new_tokens: int = 14
    swa_ratio: float = 1.0
    context: int = 640
    clear: bool = True
    prefix_cache: bool = True
    poison: bool = True
    native: bool = False
    overlap: bool = False
    retract: str = "recompute"
    host_bytes: int = 1 << 30


class Bench:
    """The model, its oracle and a way to run one setting."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.model = build_model(spec, seed=0)
        self.oracle = Oracle(self.model)
        self._prompts: dict[int, list[int]] = {}

    def prompt(self, length: int) -> list[int]:
        """The prompt of a length: random tokens, the same every time."""
        if length not in self._prompts:
            gen = torch.Generator().manual_seed(length)
            self._prompts[length] = torch.randint(self.spec.vocab_size, (length,), generator=gen).tolist()
        return self._prompts[length]

    def scripted(self, accept: Callable[[int, int], int]) -> Drafter:
        """Drafts that the target accepts as often as ``accept(request in the batch, history length)`` says."""

        def continuation(history: Sequence[int], count: int) -> list[int]:
            for length in sorted(self._prompts, reverse=True):
                if list(history[:length]) == self._prompts[length]:
                    done = len(history) - length
                    return self.oracle.greedy(self._prompts[length], done + count).tokens[done:]
            raise AssertionError("a history that starts with no known prompt")

        return ScriptedDrafter(continuation, accept, self.spec.vocab_size)

    def engine(
        self,
        setting: Setting,
        drafter: Drafter | str | None,
        on_round: Callable[[Engine], None] | None = None,
    ) -> Engine:
        """An engine for ``setting``; NaN in every row that nobody wrote, if ``setting.poison``."""
        config = CacheConfig(
            self.spec,
            PlatformSpec.load(setting.platform),
            SpeculationSpec(setting.kind, setting.width - 1),  # type: ignore[arg-type]
            page_size=setting.page,
            c128_page_size=setting.c128_page,
            context_len=setting.context,
            request_rows=setting.batch,
            kv_row=None if setting.native else "fp64",
            indexer_row=None if setting.native else "fp64",
            emulated_kernels=True,
        )
        sizes: PoolSizes = sizes_for_tokens(config, setting.batch * config.width, setting.swa_ratio)
        options = EngineOptions(
            batch=setting.batch,
            chunk=setting.chunk,
            accept=setting.accept,  # type: ignore[arg-type]
            clear=setting.clear,
            prefix_cache=setting.prefix_cache,
            overlap=setting.overlap,
            retract=setting.retract,  # type: ignore[arg-type]
            host_bytes=setting.host_bytes,
        )
        engine = Engine(
            self.model, config, sizes, make_drafter(drafter) if isinstance(drafter, str) else drafter, options, on_round
        )
        if setting.poison:
            for slab in (engine.pools.swa, engine.pools.c4, engine.pools.index, engine.pools.c128):
                for tensor in slab.tensors():
                    # All bits set: NaN in every float format; an int8 row has it in its scale.
                    tensor.view(torch.uint8).fill_(0xFF)
        return engine

    def run(
        self,
        setting: Setting,
        lengths: Sequence[int],
        drafter: Drafter | str | None = None,
        on_round: Callable[[Engine], None] | None = None,
    ) -> Engine:
        """Run prompts of ``lengths``; every output and logit must be the oracle's, and nothing may be left over."""
        engine = self.engine(setting, drafter, on_round)
        for length in lengths:
            engine.submit(self.prompt(length), setting.new_tokens)
        requests = engine.run()
        assert len(requests) == len(lengths)
        for request in requests:
            self.check(request)
        engine.alloc.audit()
        if engine.life.cache is not None:
            engine.life.cache.clear()
        assert not any(used for used, _, _ in engine.alloc.usage().values()), engine.alloc.usage()
        return engine

    def check(self, request: RequestRun) -> None:
        """Outputs and the logits behind them equal the oracle's."""
        want = self.oracle.greedy(request.prompt, len(request.outputs))
        assert request.outputs == want.tokens, f"request of {len(request.prompt)} tokens"
        error = float((torch.stack(request.logits) - want.logits).abs().max())
        assert error <= LOGIT_TOLERANCE, f"request of {len(request.prompt)} tokens: logits differ by {error}"


def always(count: int) -> Callable[[int, int], int]:
    """Get exactly ``count`` drafts right in every round."""
    return lambda request, length: count


def varied(width: int) -> Callable[[int, int], int]:
    """Every acceptance length in turn, different for the requests of a batch."""
    return lambda request, length: (request * 3 + length) % width


def with_width(setting: Setting, width: int) -> Setting:
    """``setting`` at another verify width."""
    return replace(setting, width=width)
