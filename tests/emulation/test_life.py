"""Prefix sharing, sessions, rewinds, retraction, abort: whatever happens to memory, outputs stay the oracle's."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from dsv4_npu.emulation.engine import Engine
from dsv4_npu.emulation.states import StateKeeper
from tests.emulation.harness import Bench, Setting, always, varied

#: One C128 entry per page: prefixes are shared in granules of 128 tokens.
SHARED = Setting(c128_page=1, width=6, batch=3, new_tokens=10, chunk=128)


def words(seed: int, count: int, vocab: int = 320) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(1000 + seed)).tolist()


def finish(bench: Bench, engine: Engine) -> None:
    """Run to the end, compare everything with the oracle, and find nothing left."""
    for request in engine.run():
        if request.finish != "abort":
            bench.check(request)
    engine.alloc.audit()
    if engine.life.cache is not None:
        engine.life.cache.clear()
    engine.alloc.audit()
    assert not any(used for used, _, _ in engine.alloc.usage().values()), engine.alloc.usage()


def with_platform(platform: str, **changes: object) -> Setting:
    return Setting(**{**SHARED.__dict__, "platform": platform, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_a_finished_requests_prefix_is_shared(bench: Bench, platform: str) -> None:
    engine = bench.engine(with_platform(platform), "early-exit")
    first = words(1, 290)
    engine.submit(first, 10)
    engine.run()
    tails = [engine.submit(first[:256] + words(seed, 20 + seed), 10) for seed in (2, 3)]
    shorter = engine.submit(first[:140] + words(4, 9), 10)
    other = engine.submit(words(5, 150), 10)
    finish(bench, engine)
    assert [run.cached for run in tails] == [256, 256]
    assert shorter.cached == 128
    assert other.cached == 0


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_generated_tokens_become_a_prefix_too(bench: Bench, platform: str) -> None:
    engine = bench.engine(with_platform(platform), "ngram")
    run = engine.submit(words(1, 120), 20)
    engine.run()
    again = engine.submit(words(1, 120) + run.outputs + words(2, 5), 10)
    finish(bench, engine)
    assert again.cached == 128


def damaged(bench: Bench, platform: str) -> bool:
    """Whether a prefix hit gives anything but the oracle's output."""
    engine = bench.engine(with_platform(platform), "early-exit")
    first = words(1, 290)
    engine.submit(first, 10)
    engine.run()
    hit = engine.submit(first[:256] + words(2, 8), 10)
    try:
        finish(bench, engine)
    except AssertionError:
        return True
    assert hit.cached == 256
    return False


