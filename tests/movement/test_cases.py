"""cases.md 6, 29 to 32 and 46, each for its whole kind; 6 and 46 on the real model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dsv4_npu import addressing
from dsv4_npu.alloc.prefix_cache import PrefixCache
from dsv4_npu.alloc.prefix_tree import Node
from dsv4_npu.budget import GIB, PoolSizes, budget_of, largest_sizes, unit_costs
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec
from dsv4_npu.emulation import forward
from dsv4_npu.emulation.engine import Engine, RequestRun
from dsv4_npu.emulation.states import StateKeeper
from dsv4_npu.errors import ConfigError, Dsv4NpuError
from dsv4_npu.movement.payload import window_pages
from dsv4_npu.pools import DSV4Pools
from tests.emulation.harness import Bench, Setting
from tests.emulation.test_life import words
from tests.movement.ring_reads import Reads, WrongRowError, checked, rows_of
from tests.movement.test_model import poison
from tests.movement.test_payload import row_three
from tests.movement.world import Shape

#: One request row and one C128 entry per page: whoever comes next gets row 1, and shares granules of 128 tokens.
ONE_ROW = Setting(c128_page=1, width=6, batch=1, new_tokens=10, chunk=128)


# -- 6 ----------------------------------------------------------------------------------------------------------------


def serve(engine: Engine, prompt: list[int]) -> RequestRun:
    run = engine.submit(prompt, 10)
    engine.run()
    return run


def reuse(bench: Bench, platform: str, prefix: int, own: int, capture: bool = True) -> tuple[RequestRun, Reads]:
    """A on row 1 ends, a stranger on row 1 ends, B on row 1 has A's first ``prefix`` tokens and ``own`` ones."""
    setting = replace(ONE_ROW, platform=platform)
    first, prompt = words(1, 290), words(1, 290)[:prefix] + words(2, own)
    want = bench.oracle.greedy(prompt, 10).tokens
    truth = rows_of(bench, setting, prompt + want)
    engine = bench.engine(setting, "ngram")
    assert engine.life.cache is not None
    if not capture:
        engine.life.cache._capture = None
    serve(engine, first)
    serve(engine, words(3, 70))
    run = engine.submit(prompt, 10)
    with checked(engine, truth) as reads:
        engine.step()
        assert run.row == 1
        engine.run()
    bench.check(run)
    return run, reads


#: Shared tokens, tokens of B's own, granules of 128 that are hit.
KINDS = [(256, 34, 256), (130, 1, 128), (255, 6, 128), (3, 2, 0)]


@pytest.mark.parametrize(
    ("platform", "prefix", "own", "cached"),
    [
        ("a3", *KINDS[0]),
        ("a5", *KINDS[0]),
        ("a5", *KINDS[3]),
        *(pytest.param("a5", *kind, marks=pytest.mark.slow) for kind in KINDS[1:3]),
        *(pytest.param("a3", *kind, marks=pytest.mark.slow) for kind in KINDS[1:]),
    ],
)
def test_6_every_ring_row_read_is_the_readers_or_its_prefixs(
    bench: Bench, platform: str, prefix: int, own: int, cached: int
) -> None:
    run, reads = reuse(bench, platform, prefix, own)
    assert run.cached == cached
    for branch in ("compressor", "indexer"):
        read = reads.of(branch, [2, 4])
        # The first window behind the hit overlaps the prefix's last one; at 0 it overlaps nothing.
        assert {p for p in read if p < cached} == set(range(cached - 4, cached))
        assert any(p >= cached for p in read), "and rows of its own"
    assert all(p >= cached for p in reads.of("compressor", [3])), "C128 windows begin at the hit"


@pytest.mark.parametrize(("prefix", "own", "cached"), KINDS[:2])
def test_6_without_captured_rows_the_hit_is_refused_on_a5(bench: Bench, prefix: int, own: int, cached: int) -> None:
    run, reads = reuse(bench, "a5", prefix, own, capture=False)
    assert (run.cached, cached > 0) == (0, True)
    assert min(reads.of("indexer", [2, 4])) < 0, "its first window was computed again"


def c4_banks_emptied(self: StateKeeper, requests: Any, real: Any = StateKeeper.before_forward) -> None:
    real(self, requests)
    if any(r.cached == r.planned - 34 for r in requests):
        for state in (self.pools.c4_state, self.pools.index_state):
            state.data[..., state.half :] = float("-inf")


def negative_positions_from_the_ring(ratio: int, *args: Any, real: Any = forward.plan_ring, **kwargs: Any) -> Any:
    plan = real(ratio, *args, **kwargs)
    ring, starts = args[:2]
    if (ratio, ring, starts[0]) == (4, 16, 0):
        # Rows of bank 1: where the row's last owner left something.
        object.__setattr__(plan, "prior_rows", torch.where(plan.prior_rows == plan.dummy, 16 + 9, plan.prior_rows))
    return plan


@pytest.mark.parametrize(
    ("platform", "kind", "target", "name", "wrong"),
    [
        ("a5", KINDS[0], StateKeeper, "_restore", lambda self, row, captured: None),
        ("a5", KINDS[1], StateKeeper, "_restore", lambda self, row, captured: None),
        ("a3", KINDS[0], StateKeeper, "before_forward", c4_banks_emptied),
        ("a5", KINDS[3], forward, "plan_ring", negative_positions_from_the_ring),
    ],
    ids=["not restored at 256", "not restored at 128", "banks of the prefix emptied", "before position 0"],
)
def test_6_what_must_be_caught(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    kind: tuple[int, int, int],
    target: Any,
    name: str,
    wrong: Callable[..., Any],
) -> None:
    monkeypatch.setattr(target, name, wrong)
    with pytest.raises(WrongRowError):
        reuse(bench, platform, *kind[:2])


