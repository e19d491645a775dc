"""A plain engine without overlap and without a device, for tests that look at the host side only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.prefix_cache import PrefixCache
from dsv4_npu.alloc.request import Request, State, Step
from dsv4_npu.alloc.rollback import RollbackRules


def life_of(spec: AllocSpec, *, cache: bool = True, capture: Callable[[int, int], object] | None = None) -> Lifecycle:
    alloc = KVAllocator(spec, backend="python")
    rules = RollbackRules.of(spec, spec.verify_width > 1)
    return Lifecycle(alloc, PrefixCache(alloc, capture=capture) if cache else None, rules=rules)


def turn(life: Lifecycle, step: Step, tokens: dict[Request, Sequence[int]]) -> list[Request]:
    life.launch(step)
    life.done(step)
    return life.learn(step, tokens)


def prefill(life: Lifecycle, request: Request, first_token: int = 1, budget: int = 1 << 30) -> None:
    while request.state is State.PREFILL:
        end = life.chunk_end(request, budget)
        step = life.extend([(request, end)])
        turn(life, step, {request: [first_token] if end == len(request) else []})


def decode(life: Lifecycle, request: Request, run: Sequence[int]) -> None:
    turn(life, life.decode_plan([request]), {request: run})


def initial(alloc: KVAllocator) -> bool:
    return all(used == 0 for used, _, _ in alloc.usage().values()) and not alloc.state.tables.any()
