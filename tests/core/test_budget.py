"""Sizes of the families: what they promise, proved by serving from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu import addressing, budget
from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.budget import PoolSizes, sizes_for_tokens
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec
from dsv4_npu.errors import CapacityError, ConfigError

TINY, A3 = ModelSpec.load("tiny"), PlatformSpec.load("a3")


def config(drafts: int = 5, **rest: Any) -> CacheConfig:
    return CacheConfig(TINY, A3, SpeculationSpec("chain", drafts), **rest)


# -- properties -------------------------------------------------------------------------------------------------------

geometry = {
    "tokens": st.integers(256, 200_000),
    "ratio": st.floats(0.001, 1),
    "rows": st.integers(1, 64),
    "page": st.sampled_from([128, 256]),
    "c128_page": st.sampled_from([16, 32]),
    "drafts": st.integers(0, 9),
}


def sizes_of(tokens: int, ratio: float, rows: int, page: int, c128_page: int, drafts: int) -> PoolSizes:
    setting = config(drafts, request_rows=rows, page_size=page, c128_page_size=c128_page)
    return sizes_for_tokens(setting, tokens, ratio)


@settings(max_examples=100, deadline=None)
@given(**geometry)
def test_sizes_hold_the_tokens(tokens: int, ratio: float, rows: int, page: int, c128_page: int, drafts: int) -> None:
    sizes = sizes_of(tokens, ratio, rows, page, c128_page, drafts)
    assert sizes.request_rows == rows
    assert sizes.full_pages * page <= tokens < (sizes.full_pages + 1) * page
    assert sizes.swa_pages <= sizes.full_pages
    assert sizes.swa_pages >= int(sizes.full_pages * ratio)
    # A window, a page of prefill and the reserve of one request, wherever they begin in a page; FULL's pages suffice.
    held = {p // page for p in range(page - 1, page - 1 + 128 + page + 2 * (drafts + 1))}
    assert sizes.swa_pages >= min(sizes.full_pages, len(held))


@settings(max_examples=100, deadline=None)
@given(**geometry, more=st.integers(0, 10_000))
def test_more_tokens_more_rows_or_a_larger_share_never_shrink_a_family(more: int, **at: Any) -> None:
    before = sizes_of(**at)
    for change in (
        {"tokens": at["tokens"] + more},
        {"ratio": min(1.0, at["ratio"] * (1 + more / 1000))},
        {"rows": at["rows"] + more % 50},
    ):
        after = sizes_of(**{**at, **change})
        assert all(getattr(after, f) >= getattr(before, f) for f in PoolSizes.__dataclass_fields__)


def check_c128_never_runs_out_first(shares: list[int], **at: Any) -> None:
    """However the FULL pages are split over the request rows, their C128 entries fit."""
    sizes = sizes_of(**at)
    shares = shares[: at["rows"]]
    total = sum(shares)
    lengths = [sizes.full_pages * share // total * at["page"] for share in shares]
    columns = sum(addressing.c128_columns(length, at["c128_page"]) for length in lengths)
    assert columns <= sizes.c128_pages


@settings(max_examples=100, deadline=None)
@given(shares=st.lists(st.integers(1, 1000), min_size=1, max_size=64), **geometry)
def test_c128_never_runs_out_before_full(shares: list[int], **at: Any) -> None:
    check_c128_never_runs_out_first(shares, **at)


STANDARD = {"tokens": 131072, "ratio": 0.1, "rows": 64, "page": 128, "c128_page": 16, "drafts": 3}


def test_64_requests_do_not_exhaust_c128_at_an_eighth_of_full() -> None:
    sizes = sizes_of(**STANDARD)
    assert (sizes.full_pages, sizes.c128_pages, sizes.swa_pages) == (1024, 64 + 64, 102)
    used = 64 * addressing.pages_for(200, 128)
    assert used / sizes.full_pages == 0.125
    assert sizes.c128_pages - 64 * addressing.c128_columns(200, 16) == 64, "one page each, and a next one each"
    check_c128_never_runs_out_first([1] * 64, **STANDARD)


def without_slack_of(real: Any) -> Any:
    def mutant(config: CacheConfig, tokens: int, swa_ratio: float) -> PoolSizes:
        sizes = real(config, tokens, swa_ratio)
        return PoolSizes(sizes.full_pages, sizes.swa_pages, sizes.c128_pages - config.request_rows, config.request_rows)

    return mutant


def test_c128_without_slack_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "sizes_for_tokens", without_slack_of(sizes_for_tokens))
    with pytest.raises(AssertionError):
        check_c128_never_runs_out_first([20] * 51 + [4], **STANDARD)


# -- one request served from the smallest share -----------------------------------------------------------------------


def serve_one(setting: CacheConfig, sizes: PoolSizes) -> None:
    """Prefill page by page, then decode to the context's end with the host one step behind, as overlap has it."""
    alloc = KVAllocator(AllocSpec.of(setting, sizes))
    row = alloc.open("only")
    prompt = setting.context_len // 2
    for end in [*range(setting.page, prompt, setting.page), prompt]:
        with alloc.transaction() as tx:
            tx.extend(row, end)
            tx.commit(slots=False)
        epoch = alloc.launch()
        alloc.commit(row, end)
        alloc.evict_window(row)
        alloc.done(epoch)
    step = np.array([row], np.int64)
    running: list[int] = []
    while alloc.committed(row) + setting.verify_width <= setting.context_len:
        alloc.decode_step(step, setting.reserve)
        running.append(alloc.launch())
        if len(running) == 2:
            alloc.done(running.pop(0))
            alloc.commit(row, alloc.committed(row) + setting.verify_width)
            alloc.evict_window(row)
    assert alloc.committed(row) > prompt


