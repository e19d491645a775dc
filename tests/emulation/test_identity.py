"""Speculative decoding from the pools gives the oracle's tokens and logits.

Many prompt lengths run in one ragged batch; the other parameters are covered pairwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from tests.emulation.harness import Bench, Setting, always, varied

#: Lengths around the boundaries of C4 windows, C128 windows and pages of 128 and 256.
NEAR_4 = [1, 2, 3, 4, 5, 6, 7]
NEAR_128 = [125, 126, 127, 128, 129, 130, 131]
NEAR_256 = [253, 254, 255, 256, 257, 258, 259]
BATCHES = [
    [1, 4, 6, 125, 128, 131, 253, 256],
    [2, 5, 7, 126, 129, 130, 254, 257],
    [3, 1, 127, 128, 255, 258, 259, 6],
    # Several rounds before a window closes: its rows come from the ring, written by earlier verifies.
    [109, 117, 121, 123, 240, 246, 250, 9],
]
AXES: dict[str, tuple[object, ...]] = {
    "platform": ("a3", "a5"),
    "page": (128, 256),
    "c128_page": (1, 2, 16),
    "chunk": (37, 101, 128, 300),
    "accept": ("greedy", "rejection"),
    "kind": ("chain", "dspark"),
}


def pairwise(axes: Mapping[str, Sequence[object]]) -> Iterator[dict[str, object]]:
    """Settings that together hold every pair of values of two axes, chosen greedily."""
    names = list(axes)
    wanted = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x, y in itertools.product(axes[a], axes[b])
    }
    while wanted:
        best = max(
            (dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values())),
            key=lambda s: len(wanted & set(itertools.combinations(s.items(), 2))),
        )
        wanted -= set(itertools.combinations(best.items(), 2))
        yield best


PAIRS = list(pairwise(AXES))
WIDTHS = [(width, accepted) for width in range(1, 11) for accepted in range(width)]


@pytest.mark.parametrize(("width", "drafts_right"), WIDTHS)
def test_every_width_and_every_acceptance_length(bench: Bench, width: int, drafts_right: int) -> None:
    index = WIDTHS.index((width, drafts_right))
    setting = Setting(width=width, **PAIRS[index % len(PAIRS)])  # type: ignore[arg-type]
    engine = bench.run(setting, BATCHES[index % len(BATCHES)], bench.scripted(always(drafts_right)))
    # The script was followed: apart from each request's last round, exactly this many rows were accepted.
    for request in engine.finished:
        assert set(request.accepts) == {drafts_right + 1}


@pytest.mark.parametrize("index", range(len(PAIRS)))
def test_mixed_acceptance_lengths(bench: Bench, index: int) -> None:
    width = (3, 6, 8, 10)[index % 4]
    setting = Setting(width=width, **PAIRS[index])  # type: ignore[arg-type]
    bench.run(setting, BATCHES[(index + 1) % len(BATCHES)], bench.scripted(varied(width)))


@pytest.mark.parametrize(("platform", "c128_page"), [("a3", 16), ("a5", 16), ("a3", 1)])
def test_around_2048(bench: Bench, platform: str, c128_page: int) -> None:
    lengths = [2045, 2046, 2047, 2048, 2049, 2050, 2051]
    setting = Setting(
        platform=platform, width=6, c128_page=c128_page, chunk=509, context=2304, new_tokens=8, batch=7, swa_ratio=0.5
    )
    bench.run(setting, lengths, bench.scripted(varied(6)))


@pytest.mark.parametrize("chunk", [1, 3, 5, 37, 127, 129, 300])
def test_chunked_prefill(bench: Bench, chunk: int) -> None:
    lengths = [2, 9, 131] if chunk < 10 else [7, 131, 259]
    bench.run(Setting(platform="a3" if chunk % 2 else "a5", width=5, chunk=chunk), lengths, bench.scripted(varied(5)))


@pytest.mark.parametrize("platform", ["a2", "a3", "a5", "cpu"])
@pytest.mark.parametrize("kind", ["none", "chain", "dspark"])
def test_smoke_on_every_platform(bench: Bench, platform: str, kind: str) -> None:
    width = {"none": 1, "chain": 4, "dspark": 6}[kind]
    page = 256 if platform == "cpu" else 128
    setting = Setting(platform=platform, kind=kind, width=width, page=page, new_tokens=10)
    bench.run(setting, [5, 127, 254], bench.scripted(varied(width)))


@pytest.mark.parametrize("drafter", ["ngram", "early-exit"])
@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_real_drafters(bench: Bench, drafter: str, platform: str) -> None:
    engine = bench.run(Setting(platform=platform, width=4), [5, 126, 255], drafter)
    if drafter == "early-exit":
        accepted = sum(k * v for r in engine.finished for k, v in r.accepts.items())
        rounds = sum(r.rounds for r in engine.finished)
        assert accepted > rounds, "four of five layers must guess right now and then"


def test_more_requests_than_rows_reuse_rows_and_pages(bench: Bench) -> None:
    lengths = [130, 5, 254, 127, 3, 257, 128, 6, 126]
    engine = bench.run(Setting(batch=2, width=6, platform="a5"), lengths, bench.scripted(varied(6)))
    assert engine.alloc.usage()["ROW"][1] == 2


def test_a_wrong_tail_rolled_back_leaves_the_logits_of_a_run_that_never_drafted(bench: Bench) -> None:
    lengths = [4, 126, 255]
    plain = bench.run(Setting(kind="none", width=1), lengths)
    wrong = bench.run(Setting(width=6), lengths, bench.scripted(always(0)))
    for a, b in zip(plain.finished, wrong.finished, strict=True):
        torch.testing.assert_close(torch.stack(a.logits), torch.stack(b.logits), rtol=0, atol=1e-12)


def test_small_swa_pool_serves_a_long_prompt_beside_short_ones(bench: Bench) -> None:
    setting = Setting(width=6, swa_ratio=0.2, context=1152, batch=4, chunk=128)
    engine = bench.run(setting, [1100, 5, 130, 3], bench.scripted(varied(6)))
    _, peak, total = engine.alloc.usage()["SWA"]
    assert peak <= total < 1152 // 128, "without eviction the long prompt alone would not fit"


def test_stop_token_inside_an_accepted_run_ends_the_request_there(bench: Bench) -> None:
    want = bench.oracle.greedy(bench.prompt(9), 14).tokens
    stop = want[7]
    engine = bench.engine(Setting(width=10), bench.scripted(always(9)))
    engine.options = type(engine.options)(batch=8, chunk=101, stop=(stop,))
    engine.submit(bench.prompt(9), 14)
    (request,) = engine.run()
    assert request.outputs == want[: want.index(stop) + 1]
    assert request.finish == "stop"


def test_rejection_sampling_at_a_temperature_reads_the_oracles_memory(bench: Bench) -> None:
    engine = bench.engine(Setting(accept="rejection", width=5), "early-exit")
    engine.options = type(engine.options)(batch=8, chunk=101, accept="rejection", temperature=0.7, seed=5)
    for length in (6, 127, 253):
        engine.submit(bench.prompt(length), 16)
    for request in engine.run():
        want = bench.oracle.forced(request.prompt, request.outputs)
        torch.testing.assert_close(torch.stack(request.logits), want, rtol=0, atol=1e-10)