def test_6_a_hit_that_is_not_refused_without_captured_rows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "usable", lambda self, node: self._window_resident(node))
    monkeypatch.setattr(PrefixCache, "insert", any_owner(PrefixCache.insert))
    with pytest.raises(WrongRowError):
        reuse(bench, "a5", 256, 34, capture=False)


def any_owner(insert: Any) -> Any:
    """Insert as if the platform kept C4 rows with the pages."""

    def by_page(self: PrefixCache, *args: Any) -> int:
        self._by_page = True
        try:
            return int(insert(self, *args))
        finally:
            self._by_page = False

    return by_page


# -- 46 ---------------------------------------------------------------------------------------------------------------


def node_at(cache: PrefixCache, tokens: list[int], end: int) -> Node:
    node = cache.match(np.array(tokens, np.int32)).node
    while node.end > end:
        assert node.parent is not None
        node = node.parent
    assert node.end == end
    return node


def without_window(bench: Bench, platform: str, page: int, gone: int, prompt: list[int]) -> RequestRun:
    """A request that has the prefix of a finished one, of which the window before ``gone`` was evicted."""
    engine = bench.engine(replace(ONE_ROW, platform=platform, page=page, chunk=page), "early-exit")
    first = words(1, 2 * page + 40)
    serve(engine, first)
    cache = engine.life.cache
    assert cache is not None
    node = node_at(cache, first, gone)
    assert cache._free_swa(node, node.full_pages) == 1
    poison(engine)
    engine.alloc.audit()
    run = serve(engine, prompt)
    bench.check(run)
    engine.alloc.audit()
    return run


@pytest.mark.parametrize(
    ("platform", "page", "gone", "shared", "cached"),
    [
        ("a3", 128, 256, 256, 128),
        ("a5", 128, 128, 140, 0),
        ("a5", 128, 128, 256, 256),
        pytest.param("a3", 256, 256, 256, 0, marks=pytest.mark.slow),
        pytest.param("a5", 128, 256, 256, 128, marks=pytest.mark.slow),
        pytest.param("a5", 256, 256, 256, 0, marks=pytest.mark.slow),
    ],
)
def test_46_a_hit_without_its_window_is_shortened_or_refused(
    bench: Bench, platform: str, page: int, gone: int, shared: int, cached: int
) -> None:
    prompt = words(1, 2 * page + 40)[:shared] + words(2, 9)
    assert without_window(bench, platform, page, gone, prompt).cached == cached


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_46_a_hit_that_is_not_refused_is_caught(bench: Bench, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(PrefixCache, "_window_resident", lambda self, node: True)
    with pytest.raises((AssertionError, Dsv4NpuError)):
        without_window(bench, platform, 128, 256, words(1, 296)[:256] + words(2, 9))


# -- 29 to 32 ---------------------------------------------------------------------------------------------------------


def deployed(model: str, platform: str = "a3", kind: Any = "dspark", drafts: int = 5, **rest: Any) -> CacheConfig:
    speculation = SpeculationSpec(kind, drafts)
    return CacheConfig(ModelSpec.load(model), PlatformSpec.load(platform), speculation, **rest)


def test_29_a_budget_counts_actual_bytes() -> None:
    setting = deployed("v4_pro_dspark", context_len=131072, request_rows=64)
    assert unit_costs(setting).swa_draft_slot == 3 * 1024, "three draft stages are three"
    sizes = largest_sizes(setting, 24 * GIB)
    pools = DSV4Pools(setting, sizes, device="meta", draft_stages=True)
    tensors = [t for slab in pools.families().values() for t in slab.tensors()]
    assert budget_of(setting, sizes).pool_bytes == pools.usage_bytes() == sum(t.nbytes for t in tensors)
    flash = deployed("v4_flash", kind="chain", drafts=3, context_len=131072, request_rows=64)
    assert largest_sizes(flash, 24 * GIB, max_tokens=1_048_576).full_pages * 128 == 1_048_576
    with pytest.raises(ConfigError, match="--max-running"):
        largest_sizes(setting, GIB)
    one, two = (deployed("v4_pro", context_len=n, request_rows=8) for n in (4096, 1 << 20))
    assert unit_costs(one).c128_bank == unit_costs(two).c128_bank, "whatever the context, and there is no chunk in it"


@pytest.mark.parametrize(("page", "rows"), [(256, 8192), (128, 16384)])
def test_30_reachable_c4_state_rows(page: int, rows: int) -> None:
    setting = deployed("v4_flash", kind="none", drafts=0, page_size=page)
    assert setting.ring(4) == 8
    assert budget_of(setting, PoolSizes(4096, 262144 // page, 10, 8)).families["c4 state"].usable_rows == rows
    slots = torch.arange(page, page + 262144)
    assert len(torch.unique(addressing.swa_state_rows(slots, page, 8, -1))) == rows


@pytest.mark.parametrize(
    ("length", "width", "c4", "c128"),
    [
        (9, 1, [28, 29, 30, 31, 24], [3]),
        (9, 4, [52, 53, 54, 55, 56], [6]),
        (300, 1, None, [3]),
        (300, 4, None, [6]),
        (256, 1, None, []),
        (256, 4, None, []),
    ],
)
def test_31_rows_and_pages_of_both_rings(length: int, width: int, c4: list[int] | None, c128: list[int]) -> None:
    _, lists = row_three(Shape("a5", width=width), length)
    assert c4 is None or lists.c4_state.tolist() == c4
    assert lists.c128_state.tolist() == c128


def test_32_stale_tail_pages_stay() -> None:
    assert window_pages([100, 101, 102, 103], 129, 128, 128).tolist() == [100, 101]
