"""Faults and surprises of the life cycle: prefix hits, room, going back, rejects, retractions, row widths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dsv4_npu.alloc import FamilyCounts, KVAllocator
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.prefix_cache import PrefixCache
from dsv4_npu.alloc.request import Request
from dsv4_npu.budget import sizes_for_tokens
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec
from dsv4_npu.replay.acceptance import SimulatedAcceptance
from dsv4_npu.replay.intake import Policy
from dsv4_npu.replay.runner import Deployment, replay
from dsv4_npu.replay.trace import TraceRequest
from dsv4_npu.spec.sizing import next_allocated
from tests.docs.faults import PAGE, allocator, fault, filled, life_on, refused, serve
from tests.docs.pages import blocks, read

Probe = Callable[..., list[str]]


def probe(name: str) -> Probe:
    """The function that the page's Python block of that name defines."""
    scope: dict[str, Any] = {}
    exec(blocks(read("troubleshooting.md"), "python")[name], scope)
    found: Probe = scope[name.replace("-", "_")]
    return found


def cached(life: Lifecycle) -> PrefixCache:
    assert life.cache is not None
    return life.cache


def hit(life: Lifecycle, tokens: list[int]) -> list[str]:
    """What a prompt finds in the cache, and what the cache holds."""
    length = cached(life).match(np.array(tokens[:-1], np.int32)).length
    return [f"cached = {length} of {len(tokens)} tokens", *probe("prefix-nodes")(cached(life))]


def surprise(planted: bool, found: list[str], wanted: int) -> list[str]:
    """What is told when planted; without the fault the prompt must find ``wanted`` tokens."""
    return [] if not planted and found[0].startswith(f"cached = {wanted} of") else found


@fault("hit-without-capture")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend, c4_state_owner="request")
    life = life_on(alloc, capture=None if planted else lambda row, end: (row, end))
    life.finish(serve(life, life.admit("first", [1] * 300, 8)))
    return surprise(planted, hit(life, [1] * 300), 256)


@fault("hit-without-window")
def _(planted: bool, backend: str) -> list[str]:
    life = life_on(allocator(backend))
    life.finish(serve(life, life.admit("first", [1] * 300, 8)))
    life.finish(serve(life, life.admit("second", [1] * 128 + [2] * 172, 8)))
    if planted:
        assert cached(life).evict(FamilyCounts(0, 2, 0))
    return surprise(planted, hit(life, [1] * 128 + [3] * 172), 128)


@fault("hit-without-rows")
def _(planted: bool, backend: str) -> list[str]:
    life = life_on(allocator(backend))
    request = life.admit("first", [1] * 300, 8)
    if planted:
        step = life.extend([(request, 300)])
        life.launch(step)
        life.done(step)
        life.learn(step, {request: [7]})
    else:
        serve(life, request, chunk=300)
    life.decode_plan([request])
    return surprise(planted, hit(life, [1] * 300), 256)


@fault("hit-of-less-than-a-granule")
def _(planted: bool, backend: str) -> list[str]:
    life = life_on(allocator(backend, c128_page_size=16 if planted else 1))
    request = serve(life, life.admit("first", [1] * 300, 8))
    life.finish(request)
    return surprise(planted, [*hit(life, [1] * 300), f"granule = {cached(life).granule} tokens"], 256)


@fault("room-of-c128")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend, c128_page_size=16, full_pages=64, swa_pages=64, c128_pages=3 if planted else 4)
    rows = [filled(alloc, name, 200) for name in ("a", "b", "c")]
    rows.append(alloc.open("d"))
    return _room(alloc, lambda: filled_on(alloc, rows[3], 200))


@fault("room-of-an-epoch")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend, full_pages=4)
    old, new = filled(alloc, "old", 500), alloc.open("new")
    epoch = alloc.launch()
    alloc.close(old)
    if not planted:
        alloc.done(epoch)
    return _room(alloc, lambda: filled_on(alloc, new, 300))


@fault("room-of-a-session")
def _(planted: bool, backend: str) -> list[str]:
    life = life_on(allocator(backend, full_pages=4), cache=False)
    session = life.admit("talk", [1] * 300, 1)
    serve(life, session)
    if planted:
        life.keep(session)
    else:
        life.finish(session)
    request = life.admit("new", [2] * 300, 8)
    found = refused(lambda: life.extend([(request, 300)]))
    return [*found, *probe("who-holds")(life)] if found else []


@fault("room-of-rows")
def _(planted: bool, backend: str) -> list[str]:
    life = life_on(allocator(backend, request_rows=1))
    session = serve(life, life.admit("talk", [1] * 300, 1))
    if planted:
        life.keep(session)
    else:
        life.finish(session)
    return refused(lambda: life.admit("new", [2] * 300, 8))


