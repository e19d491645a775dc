"""The same calls on SGLang's classes and on ours: equal slots up to page ids, equal tables, equal numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.sglang.sides import PAGE, UNIT, Renaming, Side, prepare

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def _prepared() -> None:
    prepare()


class Pair:
    """Both sides in step; every call is compared."""

    def __init__(self, **sizes: Any) -> None:
        self.sides = (Side(False, **sizes), Side(True, **sizes))
        self.live: list[tuple[Any, Any]] = []

    def open(self, count: int) -> list[tuple[Any, Any]]:
        got = [side.open(count) for side in self.sides]
        assert (got[0] is None) == (got[1] is None)
        if got[0] is None or got[1] is None:
            return []
        pairs = list(zip(*got, strict=True))
        self.live += pairs
        return pairs

    def extend(self, pairs: list[tuple[Any, Any]], lengths: list[int]) -> bool:
        return self._slots([side.extend([p[i] for p in pairs], lengths) for i, side in enumerate(self.sides)])

    def decode(self, pairs: list[tuple[Any, Any]]) -> bool:
        return self._slots([side.decode([p[i] for p in pairs]) for i, side in enumerate(self.sides)])

    def _slots(self, bundles: list[Any]) -> bool:
        assert (bundles[0] is None) == (bundles[1] is None)
        if bundles[0] is None:
            return False
        for name in ("out_full_loc", "out_swa_loc", "out_c4_loc", "out_c128_loc"):
            theirs, ours = (getattr(bundle, name) for bundle in bundles)
            assert theirs.numel() == ours.numel(), name
        return True

    def finish(self, pair: tuple[Any, Any]) -> None:
        for side, req in zip(self.sides, pair, strict=True):
            side.finish(req)
        self.live.remove(pair)

    def check(self) -> None:
        """Numbers are equal, and the tables of live requests are, up to the choice of pages."""
        theirs, ours = self.sides
        assert theirs.counts() == ours.counts()
        full, swa, c128 = Renaming(), Renaming(), Renaming()
        for a, b in self.live:
            length = a.kv.kv_allocated_len
            assert (length, a.evicted) == (b.kv.kv_allocated_len, b.evicted)
            rows = [
                side.table.req_to_token[req.kv.req_pool_idx, :length]
                for side, req in zip(self.sides, (a, b), strict=True)
            ]
            full.check(*rows, PAGE)
            mapped = [
                side.alloc.translate_loc_from_full_to_swa(row.long())
                for side, row in zip(self.sides, rows, strict=True)
            ]
            swa.check(*mapped, PAGE)
            side_rows = [
                side.table.req_to_c128_sidecar[req.kv.req_pool_idx]
                for side, req in zip(self.sides, (a, b), strict=True)
            ]
            c128.check(*side_rows, 1)
        counts = [sorted(side.alloc.c128_page_refcount[1:].tolist()) for side in self.sides]
        assert counts[0] == counts[1]
        assert ours.alloc.verify_byte_accounting() == []


@pytest.mark.parametrize("seed", range(6))
def test_random_sequences_agree(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(full_pages=rng.choice((64, 96)), rows=6, context=16384)
    start = pair.sides[1].counts()
    steps = 0
    for _ in range(150):
        call = rng.random()
        if call < 0.15:
            pairs = pair.open(rng.randint(1, 2))
            lengths = [rng.choice((1, 127, 128, 300, 2047, 2048, 2100)) for _ in pairs]
            if pairs and not pair.extend(pairs, lengths):
                for one in pairs:
                    pair.finish(one)
        elif call < 0.3 and pair.live:
            chosen = rng.sample(pair.live, rng.randint(1, len(pair.live)))
            longer = [p[0].kv.kv_allocated_len + rng.choice((1, 4, 128, 129, 1000)) for p in chosen]
            if max(longer) <= 16384:
                pair.extend(chosen, longer)
        elif call < 0.85 and pair.live:
            steps += pair.decode([p for p in pair.live if p[0].kv.kv_allocated_len])
        elif call < 0.93 and pair.live:
            one = rng.choice(pair.live)
            for side, req in zip(pair.sides, one, strict=True):
                side.evict_window(req)
        elif pair.live:
            pair.finish(rng.choice(pair.live))
        pair.check()
    assert steps > 20
    for one in list(pair.live):
        pair.finish(one)
    pair.check()
    assert pair.sides[1].counts() == start


def test_a_page_of_decodes_agrees_slot_by_slot() -> None:
    pair = Pair(full_pages=128, rows=4)
    pairs = pair.open(3)
    assert pair.extend(pairs, [2040, 127, 1])
    full, swa, c4, c128 = Renaming(), Renaming(), Renaming(), Renaming()
    for _ in range(2 * PAGE + 3):
        bundles = [side.decode([p[i] for p in pairs]) for i, side in enumerate(pair.sides)]
        for renaming, name, unit in (
            (full, "out_full_loc", PAGE),
            (swa, "out_swa_loc", PAGE),
            (c4, "out_c4_loc", PAGE // 4),
            (c128, "out_c128_loc", UNIT),
        ):
            theirs, ours = (getattr(bundle, name) for bundle in bundles)
            renaming.check(theirs, ours, unit)
            assert theirs.numel() == 0 or theirs.dtype == ours.dtype
        pair.check()


def test_an_extension_that_does_not_fit_changes_nothing() -> None:
    for sizes in (
        {"full_pages": 20, "swa_pages": 20},
        {"full_pages": 64, "swa_pages": 17},
        {"full_pages": 64, "c128_pages": 1},
    ):
        pair = Pair(rows=4, **sizes)
        (one,) = pair.open(1)
        before = pair.sides[1].counts()
        assert not pair.extend([one], [4096])
        assert pair.sides[1].counts() == before
        pair.check()
        assert pair.extend([one], [1900])
        pair.check()


def test_the_tail_of_a_preallocation_has_swa_pages_and_the_rest_has_none() -> None:
    pair = Pair(full_pages=64, rows=4)
    (one,) = pair.open(1)
    found = []
    for side, req in zip(pair.sides, one, strict=True):
        row = torch.tensor([req.kv.req_pool_idx])
        zero, end = torch.tensor([0]), torch.tensor([640])
        bundle = side.alloc.alloc_extend_swa_tail(
            zero, zero, end, end, torch.tensor([-1]), 640, 256, req_pool_indices=row, req_to_token_pool=side.table
        )
        kv_loc = side.parts.hooks["dsv4_unwrap_prealloc"](bundle, side.table, req, 0, 640)
        found.append(side.alloc.translate_loc_from_full_to_swa(kv_loc.long()))
        assert (found[-1][:384] == 0).all()
        assert (found[-1][384:] > 0).all()
    assert torch.equal(found[0] % PAGE, found[1] % PAGE)
    assert pair.sides[0].counts() == pair.sides[1].counts()


def test_the_comparison_notices_a_wrong_page() -> None:
    pair = Pair(full_pages=64, rows=4)
    pairs = pair.open(2)
    assert pair.extend(pairs, [300, 300])
    ours = pair.sides[1]
    ours.table.req_to_token[pairs[0][1].kv.req_pool_idx, 128:256] = ours.table.req_to_token[
        pairs[1][1].kv.req_pool_idx, 128:256
    ]
    with pytest.raises(AssertionError):
        pair.check()