@pytest.mark.parametrize("drafts", [0, 3, 9])
@pytest.mark.parametrize(("page", "context"), [(128, 1500), (128, 2048), (256, 3000)])
def test_one_request_is_served_from_the_smallest_swa_share(page: int, context: int, drafts: int) -> None:
    setting = config(drafts, context_len=context, page_size=page, request_rows=2)
    sizes = sizes_for_tokens(setting, setting.width, 0.001)
    assert sizes.swa_pages < sizes.full_pages
    serve_one(setting, sizes)


def test_a_share_below_the_floor_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = config(9, context_len=2048)
    monkeypatch.setattr(budget.sizes, "request_swa_floor", lambda config: config.page)
    with pytest.raises(CapacityError, match="SWA"):
        serve_one(setting, sizes_for_tokens(setting, setting.width, 0.001))


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, -1, 127, 4096.0, "4096", True, None], ids=repr)
def test_tokens_below_a_page_are_refused(tokens: Any) -> None:
    with pytest.raises(ConfigError, match=r"tokens = .*at least 128"):
        sizes_for_tokens(config(), tokens)


@pytest.mark.parametrize("ratio", [0, -0.1, 1.01, float("nan"), float("inf"), "0.1", True, None], ids=repr)
def test_a_share_outside_of_0_to_1_is_refused(ratio: Any) -> None:
    with pytest.raises(ConfigError, match=r"swa_ratio = .*in \(0, 1\]"):
        sizes_for_tokens(config(), 4096, ratio)


def test_shares_that_are_allowed() -> None:
    assert sizes_for_tokens(config(), 128 * 100, 1).swa_pages == 100
    assert sizes_for_tokens(config(), 128 * 100).swa_pages == 10


@pytest.mark.parametrize("value", [0, -1, 1.0, "1", True, None], ids=repr)
@pytest.mark.parametrize("name", ["full_pages", "swa_pages", "c128_pages", "request_rows"])
def test_sizes_are_positive_integers(name: str, value: Any) -> None:
    right = {"full_pages": 4, "swa_pages": 4, "c128_pages": 4, "request_rows": 4}
    assert PoolSizes(**right).full_pages == 4
    with pytest.raises(ConfigError, match=f"{name} = .*at least 1"):
        PoolSizes(**{**right, name: value})