@fault("room-never")
def _(planted: bool, backend: str) -> list[str]:
    life = life_on(allocator(backend, full_pages=4))
    return refused(lambda: life.admit("long", [1] * 500, 20 if planted else 8))


def filled_on(alloc: KVAllocator, row: int, length: int) -> None:
    with alloc.transaction() as plan:
        plan.extend(row, length)
        plan.commit(slots=False)


def _room(alloc: KVAllocator, call: Callable[[], object]) -> list[str]:
    """A refusal with the pages out of each free list."""
    usage = ", ".join(f"{name} {used} of {total}" for name, (used, _, total) in alloc.usage().items())
    found = refused(call)
    return [*found, f"usage: {usage}"] if found else []


def rewound(life: Lifecycle, request: Request, wanted: int) -> tuple[int, list[str]]:
    committed, targets = life.alloc.committed(request.row), probe("rewind-targets")(life, request)
    position = life.rewind(request, wanted)
    return position, [f"committed = {committed}, rewind(request, {wanted}) = {position}", *targets]


@fault("rewind-past-the-rings")
def _(planted: bool, backend: str) -> list[str]:
    life = life_on(allocator(backend, verify_width=4), cache=False)
    request = life.admit("chat", [1] * 300, 40)
    serve(life, request, chunk=300 if planted else PAGE, runs=[[1, 2, 3, 4]] * 3)
    position, told = rewound(life, request, 290)
    return [] if position == 256 else told


@fault("rewind-to-a-page")
def _(planted: bool, backend: str) -> list[str]:
    life = life_on(allocator(backend, verify_width=4), cache=False)
    request = serve(life, life.admit("chat", [1] * 250, 40), runs=[[1, 2, 3, 4]] * 4)
    wanted = 262 if planted else len(request)
    position, told = rewound(life, request, wanted)
    return [] if position == wanted - 1 else told


@fault("rewind-of-an-evicted-window")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend, verify_width=4)
    row = filled(alloc, "chat", 600)
    if planted:
        alloc.evict_window(row)
    return refused(lambda: alloc.rewind(row, 400))


@fault("reject")
def _(planted: bool, backend: str) -> list[str]:
    life = life_on(
        allocator(backend, verify_width=8, full_pages=64, swa_pages=64, c128_pages=64, row_width=8192), cache=False
    )
    request = serve(life, life.admit("chat", [1] * 4098, 100), chunk=8192)
    alloc, row = life.alloc, request.row
    filled_on(alloc, row, 4352)
    before = (alloc.allocated(row), alloc.usage())
    serve(life, request, runs=[[5]])
    if not planted:
        return [] if (alloc.allocated(row), alloc.usage()) == before else ["pages moved"]
    following = next_allocated(alloc.allocated(row), alloc.committed(row), life.reserve, PAGE)
    return [
        f"accept_lens = 1 of D = {life.width}: committed = {alloc.committed(row)}, allocated = {alloc.allocated(row)}",
        f"next allocation = max(allocated, ceil_page(committed + reserve)) = {following}",
        f"FULL pages in use: {before[1]['FULL'][0]} before, {alloc.usage()['FULL'][0]} after",
    ]


@fault("retract-storm")
def _(planted: bool, backend: str) -> list[str]:
    config = CacheConfig(
        ModelSpec.load("tiny"),
        PlatformSpec.load("a3"),
        SpeculationSpec("chain", 3),
        context_len=4096,
        request_rows=8,
    )
    trace = [TraceRequest(i, 10.0 * i, 1000, 600, np.arange(2) + 10 * i) for i in range(8)]
    policy = Policy(8, 2048, "chunk" if planted else "whole", output_estimate=0.0 if planted else 1.0)
    sizes = sizes_for_tokens(config, 2560, 1.0)
    acceptance = SimulatedAcceptance(0, 0.7, config.verify_width)
    outcome = replay(trace, Deployment(config, sizes, acceptance, policy, prefix_cache=False, backend=backend))
    assert outcome.clean, outcome.problems
    counters = outcome.counters
    assert counters.served == len(trace)
    if not counters.retracted:
        return []
    again = counters.recomputed_tokens / counters.prefilled_tokens
    return [f"served {counters.served}, retracted {counters.retracted}, {again:.0%} of the prefill was computed again"]


@fault("row-at-admission")
def _(planted: bool, backend: str) -> list[str]:
    life = life_on(allocator(backend, row_width=256, verify_width=4))
    return refused(lambda: life.admit("chat", [1] * 200, 50 if planted else 48))


@fault("row-too-late")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend, row_width=200)
    row = alloc.open("chat")
    return refused(lambda: filled_on(alloc, row, 256 if planted else 200))
