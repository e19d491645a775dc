"""With overlap a round is launched before the one before it is learned; outputs stay the oracle's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4_npu import ops
from dsv4_npu.emulation import flights, rounds
from dsv4_npu.emulation.device import held
from dsv4_npu.emulation.drafters import Drafter, Drafts, DraftStep
from dsv4_npu.emulation.engine import Engine, EngineOptions
from dsv4_npu.emulation.forward import Bounds, plan_batch_on_device
from dsv4_npu.emulation.rounds import DeviceRounds
from dsv4_npu.errors import AuditError, InputError
from tests.emulation.harness import Bench, Setting
from tests.emulation.test_life import finish, random_life, with_platform, words


class Clairvoyant:
    """Gets ``accept(request in the batch, length)`` drafts right without the history: it knows the future.

    It looks into the device's memory past the books, which no real drafter could.
    """

    name = "clairvoyant"
    needs_history = False

    def __init__(self, bench: Bench, accept: Callable[[int, int], int]) -> None:
        self.bench, self.accept = bench, accept
        self.engine: Engine | None = None

    def propose(self, roots: torch.Tensor, histories: Sequence[Any], count: int, step: DraftStep) -> Drafts:
        assert self.engine is not None
        assert not histories
        newest = max(self.engine.life._steps.values(), key=lambda one: one.number)
        lengths = held(self.engine.device.lengths)[newest.rows].tolist()
        runs = {run.life: run for run in [*self.engine.running, *self.engine.finished]}
        rows = []
        for b, (request, length) in enumerate(zip(newest.requests, lengths, strict=True)):
            prompt = runs[request].prompt
            done = length + 1 - len(prompt)
            right = self.bench.oracle.greedy(prompt, done + count).tokens[done:]
            keep = min(self.accept(b, length), count)
            rows.append(right[:keep] + [(t + 1) % self.bench.spec.vocab_size for t in right[keep:]])
        return Drafts(torch.tensor(rows, dtype=torch.int64))


class Overlapped(Bench):
    """A bench whose engines overlap; drafters that need the history give way to early exit."""

    def __init__(self, bench: Bench) -> None:
        self.__dict__.update(bench.__dict__)

    def engine(
        self, setting: Setting, drafter: Drafter | str | None, on_round: Callable[[Engine], None] | None = None
    ) -> Engine:
        engine = super().engine(setting, "early-exit" if drafter == "ngram" else drafter, on_round)
        engine.options = replace(engine.options, overlap=True)
        if isinstance(drafter, Clairvoyant):
            drafter.engine = engine
        return engine


@pytest.fixture
def overlapped(bench: Bench) -> Overlapped:
    return Overlapped(bench)


def varied(width: int) -> Callable[[int, int], int]:
    return lambda request, length: random.Random(1000 * request + length).randrange(width)


SETTINGS = [
    (Setting(platform="a3", width=2, chunk=37), [2, 5, 126, 254]),
    (Setting(platform="a5", width=3, page=256), [7, 127, 255]),
    (Setting(platform="a3", width=6, c128_page=1, batch=2), [109, 121, 3, 246, 125]),
    (Setting(platform="a5", width=6, accept="rejection"), [1, 123, 253]),
    (Setting(platform="a3", width=6, kind="dspark"), [4, 117, 250]),
    (Setting(platform="a5", width=6, kind="dspark", chunk=128), [6, 128, 240]),
    (Setting(platform="a3", width=10, c128_page=16), [130, 9, 246]),
    (Setting(platform="a5", width=10, chunk=300), [117, 5, 258]),
    (Setting(platform="a3", width=1, kind="none"), [127, 3]),
    (Setting(platform="a2", width=8, swa_ratio=0.5), [131, 240, 64]),
]


@pytest.mark.parametrize("index", range(len(SETTINGS)))
def test_outputs_and_logits_are_the_oracles(overlapped: Overlapped, index: int) -> None:
    setting, lengths = SETTINGS[index]
    setting = replace(setting, new_tokens=15)
    drafter = Clairvoyant(overlapped, varied(setting.width)) if setting.width > 1 else None
    in_flight: list[int] = []
    engine = overlapped.run(setting, lengths, drafter, lambda e: in_flight.append(len(e.flights)))
    assert max(in_flight) == 1, "a round was in flight when another was learned"
    if drafter:
        accepted = {n for run in engine.finished for n in run.accepts}
        assert len(accepted) > setting.width // 3, "acceptance was meant to vary"


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_early_exit_drafts(overlapped: Overlapped, platform: str) -> None:
    overlapped.run(Setting(platform=platform, width=4), [5, 126, 255], "early-exit")


def test_a_request_that_ended_computes_one_round_for_nothing(overlapped: Overlapped) -> None:
    engine = overlapped.run(Setting(width=4), [9, 130], Clairvoyant(overlapped, varied(4)))
    longest = max(run.rounds for run in engine.finished)
    assert engine.rounds == longest + 1


def test_a_stop_token_inside_an_accepted_run(overlapped: Overlapped) -> None:
    want = overlapped.oracle.greedy(overlapped.prompt(9), 14).tokens
    engine = overlapped.engine(Setting(width=10), Clairvoyant(overlapped, lambda b, n: 9))
    engine.options = EngineOptions(batch=8, chunk=101, stop=(want[7],), overlap=True)
    runs = [engine.submit(overlapped.prompt(length), 14) for length in (9, 126)]
    finish(overlapped, engine)
    assert runs[0].outputs == want[: want.index(want[7]) + 1]
    assert runs[0].finish == "stop"


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_retraction_under_pressure(overlapped: Overlapped, platform: str) -> None:
    engine = overlapped.engine(with_platform(platform, swa_ratio=0.2, batch=5, context=520), "early-exit")
    runs = [engine.submit(words(seed, 120 + 5 * seed), 16) for seed in range(6)]
    finish(overlapped, engine)
    assert sum(run.retractions for run in runs), "the pool was meant to be too small"


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_abort_and_retraction_with_rounds_in_flight(overlapped: Overlapped, platform: str) -> None:
    engine = overlapped.engine(with_platform(platform, chunk=64), "early-exit")
    runs = [engine.submit(words(seed, 60 + 37 * seed), 24) for seed in range(4)]
    while len(runs[0].outputs) < 3:
        engine.step()
    assert engine.flights
    engine.abort(runs[0])
    engine.alloc.audit()
    for _ in range(3):
        engine.step()
    engine.retract(runs[1])
    assert not engine.flights
    engine.step()
    engine.abort(runs[3])
    finish(overlapped, engine)
    assert [run.finish for run in runs] == ["abort", "length", "length", "abort"]


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_a_session_over_turns(overlapped: Overlapped, platform: str) -> None:
    engine = overlapped.engine(with_platform(platform), "early-exit")
    run = engine.submit(words(1, 130), 10, session=True)
    engine.submit(words(2, 255), 30)
    for more in (7, 140):
        while not run.finish:
            engine.step()
        overlapped.check(run)
        engine.resume(run, words(more, more), 10)
    while not run.finish:
        engine.step()
    overlapped.check(run)
    engine.end_session(run)
    finish(overlapped, engine)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 25))])
def test_random_lives(overlapped: Overlapped, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine.rewind

    def rewind(self: Engine, run: Any, length: int) -> int:
        self.drain()
        return real(self, run, length) if run in self.running else length

    monkeypatch.setattr(Engine, "rewind", rewind)
    random_life(overlapped, 40 + seed)


# -- refusals and mutations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["ngram", "scripted"])
def test_drafters_that_need_the_history_are_refused_by_name(bench: Bench, drafter: str) -> None:
    base = bench.engine(Setting(), bench.scripted(varied(4)) if drafter == "scripted" else drafter)
    with pytest.raises(InputError, match=f"overlap with drafter '{drafter}'"):
        Engine(bench.model, base.config, base.pools.sizes, base.drafter, EngineOptions(overlap=True))


def test_an_unknown_device_is_refused(bench: Bench) -> None:
    base = bench.engine(Setting(), "early-exit")
    with pytest.raises(InputError, match="device = 'tpu'"):
        Engine(bench.model, base.config, base.pools.sizes, base.drafter, EngineOptions(device="tpu"))


def wrong(overlapped: Overlapped) -> bool:
    try:
        overlapped.run(Setting(width=4, batch=4), [9, 126], Clairvoyant(overlapped, varied(4)))
    except (AssertionError, AuditError):
        return True
    return False


def test_starts_that_the_host_knew_a_round_ago_are_wrong(
    overlapped: Overlapped, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not wrong(overlapped)
    real = DeviceRounds.verify

    def late(self: DeviceRounds, rows: list[int], bounds: Any, *args: Any, **kwargs: Any) -> Any:
        self.lengths[torch.tensor(rows)] = torch.tensor(bounds.lows)
        return real(self, rows, bounds, *args, **kwargs)

    monkeypatch.setattr(DeviceRounds, "verify", late)
    assert wrong(overlapped)


def test_roots_of_a_round_ago_are_wrong(overlapped: Overlapped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ops, "fill_bonus_tokens_", lambda bonus, predict, index, lens: bonus.copy_(predict[index[:, 0]])
    )
    assert wrong(overlapped)


def test_bounds_of_a_round_ago_are_wrong(overlapped: Overlapped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "Bounds", lambda lows, highs, lengths: Bounds(lows, lows, lengths))
    assert wrong(overlapped)


def test_commit_slots_of_another_window_are_found(overlapped: Overlapped, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops.gather_accepted_slots
    monkeypatch.setattr(ops, "gather_accepted_slots", lambda slots, *rest: real(slots + 1, *rest))
    with pytest.raises(AuditError, match="the device commits slots"):
        overlapped.run(Setting(width=4, batch=4), [9, 126], Clairvoyant(overlapped, varied(4)))


def test_plans_of_the_device_are_those_of_the_host(bench: Bench) -> None:
    """Every plan of a run, made once more from device lengths and loose bounds, addresses the same rows."""
    rng = random.Random(5)
    compared = 0

    def both(pools: Any, tables: Any, rows: Any, starts: Any, lengths: Any) -> Any:
        nonlocal compared
        compared += 1
        want = real(pools, tables, rows, starts, lengths)
        low, high = (rng.randrange(9), rng.randrange(9)) if min(starts) > 9 else (0, 0)
        bounds = Bounds([s - low for s in starts], [s + high for s in starts], lengths)
        row, start, length = (torch.tensor(one) for one in (rows, starts, lengths))
        got = plan_batch_on_device(pools, tables, row, start, length, bounds)
        for name in ("positions", "start_positions", "mask", "swa_new", "swa_window"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        for ratio, ring in want.rings.items():
            mine, e = got.rings[ratio], ring.windows
            assert mine.windows >= e
            for name in ("prior_rows", "save_rows"):
                assert torch.equal(getattr(mine, name), getattr(ring, name)), name
            made = torch.arange(e) < torch.tensor(ring.counts)[:, None]
            for name in ("gather", "entry_positions"):
                assert torch.equal(getattr(mine, name)[:, :e][made], getattr(ring, name)[made]), name
            entry, wanted = got.entries[ratio], want.entries[ratio]
            t = wanted.valid.shape[1]
            assert not entry.valid[:, t:].any()
            assert torch.equal(entry.valid[:, :t], wanted.valid)
            assert torch.equal(entry.read_slots[:, :t], wanted.read_slots)
            assert torch.equal(entry.new_slots[:, :e], wanted.new_slots)
            assert (entry.new_slots[:, e:] == -1).all()
        return want

    real = rounds.plan_batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "plan_batch", both)
        for setting, lengths in SETTINGS[1:3] + SETTINGS[7:8]:
            bench.run(setting, lengths, bench.scripted(varied(setting.width)))
    assert compared > 30
