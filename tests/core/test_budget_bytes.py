"""The budget's bytes are those of the tensors, the largest deployment is the largest, and what is refused says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.budget import (
    GIB,
    PoolSizes,
    budget_of,
    cost,
    fixed_bytes,
    indexer_row_bytes,
    kv_row_bytes,
    largest_sizes,
    sizes_for_tokens,
    unit_costs,
)
from dsv4_npu.config import INDEXER_ROWS, KV_ROWS, CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec
from dsv4_npu.errors import ConfigError
from dsv4_npu.pools import DSV4Pools, indexer_format, kv_format
from tests.core import budget_tables

SPECULATIONS = budget_tables.SPECULATIONS
MIB = 2**20


def config(model: str = "v4_flash", platform: str = "a3", drafts: int = 3, **rest: Any) -> CacheConfig:
    speculation = SpeculationSpec("chain", drafts) if drafts else SpeculationSpec()
    return CacheConfig(ModelSpec.load(model), PlatformSpec.load(platform), speculation, **rest)


def name_of(setting: CacheConfig) -> str:
    return f"{setting.model.name}-{setting.platform.name}-{setting.speculation.kind}"


def differences(setting: CacheConfig, sizes: PoolSizes, device: str = "meta", **states: Any) -> list[str]:
    """Every family, and the tables, whose bytes or reachable rows differ from what is built."""
    pools = DSV4Pools(setting, sizes, device=device, draft_stages=setting.speculation.speculative, **states)
    dtype = states.get("state_dtype", torch.float32)
    budget = budget_of(setting, sizes, state_bytes=dtype.itemsize)
    built = {name: sum(t.numel() * t.element_size() for t in slab.tensors()) for name, slab in pools.families().items()}
    wrong = [name for name in built if budget.families[name].nbytes != built[name]]
    wrong += [name for name, slab in pools.families().items() if budget.families[name].layers != slab.layers]
    if list(budget.families) != list(built) or budget.pool_bytes != pools.usage_bytes():
        wrong.append("sum")
    entries = AllocSpec.of(setting, sizes).table_entries
    if device != "meta":
        entries = KVAllocator(AllocSpec.of(setting, sizes), device=device).mirrors.tables.numel()
    if budget.table_bytes != 4 * entries or budget.total_bytes != budget.pool_bytes + budget.table_bytes:
        wrong.append("tables")
    return wrong


# -- equality ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", list(budget_tables.combinations()), ids=name_of)
def test_bytes_are_those_of_the_built_pools(setting: CacheConfig) -> None:
    for sizes in (sizes_for_tokens(setting, setting.page), largest_sizes(setting, 24 * GIB)):
        assert differences(setting, sizes) == []


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(["tiny", "v4_flash", "v4_pro_dspark"]),
    platform=st.sampled_from(["a2", "a3", "a5", "cpu"]),
    drafts=st.integers(0, 9),
    geometry=st.fixed_dictionaries(
        {
            "page_size": st.sampled_from([None, 128, 256, 384]),
            "c128_page_size": st.sampled_from([16, 32, 64]),
            "context_len": st.integers(1, 8192),
            "request_rows": st.integers(1, 70),
            "kv_row": st.sampled_from([None, *KV_ROWS]),
            "indexer_row": st.sampled_from([None, *INDEXER_ROWS]),
        }
    ),
    sizes=st.tuples(*[st.integers(1, 5000)] * 3),
    more_rows=st.integers(0, 3),
    wide=st.booleans(),
)
def test_bytes_of_any_geometry(
    model: str,
    platform: str,
    drafts: int,
    geometry: dict[str, Any],
    sizes: tuple[int, int, int],
    more_rows: int,
    wide: bool,
) -> None:
    setting = config(model, platform, drafts, **geometry)
    pools = PoolSizes(*sizes, setting.request_rows + more_rows)
    assert differences(setting, pools, state_dtype=torch.float64 if wide else torch.float32) == []


@pytest.mark.parametrize("speculation", SPECULATIONS, ids=lambda s: s.kind)
@pytest.mark.parametrize("platform", ["a2", "a3", "a5", "cpu"])
def test_bytes_of_real_tensors(platform: str, speculation: SpeculationSpec) -> None:
    setting = replace(config("tiny", platform, request_rows=3, context_len=1000), speculation=speculation)
    assert differences(setting, sizes_for_tokens(setting, 4096), device="cpu") == []
    assert differences(setting, PoolSizes(7, 5, 4, 3), device="cpu", state_dtype=torch.float64) == []


@given(nope=st.integers(1, 600), rope=st.integers(1, 64), indexer=st.integers(1, 300))
def test_row_bytes_are_those_of_the_row_formats(nope: int, rope: int, indexer: int) -> None:
    model = replace(ModelSpec.load("tiny"), head_dim=nope + 2 * rope, rope_dim=2 * rope, indexer_dim=indexer)
    for kv, key in zip(KV_ROWS, INDEXER_ROWS, strict=True):
        setting = CacheConfig(model, PlatformSpec.load("a3"), kv_row=kv, indexer_row=key)
        assert kv_row_bytes(setting) == kv_format(kv, nope, 2 * rope).row_bytes
        assert indexer_row_bytes(setting) == indexer_format(key, indexer).row_bytes


def test_the_page_in_docs_is_the_one_that_is_generated() -> None:
    text = budget_tables.DOC.read_text(encoding="utf-8")
    assert budget_tables.filled(text) == text, "run python -m tests.core.budget_tables"
    rows = [line for line in text.splitlines() if line.count("|") == 9][2:]
    assert len(rows) == 72
    assert all(row.endswith("| 0 |") for row in rows)


# -- mutations --------------------------------------------------------------------------------------------------------


def _no_dummy_page(real: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(*args: Any) -> Any:
        return {
            name: replace(f, rows=f.rows - f.unit_rows) if "state" not in name else f for name, f in real(*args).items()
        }

    return mutant


def _state_rows_of_a_bank_alone(real: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(*args: Any) -> Any:
        return {name: replace(f, rows=f.usable_rows) if "state" in name else f for name, f in real(*args).items()}

    return mutant


def _twice_the_c4_rows(real: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(*args: Any) -> Any:
        return {name: replace(f, rows=2 * f.rows) if name == "c4 state" else f for name, f in real(*args).items()}

    return mutant


@pytest.mark.parametrize(
    ("attribute", "mutate"),
    [
        ("draft_stages", lambda real: lambda setting: 1),
        ("draft_stages", lambda real: lambda setting: 0),
        ("kv_row_bytes", lambda real: lambda setting: 583),
        ("kv_row_bytes", lambda real: lambda setting: 1024),
        ("indexer_row_bytes", lambda real: lambda setting: setting.model.indexer_dim),
        ("_table_bytes", lambda real: lambda setting, full: real(setting, full) - 4),
        ("_families", _no_dummy_page),
        ("_families", _state_rows_of_a_bank_alone),
        ("_families", _twice_the_c4_rows),
    ],
)
def test_a_wrong_count_shows(
    monkeypatch: pytest.MonkeyPatch, attribute: str, mutate: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    setting = config("v4_flash_dspark", "a5", 5, request_rows=3)
    sizes = sizes_for_tokens(setting, 65536)
    assert differences(setting, sizes) == []
    monkeypatch.setattr(cost, attribute, mutate(getattr(cost, attribute)))
    assert differences(setting, sizes) != []


# -- known figures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "platform", "token", "swa", "c4_mib", "c128_mib", "million"),
    [
        ("v4_flash", "a3", 6218.5, 44032, (1.64, 3.28), (10, 20), 6.07),
        ("v4_flash", "a2", 6218.5, 44032, (1.64, 3.28), (10, 20), 6.07),
        ("v4_flash", "a5", 4153, 27520, (1.64, 3.28), (10, 20), 4.06),
        ("v4_pro", "a3", 8903, 62464, (2.34, 4.69), (15.5, 31), 8.69),
        ("v4_pro", "a5", 5945, 39040, (2.34, 4.69), (15.5, 31), 5.81),
    ],
)
def test_published_figures(
    model: str,
    platform: str,
    token: float,
    swa: int,
    c4_mib: tuple[float, float],
    c128_mib: tuple[float, float],
    million: float,
) -> None:
    plain, drafting = (unit_costs(config(model, platform, drafts)) for drafts in (0, 3))
    assert plain.token == drafting.token == Fraction(token)
    assert (plain.swa_slot, plain.swa_draft_slot) == (swa, 0)
    assert drafting.swa_draft_slot * config(model).model.num_layers == swa, "one MTP stage"
    assert tuple(round(u.c4_bank / MIB, 2) for u in (plain, drafting)) == c4_mib
    assert (plain.c128_bank / MIB, drafting.c128_bank / MIB) == c128_mib
    assert round(float(plain.token) * MIB / GIB, 2) == million


@pytest.mark.parametrize(("model", "stages"), [("v4_flash", 1), ("v4_flash_dspark", 3), ("v4_pro_dspark", 3)])
def test_draft_stages_are_counted_as_many_as_there_are(model: str, stages: int) -> None:
    costs = unit_costs(config(model))
    assert costs.swa_draft_slot == stages * 1024
    assert unit_costs(config(model, drafts=0)).swa_draft_slot == 0


def test_c4_state_rows_that_can_be_reached() -> None:
    setting = config(drafts=0, page_size=256)
    budget = budget_of(setting, PoolSizes(4096, 262144 // 256, 10, 8))
    assert budget.families["c4 state"].usable_rows == 8192
    assert budget.families["c4 state"].rows == 8192 + 8 + 8, "the dummy bank, and the dummy row rounded up"


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_the_state_of_a_request_is_constant(platform: str) -> None:
    """One request row more costs its banks, its C128 page and its table row: whatever its context and the tokens."""
    for drafts, context, tokens, ratio in ((0, 200, 4096, 1.0), (3, 131072, 2**20, 0.1), (3, 2**20, 2**22, 0.02)):
        few = config("v4_pro", platform, drafts, context_len=context, request_rows=8)
        more = replace(few, request_rows=9)
        costs = unit_costs(few)
        a, b = (budget_of(c, sizes_for_tokens(c, tokens, ratio)) for c in (few, more))
        banks = costs.c128_bank + (costs.c4_bank if platform == "a5" else 0)
        assert b.pool_bytes - a.pool_bytes == banks + costs.c128_page
        assert b.table_bytes - a.table_bytes == 4 * (few.width // 128 + few.sidecar_columns)


def test_what_does_not_depend_on_tokens() -> None:
    for swa_tokens in (None, 8192):
        setting = config("v4_pro_dspark", "a3", 5, request_rows=16)
        sizes = [sizes_for_tokens(setting, n, 0.5, swa_tokens=swa_tokens) for n in (2**20, 2**21)]
        one, two = (budget_of(setting, s).total_bytes - fixed_bytes(setting, swa_tokens) for s in sizes)
        assert two == 2 * one, "twice the tokens cost twice"


# -- the largest deployment -------------------------------------------------------------------------------------------


def meta_bytes(setting: CacheConfig, sizes: PoolSizes) -> int:
    pools = DSV4Pools(setting, sizes, device="meta", draft_stages=setting.speculation.speculative)
    return pools.usage_bytes() + 4 * AllocSpec.of(setting, sizes).table_entries


def check_largest(setting: CacheConfig, budget: int, **rest: Any) -> int:
    """Tokens of the largest deployment, once it fits and one page more was shown not to."""
    sizes = largest_sizes(setting, budget, **rest)
    more = sizes_for_tokens(setting, (sizes.full_pages + 1) * setting.page, **rest)
    assert meta_bytes(setting, sizes) <= budget < meta_bytes(setting, more)
    return sizes.full_pages * setting.page


@pytest.mark.parametrize("gib", [3, 24, 47.3])
@pytest.mark.parametrize("setting", list(budget_tables.combinations())[:36:5], ids=name_of)
def test_one_page_more_does_not_fit(setting: CacheConfig, gib: float) -> None:
    check_largest(setting, int(gib * GIB))
    check_largest(setting, int(gib * GIB), swa_ratio=0.37)
    check_largest(setting, int(gib * GIB), swa_tokens=8192)


@settings(max_examples=40, deadline=None)
@given(budget=st.integers(4_000_000, 12_000_000), ratio=st.floats(0.01, 1), platform=st.sampled_from(["a3", "a5"]))
def test_the_search_finds_what_counting_upwards_finds(budget: int, ratio: float, platform: str) -> None:
    setting = config("tiny", platform, request_rows=4)
    pages = 0
    while budget_of(setting, sizes_for_tokens(setting, (pages + 1) * 128, ratio)).total_bytes <= budget:
        pages += 1
    assert pages
    assert largest_sizes(setting, budget, ratio).full_pages == pages
    for limit in (1, pages - 1, pages, pages + 1, 3 * pages):
        if limit:
            limited = largest_sizes(setting, budget, ratio, max_tokens=limit * 128 + 5)
            assert limited.full_pages == min(limit, pages)


def test_to_the_byte() -> None:
    setting = config("v4_pro_dspark", "a3", 5, request_rows=16)
    sizes = sizes_for_tokens(setting, 1000 * 128)
    exact = meta_bytes(setting, sizes)
    assert largest_sizes(setting, exact) == sizes
    assert largest_sizes(setting, exact - 1).full_pages == 999


def test_a_limit_of_the_user_that_fits_is_kept() -> None:
    setting = config("v4_flash", "a3", request_rows=64)
    assert check_largest(setting, 24 * GIB) > 2**20
    assert largest_sizes(setting, 24 * GIB, max_tokens=2**20).full_pages * 128 == 2**20
    assert largest_sizes(setting, 24 * GIB, max_tokens=2**30) == largest_sizes(setting, 24 * GIB)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, MIB, GIB])
def test_too_little_memory_says_what_to_change(budget: int) -> None:
    setting = config("v4_pro", "a3", request_rows=64)
    with pytest.raises(ConfigError, match=r"64 request rows.*raise --hbm-gib or lower --max-running") as error:
        largest_sizes(setting, budget)
    told = str(error.value)
    if budget < GIB:
        assert told.endswith("(not even one fits)")
        return
    rows = int(told.split("at most ")[1].split()[0])
    assert 1 <= rows < 64
    assert largest_sizes(replace(setting, request_rows=rows), budget).full_pages >= 1
    with pytest.raises(ConfigError):
        largest_sizes(replace(setting, request_rows=rows + 1), budget)


@pytest.mark.parametrize("budget", [-1, 1.5, True, None, "24"], ids=repr)
def test_a_budget_is_a_number_of_bytes(budget: Any) -> None:
    with pytest.raises(ConfigError, match=r"budget = .*an integer of at least 0"):
        largest_sizes(config(), budget)


@pytest.mark.parametrize("limit", [0, -1, 127, 1e6, True], ids=repr)
def test_a_limit_is_at_least_a_page(limit: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_tokens = .*at least 128"):
        largest_sizes(config(), GIB, max_tokens=limit)


def test_swa_given_in_tokens() -> None:
    setting = config(request_rows=4)
    assert sizes_for_tokens(setting, 2**20, swa_tokens=8192).swa_pages == 64
    assert sizes_for_tokens(setting, 4096, swa_tokens=8192).swa_pages == 32, "never more than FULL"
    with pytest.raises(ConfigError, match="swa_tokens = 511; an integer of at least 512"):
        sizes_for_tokens(setting, 2**20, swa_tokens=511)
    with pytest.raises(ConfigError, match="swa_tokens = 2048; an integer of at least 2560"):
        sizes_for_tokens(setting, 2**20, swa_tokens=2048, swa_floor=2500)
    assert sizes_for_tokens(setting, 8192, 0.01, swa_floor=2500).swa_pages == 20
