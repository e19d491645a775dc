"""Reserved slots of speculative decoding and the window of a verify, beside SGLang's own."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from tests.sglang.sides import PAGE, UNIT, Renaming, Side, prepare

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def _prepared() -> None:
    prepare()


@pytest.mark.parametrize("start", [2, 100, 125, 126, 127, 2044, 2047])
@pytest.mark.parametrize("width", [1, 4, 6, 130])
def test_the_window_of_a_verify_agrees(start: int, width: int) -> None:
    bundles, sides = [], (Side(False, full_pages=128), Side(True, full_pages=128))
    lens = torch.tensor([start, start + 1, 3])
    for side in sides:
        reqs = side.open(3)
        reserve = side.extend(reqs, [(n + 2 * width + PAGE - 1) // PAGE * PAGE for n in lens.tolist()])
        rows = torch.tensor([req.kv.req_pool_idx for req in reqs])
        window = torch.cat([side.table.req_to_token[r, n : n + width] for r, n in zip(rows, lens, strict=True)])
        batch = types.SimpleNamespace(
            req_to_token_pool=side.table,
            token_to_kv_pool_allocator=side.alloc,
            out_cache_loc_dsv4=reserve,
            out_cache_loc=window.long(),
            req_pool_indices_cpu=rows,
            seq_lens_cpu=lens,
            seq_lens=lens,
        )
        bundles.append(side.parts.hooks["maybe_build_dsv4_verify_bundle"](batch, width))
        batch.out_cache_loc_dsv4 = None
        assert side.parts.hooks["maybe_build_dsv4_verify_bundle"](batch, width) is None
    theirs, ours = bundles
    for name, unit in (
        ("out_full_loc", PAGE),
        ("out_swa_loc", PAGE),
        ("out_c4_loc", PAGE // 4),
        ("out_c128_loc", UNIT),
    ):
        Renaming().check(getattr(theirs, name), getattr(ours, name), unit)
    assert ours.given is None


def test_a_thousand_rounds_that_accept_one_token_hold_no_more() -> None:
    """Case 10 of the standing cases: reserve, verify, accept one; then finish; every pool is as it was."""
    side = Side(True, full_pages=96, rows=4)
    start = side.counts()
    reqs = side.open(2)
    side.extend(reqs, [PAGE, 3])
    committed = [PAGE, 3]
    for _ in range(1000):
        wanted = [max(r.kv.kv_allocated_len, -(-(n + 8) // PAGE) * PAGE) for r, n in zip(reqs, committed, strict=True)]
        if wanted != [r.kv.kv_allocated_len for r in reqs]:
            side.extend(reqs, wanted)
        committed = [n + 1 for n in committed]
        assert all(r.kv.kv_allocated_len <= -(-(n + 8) // PAGE) * PAGE for r, n in zip(reqs, committed, strict=True))
    assert side.alloc.verify_byte_accounting() == []
    for req in reqs:
        side.finish(req)
    assert side.counts() == start


def test_slots_by_runs_are_slots_by_tables() -> None:
    """The host's way and the device's way to the same slots, from random growths; a wrong page is noticed."""
    import numpy as np

    from dsv4_npu.sglang.slots import Growth, page_tables, runs_of, slots_of

    rng = np.random.default_rng(0)
    for page in (16, PAGE):
        for _ in range(150):
            batch = int(rng.integers(1, 7))
            old = rng.integers(0, 4 * page, batch)
            new = old + rng.integers(0, 3 * page, batch)
            growth = Growth.of(old, new, page)
            pages = rng.permutation(np.arange(1, 60))[: growth.total].astype(np.int32)
            last = rng.integers(60, 90, batch)
            before = last * page + (old - 1) % page
            tables = page_tables(growth, pages, torch.from_numpy(last), torch.device("cpu"))
            runs = runs_of(growth, pages, before)
            oracle: list[int] = []
            at = 0
            for b in range(batch):
                held: dict[int, Any] = {(old[b] - 1) // page: last[b]} if old[b] % page else {}
                for column in range(-(-old[b] // page), -(-new[b] // page)):
                    held[column] = pages[at]
                    at += 1
                oracle += [held[p // page] * page + p % page for p in range(old[b], new[b])]
            assert runs.slots().tolist() == oracle
            assert slots_of(growth, tables).tolist() == oracle
            if page % 4 == 0:
                closing = [slot // 4 for slot in oracle if slot % 4 == 3]
                assert runs.every(4).slots().tolist() == closing
                assert slots_of(growth, tables, 4).tolist() == closing
            if growth.total:
                wrong = runs_of(growth, np.roll(pages, 1) + 1, before)
                assert wrong.slots().tolist() != oracle
