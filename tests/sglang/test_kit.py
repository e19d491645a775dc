"""SGLang's shipped radix-cache kit: its 19 configurations with our component registered, and ours on our own pools."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CONFIGS, CacheConfig
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures

from dsv4_npu.sglang.c128_component import C128Component
from tests.sglang.sides import GROUP, PAGE, UNIT, Side, prepare

pytestmark = pytest.mark.filterwarnings("ignore")
OURS = {ComponentType.C128: C128Component}


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixtures, "get_device", lambda: "cpu")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_the_kit_runs_with_our_component_registered(config: CacheConfig) -> None:
    cache, allocator, table = fixtures.build_fixture(config, component_registry_override=OURS)
    kit = UnifiedRadixCacheFixtures()
    kit.cfg = config
    pages = max(2, 8 // config.page_size)
    first, second = kit._make_seq(1, pages), kit._make_seq(1, pages - 1) + kit._make_seq(900, 1)
    kit._insert(cache, allocator, table, first)
    kit._insert(cache, allocator, table, second)
    assert ComponentType.C128 not in cache.components
    found = fixtures.match_prefix(cache, first)
    assert found.device_prefix_len == len(first)
    assert cache.evict(EvictParams(num_tokens=1 << 20, swa_num_tokens=1 << 20, mamba_num=1 << 10)).num_tokens_evicted
    assert fixtures.match_prefix(cache, first).device_prefix_len == 0


class DSV4Kit(UnifiedRadixCacheFixtures):
    """The kit's steps over our pools: its fixture builds them in the place of its SWA pools."""

    cfg = CacheConfig(
        page_size=PAGE,
        components=(ComponentType.FULL, ComponentType.SWA, ComponentType.C128),
        sliding_window_size=128,
        kv_size=128 * PAGE,
        max_context_len=16384,
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        prepare()
        self.side = Side(True, full_pages=128, rows=6, context=16384)
        monkeypatch.setattr(fixtures, "ReqToTokenPool", lambda **_: self.side.table)
        monkeypatch.setattr(fixtures, "SWAKVPool", lambda **_: self.side.pool)
        monkeypatch.setattr(fixtures, "SWATokenToKVPoolAllocator", lambda **_: self.side.alloc)
        self.cache, _, _ = fixtures.build_fixture(self.cfg, component_registry_override=OURS)
        prepare()  # the fixture published settings of its own

    def insert(self, tokens: list[int]) -> Any:
        """Insert as a request would: its slots, and the C128 pages of its row."""
        (req,) = self.side.open(1)
        bundle = self.side.extend([req], [len(tokens)])
        pages = torch.from_numpy(self.side.table.sidecar.prefix(req.kv.req_pool_idx, 0, len(tokens) // GROUP))
        params = InsertParams(key=RadixKey(array("q", tokens)), value=bundle.out_full_loc, c128_value=pages)
        result = self.cache.insert(params)
        self.side.table.free(req)
        return result

    def pages_of(self, tokens: list[int]) -> list[int]:
        """C128 pages on the matched path."""
        component = self.cache.components[ComponentType.C128]
        return component._collect_device_pages(fixtures.match_prefix(self.cache, tokens).best_match_node).tolist()


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> DSV4Kit:
    return DSV4Kit(monkeypatch)


def test_nodes_end_at_complete_c128_pages(kit: DSV4Kit) -> None:
    tokens = list(range(3 * GROUP))
    kit.insert(tokens)
    assert len(kit.pages_of(tokens)) == 3
    for length, groups in ((GROUP - 1, 0), (GROUP, 1), (2 * GROUP + 1900, 2)):
        found = fixtures.match_prefix(kit.cache, tokens[:length] + [-1] * 10)
        assert found.device_prefix_len == groups * GROUP
    assert kit.side.alloc.verify_byte_accounting() == []


def test_a_branch_shares_the_pages_before_it(kit: DSV4Kit) -> None:
    first = list(range(2 * GROUP))
    second = [*range(GROUP), *range(50000, 50000 + GROUP)]
    kit.insert(first)
    before = kit.side.counts()
    kit.insert(second)
    assert kit.pages_of(first)[0] == kit.pages_of(second)[0]
    assert kit.pages_of(first)[1] != kit.pages_of(second)[1]
    after = kit.side.counts()
    assert before["c128"] - after["c128"] == UNIT
    assert before["full"] - after["full"] == GROUP
    assert kit.side.alloc.verify_byte_accounting() == []


def test_evicting_leaves_returns_their_pages(kit: DSV4Kit) -> None:
    start = kit.side.counts()
    kit.insert(list(range(3 * GROUP)))
    kit.insert([*range(GROUP), *range(70000, 70000 + GROUP)])
    while kit.cache.evict(EvictParams(num_tokens=PAGE)).num_tokens_evicted:
        assert kit.side.alloc.verify_byte_accounting() == []
    assert kit.side.counts() == start


def test_a_locked_path_keeps_its_pages(kit: DSV4Kit) -> None:
    tokens = list(range(2 * GROUP))
    kit.insert(tokens)
    found = fixtures.match_prefix(kit.cache, tokens)
    lock = kit.cache.inc_lock_ref(found.last_device_node)
    assert kit.cache.evict(EvictParams(num_tokens=1 << 20)).num_tokens_evicted == 0
    assert len(kit.pages_of(tokens)) == 2
    kit.cache.dec_lock_ref(found.last_device_node, lock.to_dec_params())
    assert kit.cache.evict(EvictParams(num_tokens=1 << 20)).num_tokens_evicted == 2 * GROUP
    assert kit.side.counts()["c128"] == 8 * UNIT
