"""The prefix cache: keys, take-over exactly once, duplicates, replacement, locks, eviction order and counts."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu.alloc import AllocSpec, FamilyCounts, KVAllocator
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.prefix_cache import PrefixCache
from dsv4_npu.alloc.request import Request
from dsv4_npu.errors import ConfigError, InputError, OwnershipError
from tests.lifecycle.engine import decode, initial, life_of, prefill, turn

SPEC = AllocSpec(128, 1, 64, 64, 64, 8, 2048, verify_width=4)


def cached(life: Lifecycle) -> PrefixCache:
    assert life.cache is not None
    return life.cache


def serve(life: Lifecycle, name: str, tokens: list[int], budget: int = 128) -> Request:
    request = life.admit(name, tokens, 2)
    prefill(life, request, budget=budget)
    return request


def test_the_granule_is_the_least_common_multiple() -> None:
    for page, c128_page, granule in ((128, 16, 2048), (256, 1, 256), (128, 1, 128), (384, 2, 768)):
        alloc = KVAllocator(AllocSpec(page, c128_page, 8, 8, 8, 1, 6144), backend="python")
        assert PrefixCache(alloc).granule == granule
    wide = AllocSpec(128, 1, 8, 8, 8, 1, 1024, window=129)
    with pytest.raises(ConfigError, match="window = 129"):
        PrefixCache(KVAllocator(wide, backend="python"))


def test_duplicates_share_the_cached_pages_and_free_their_own() -> None:
    life = life_of(SPEC)
    one, two = (life.admit(name, [1] * 300 + [i], 2) for i, name in enumerate(("one", "two")))
    prefill(life, one, budget=128)
    assert life.alloc.usage()["FULL"][0] == 3
    prefill(life, two, budget=128)
    assert life.alloc.usage()["FULL"][0] == 4, "two pages are shared, each has one of its own"
    table = life.alloc.state.block_table
    assert table[one.row, :2].tolist() == table[two.row, :2].tolist()
    assert cached(life).nodes == 2
    assert [node.locks for node in cached(life).walk()] == [2, 2]
    life.alloc.audit()
    life.finish(one)
    life.finish(two)
    assert life.alloc.usage()["FULL"][0] == 2
    cached(life).clear()
    assert initial(life.alloc)


def test_a_granule_that_nobody_could_start_behind_is_replaced() -> None:
    life = life_of(SPEC)
    first = serve(life, "first", [1] * 300, budget=1024)  # its first granule's C4 rows were never saved
    life.finish(first)
    cache = cached(life)
    assert [(node.end, cache.usable(node)) for node in cache.walk()] == [(128, False), (256, True)]
    old = cache.walk()[0].full_pages.tolist()
    short = life.admit("short", [1] * 200, 2)
    assert short.cached == 0
    prefill(life, short, budget=128)
    assert [(node.end, cache.usable(node)) for node in cache.walk()] == [(128, True), (256, True)]
    assert cache.walk()[0].full_pages.tolist() != old
    life.alloc.audit()
    assert life.admit("again", [1] * 200, 2).cached == 128


def test_a_read_granule_is_never_replaced() -> None:
    life = life_of(SPEC)
    reader = serve(life, "reader", [1] * 300, budget=1024)
    pages = [node.full_pages.tolist() for node in cached(life).walk()]
    other = serve(life, "other", [1] * 200, budget=128)
    assert [node.full_pages.tolist() for node in cached(life).walk()] == pages
    assert life.alloc.shared(other.row) == 0, "it cannot read a granule whose C4 rows it needs and that has none"
    life.alloc.audit()
    assert reader.row


def test_a_finished_prefix_that_nobody_could_start_behind_goes_at_once() -> None:
    life = life_of(SPEC)
    request = life.admit("r", [1] * 250, 2)
    turn(life, life.extend([(request, 250)]), {request: [1]})
    node = cached(life).walk()[0]
    assert not cached(life).usable(node)
    life.finish(request)
    assert not node.alive
    assert initial(life.alloc)


def test_sliding_windows_of_a_long_prefix_are_freed_except_at_the_ends() -> None:
    life = life_of(AllocSpec(128, 4, 64, 64, 64, 2, 4096, verify_width=4))
    request = serve(life, "r", [1] * 1600, budget=512)
    nodes = cached(life).walk()
    assert [(node.end, node.swa) for node in nodes] == [(512, 1), (1024, 1), (1536, 1)]
    assert life.alloc.usage()["SWA"][0] == 4
    life.finish(request)
    assert cached(life).evictable == FamilyCounts(12, 3, 3)


def test_locks_and_lookups_refuse_what_is_wrong() -> None:
    life = life_of(SPEC)
    request = serve(life, "r", [1] * 300)
    cache = cached(life)
    with pytest.raises(OwnershipError, match="reads the prefix that ends at 256 already"):
        cache.lock(request.row, cache.root)
    with pytest.raises(OwnershipError, match="row 5 reads no cached prefix"):
        cache.unlock(5)
    with pytest.raises(OwnershipError, match="row 5 is not locked"):
        cache.insert(np.zeros(300, np.int32), 5, lambda end: True)
    with pytest.raises(InputError, match="400 tokens to insert, 300 are committed"):
        cache.insert(np.zeros(400, np.int32), request.row, lambda end: True)
    life.finish(request)
    match = cache.match(np.ones(300, np.int32))
    cache.clear()
    with pytest.raises(OwnershipError, match="was evicted since"):
        cache.lock(1, match.node)
    with pytest.raises(InputError, match="registered already"):
        PrefixCache(life.alloc)


def test_a_running_prefix_is_not_evictable() -> None:
    life = life_of(SPEC)
    request = serve(life, "r", [1] * 300)
    cache = cached(life)
    assert cache.evictable == FamilyCounts(0, 1, 0), "only the window that the reader has passed"
    assert not cache.evict(FamilyCounts(1, 0, 0))
    assert cache.evict(FamilyCounts(0, 1, 0))
    life.alloc.audit()
    decode(life, request, [1, 1])
    life.finish(request)
    assert cache.evictable == FamilyCounts(2, 1, 2)


def test_windows_go_before_leaves_when_only_swa_is_short() -> None:
    life = life_of(SPEC)
    life.finish(serve(life, "r", [1] * 300))
    life.finish(serve(life, "s", [1] * 128 + [2] * 200))
    cache = cached(life)
    assert cache.nodes == 3
    assert cache.evict(FamilyCounts(0, 1, 0))
    assert cache.nodes == 2, "the leaf used longest ago goes whole: without a window nothing can start behind it"
    assert cache.evict(FamilyCounts(0, 1, 0))
    assert (cache.nodes, cache.evictable) == (2, FamilyCounts(2, 1, 2)), "the inner node keeps what continues it"
    assert life.admit("t", [1] * 128 + [2] * 200, 2).cached == 256


class Model:
    """What an LRU cache of chains does: a dictionary from prefix to last use, evicting the oldest leaf."""

    def __init__(self) -> None:
        self.used: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self.clock = 0

    def touch(self, chain: tuple[int, ...]) -> None:
        self.clock += 1
        for length in range(1, len(chain) + 1):
            self.used[chain[:length]] = self.clock

    def match(self, chain: tuple[int, ...]) -> int:
        length = 0
        while length < len(chain) and chain[: length + 1] in self.used:
            length += 1
        self.touch(chain[:length])
        return length

    def evict(self) -> None:
        leaves = [c for c in self.used if not any(d[:-1] == c for d in self.used)]
        oldest = min(self.used[c] for c in leaves)
        assert sum(self.used[c] == oldest for c in leaves) == 1
        del self.used[next(c for c in leaves if self.used[c] == oldest)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("serve"), st.lists(st.integers(0, 2), min_size=1, max_size=4)),
            st.tuples(st.just("match"), st.lists(st.integers(0, 2), min_size=1, max_size=4)),
            st.tuples(st.just("evict"), st.just([])),
        ),
        max_size=14,
    )
)
def test_it_behaves_like_a_dictionary_of_chains(operations: list[tuple[str, list[int]]]) -> None:
    life, model = life_of(SPEC), Model()
    cache = cached(life)
    for kind, chain in operations:
        tokens = [token for token in chain for _ in range(128)]
        if kind == "serve":
            request = life.admit("r", [*tokens, 9], 1)
            assert request.cached == 128 * model.match(tuple(chain))
            prefill(life, request, budget=128)
            life.finish(request)
            if request.cached < len(tokens):
                model.touch(tuple(chain))
        elif kind == "match":
            assert cache.match(np.array(tokens, np.int32)).length == 128 * model.match(tuple(chain))
        elif model.used:
            assert cache.evict(FamilyCounts(1, 0, 0))
            model.evict()
        assert cache.nodes == len(model.used)
        life.alloc.audit()