def test_a5_hit_without_its_captured_rows_is_wrong(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not damaged(bench, "a5")
    monkeypatch.setattr(StateKeeper, "_restore", lambda self, row, captured: None)
    assert damaged(bench, "a5")


def test_a3_hit_with_emptied_banks_is_wrong(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = StateKeeper.before_forward

    def forget(self: StateKeeper, requests: list[object]) -> None:
        real(self, requests)  # type: ignore[arg-type]
        if any(getattr(r, "cached", 0) and r.planned == len(r) for r in requests):  # type: ignore[attr-defined, arg-type]
            self.pools.c4_state.data[..., self.pools.c4_state.half :] = float("-inf")

    monkeypatch.setattr(StateKeeper, "before_forward", forget)
    assert damaged(bench, "a3")


def test_without_capture_a_hit_on_a5_is_refused(bench: Bench) -> None:
    engine = bench.engine(with_platform("a5"), "early-exit")
    assert engine.life.cache is not None
    engine.life.cache._capture = None
    first = words(1, 290)
    engine.submit(first, 10)
    engine.run()
    again = engine.submit(first, 10)
    finish(bench, engine)
    assert again.cached == 0


@pytest.mark.parametrize("platform", ["a3", "a5"])
@pytest.mark.parametrize("drafter", ["ngram", "early-exit"])
def test_a_session_over_three_turns(bench: Bench, platform: str, drafter: str) -> None:
    engine = bench.engine(with_platform(platform), drafter)
    run = engine.submit(words(1, 130), 10, session=True)
    other = engine.submit(words(2, 255), 25)
    while not run.finish:
        engine.step()
    bench.check(run)
    assert run.row, "the session keeps its row"
    engine.resume(run, words(3, 7), 12)
    while not run.finish:
        engine.step()
    bench.check(run)
    engine.resume(run, words(4, 140), 10)
    while not run.finish:
        engine.step()
    bench.check(run)
    engine.end_session(run)
    finish(bench, engine)
    assert other.finish == "length"


@pytest.mark.parametrize("platform", ["a3", "a5"])
@pytest.mark.parametrize("keep", [1, 100, 128, 131, 200, 255, 256, 259])
def test_a_session_trimmed_between_turns(bench: Bench, platform: str, keep: int) -> None:
    engine = bench.engine(with_platform(platform), "early-exit")
    run = engine.submit(words(1, 250), 10, session=True)
    while not run.finish:
        engine.step()
    history = run.request.tokens.tolist()
    engine.resume(run, words(2, 6), 10, keep=keep)
    assert run.prompt == history[:keep] + words(2, 6)
    while not run.finish:
        engine.step()
    bench.check(run)
    engine.end_session(run)
    finish(bench, engine)


@pytest.mark.parametrize("platform", ["a3", "a5"])
@pytest.mark.parametrize("back", [1, 3, 9, 40])
def test_a_running_request_rewound(bench: Bench, platform: str, back: int) -> None:
    engine = bench.engine(with_platform(platform, new_tokens=60), "early-exit")
    run = engine.submit(words(1, 250), 60)
    while len(run.outputs) < 45:
        engine.step()
    engine.rewind(run, len(run.request) - back)
    finish(bench, engine)
    assert len(run.outputs) == 60


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_retraction_under_pressure(bench: Bench, platform: str) -> None:
    setting = with_platform(platform, swa_ratio=0.2, batch=5, context=520)
    engine = bench.engine(setting, "early-exit")
    runs = [engine.submit(words(seed, 120 + 5 * seed), 40) for seed in range(6)]
    finish(bench, engine)
    assert sum(run.retractions for run in runs), "the pool was meant to be too small"


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_retract_and_abort_at_any_moment(bench: Bench, platform: str) -> None:
    engine = bench.engine(with_platform(platform, chunk=64), "early-exit")
    runs = [engine.submit(words(seed, 100 + 37 * seed), 24) for seed in range(4)]
    engine.step()
    engine.abort(runs[0])  # in the middle of its prefill
    engine.abort(runs[3])  # still waiting
    for _ in range(3):
        engine.step()
    engine.retract(runs[1])
    for _ in range(4):
        engine.step()
    engine.retract(runs[2])
    finish(bench, engine)
    assert runs[1].retractions == runs[2].retractions == 1
    assert [run.finish for run in runs] == ["abort", "length", "length", "abort"]


def random_life(bench: Bench, seed: int, step: Callable[[Engine], None] | None = None) -> None:
    """A random mixture of everything that can happen to requests, on shared prefixes and a small pool."""
    rng = random.Random(seed)
    setting = with_platform(
        rng.choice(["a3", "a5"]),
        width=rng.choice([1, 2, 5, 8, 10]),
        chunk=rng.choice([50, 64, 128, 200]),
        swa_ratio=rng.choice([0.35, 1.0]),
        kind="chain",
    )
    engine = bench.engine(setting, rng.choice(["ngram", "early-exit"]))
    base = words(77, 300)
    kept = []
    for index in range(8):
        shared = rng.choice([0, 128, 200, 256])
        prompt = base[:shared] + words(rng.randrange(5), rng.randrange(1, 60))
        run = engine.submit(prompt, rng.randrange(1, 16), session=rng.random() < 0.3)
        for _ in range(rng.randrange(8)):
            engine.step()
            engine.alloc.audit()
        event = rng.random()
        if event < 0.2 and run in engine.running:
            engine.retract(run)
        elif event < 0.3 and (run in engine.running or run in engine.waiting):
            engine.abort(run)
        elif event < 0.45 and run in engine.running and run.outputs:
            engine.rewind(run, len(run.request) - rng.randrange(len(run.outputs)))
        if run.session:
            kept.append(run)
        del index
    engine.run()
    for run in kept:
        if run.finish in ("stop", "length"):
            bench.check(run)
            if rng.random() < 0.6:
                engine.resume(run, words(3, rng.randrange(1, 30)), 6, keep=rng.randrange(1, len(run.request) + 1))
                engine.run()
                bench.check(run)
            engine.end_session(run)
    finish(bench, engine)


@pytest.mark.parametrize("seed", range(6))
def test_random_lives(bench: Bench, seed: int) -> None:
    random_life(bench, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_random_lives(bench: Bench, seed: int) -> None:
    random_life(bench, seed)


def test_scripted_runs_hit_prefixes_too(bench: Bench) -> None:
    lengths = [255, 255, 256, 255]
    engine = bench.run(Setting(batch=1, c128_page=1, width=10, chunk=128), lengths, bench.scripted(always(9)))
    assert [run.cached for run in engine.finished] == [0, 128, 0, 128]
    bench.run(Setting(batch=1, c128_page=1, width=5, platform="a5", chunk=128), lengths, bench.scripted(varied(5)))
