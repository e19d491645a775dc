"""Retracted requests come back from host snapshots; outputs stay the oracle's, and every snapshot is accounted for."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dsv4_npu.alloc.request import State
from dsv4_npu.emulation.engine import Engine, RequestRun
from dsv4_npu.emulation.parking import Parking, ParkingCounts
from dsv4_npu.emulation.states import StateKeeper
from dsv4_npu.errors import ConfigError, InputError, OwnershipError
from dsv4_npu.movement.snapshot import digest_of
from tests.emulation.harness import Bench, Setting
from tests.emulation.test_life import finish, random_life, words
from tests.movement.test_model import poison
from tests.stages.harness import StageBench, Watched

SETTING = Setting(c128_page=1, width=6, batch=3, new_tokens=24, chunk=128, retract="snapshot")


def counts_of(engine: Engine) -> ParkingCounts:
    assert engine.parking is not None
    return engine.parking.counts


def settled(engine: Engine) -> None:
    """Nothing is left on the host, and every snapshot is accounted for."""
    parking = engine.parking
    assert parking is not None
    assert not parking.store.used_bytes
    assert not parking.store.keys()
    assert not parking._history


def watched(engine: Engine) -> list[tuple[int, int]]:
    """Positions that prefills compute from now on, as ``(start, end)``."""
    spans: list[tuple[int, int]] = []
    real = engine._launch_prefill

    def launch(step, runs) -> None:  # type: ignore[no-untyped-def]
        spans.extend(zip(step.starts.tolist(), step.ends.tolist(), strict=True))
        real(step, runs)

    engine._launch_prefill = launch  # type: ignore[method-assign]
    return spans


@pytest.mark.parametrize(("platform", "overlap"), [("a3", False), ("a5", True)])
def test_nothing_is_computed_twice(bench: Bench, platform: str, overlap: bool) -> None:
    engine = bench.engine(replace(SETTING, platform=platform, overlap=overlap, prefix_cache=False), "early-exit")
    runs = [engine.submit(words(seed, 110 + 9 * seed), 20) for seed in range(3)]
    engine.step()
    spans = watched(engine)
    for turn in range(2):
        for _ in range(1 + turn):
            engine.step()
        for run in list(engine.running):
            engine.retract(run)
            assert run.finish or run.request.state is State.QUEUED
        poison(engine)
    finish(bench, engine)
    assert all(end - start == 1 for start, end in spans), "one known token is left to compute"
    counts = counts_of(engine)
    assert counts.saved == counts.restored == sum(run.retractions for run in runs) == 6
    assert counts.positions >= 110 * counts.restored
    assert (counts.evicted, counts.refused, counts.outdated, counts.put_off) == (0, 0, 0, 0)
    settled(engine)


def one_run(bench: Bench, setting: Setting, first: int, last: int, between: int) -> set[int]:
    """Leave after every ``between`` verify rounds, and come back; returns the lengths at which it left."""
    engine = bench.engine(replace(setting, batch=1, new_tokens=last - first + 8), "early-exit")
    run = engine.submit(bench.prompt(first), last - first + 8)
    lengths, rounds = set(), 0
    while not run.finish and len(run.request if run.life else ()) <= last:
        engine.step()
        rounds = engine.rounds if run.request.state is State.PREFILL else rounds
        if run in engine.running and run.request.state is State.DECODE and engine.rounds - rounds >= between:
            engine.retract(run)
            if not run.finish:
                lengths.add(len(run.request) - 1)
                poison(engine)
                rounds = engine.rounds
    finish(bench, engine)
    counts = counts_of(engine)
    assert counts.restored == counts.saved >= len(lengths)
    settled(engine)
    return lengths


@pytest.mark.parametrize(("platform", "overlap"), [("a3", False), ("a5", True)])
def test_around_the_end_of_a_window(bench: Bench, platform: str, overlap: bool) -> None:
    setting = replace(SETTING, platform=platform, overlap=overlap)
    assert one_run(bench, setting, 126, 130, 0) >= set(range(126, 130))
    assert one_run(bench, setting, 126, 130, 1)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_at_every_position_of_a_window(bench: Bench, platform: str, overlap: bool) -> None:
    setting = replace(SETTING, platform=platform, overlap=overlap)
    # Behind each return a prefill of one token reads what came back; in the second run a verify round too.
    assert one_run(bench, setting, 123, 260, 0) >= set(range(123, 260))
    assert len(one_run(bench, setting, 123, 260, 1)) > 20


@pytest.mark.parametrize(("platform", "overlap"), [("a3", False), ("a5", True)])
def test_under_pressure(bench: Bench, platform: str, overlap: bool) -> None:
    setting = replace(SETTING, platform=platform, overlap=overlap, swa_ratio=0.25, batch=3, context=384)
    engine = bench.engine(setting, "early-exit")
    runs = [engine.submit(words(seed, 110 + 5 * seed), 20) for seed in range(3)]
    finish(bench, engine)
    assert sum(run.retractions for run in runs), "the pool was meant to be too small"
    counts = counts_of(engine)
    assert counts.restored == counts.saved > 0
    settled(engine)


def test_an_evicted_snapshot_is_counted_and_recomputed(bench: Bench) -> None:
    engine = bench.engine(replace(SETTING, prefix_cache=False), "early-exit")
    runs = [engine.submit(words(seed, 60), 6) for seed in range(3)]
    for _ in range(2):
        engine.step()
    parking = engine.parking
    assert parking is not None
    engine.retract(runs[0])
    size = parking.store.used_bytes
    # Room for one more; the third makes the first give way.
    parking.store.budget_bytes = int(size * 2.2)
    engine.retract(runs[1])
    engine.retract(runs[2])
    assert parking.store.keys() == [1, 2]
    assert parking.counts.evicted == 1
    parking.store.budget_bytes = size // 2
    spans = watched(engine)
    finish(bench, engine)
    assert parking.counts.restored == 2
    assert sorted(start for start, _ in spans)[:1] == [0], "the first request computes its history again"
    settled(engine)


def test_a_snapshot_beyond_the_budget_is_refused_and_recomputed(bench: Bench) -> None:
    engine = bench.engine(replace(SETTING, host_bytes=1000), "early-exit")
    run = engine.submit(words(1, 140), 10)
    for _ in range(2):
        engine.step()
    engine.retract(run)
    finish(bench, engine)
    assert (counts_of(engine).refused, counts_of(engine).saved) == (1, 0)
    settled(engine)


def test_a_request_whose_rows_are_not_proved_resident_is_recomputed(bench: Bench) -> None:
    engine = bench.engine(SETTING, "early-exit")
    run = engine.submit(words(1, 140), 10)
    for _ in range(2):
        engine.step()
    run.request.log.overrun(engine.alloc.committed(run.row), engine.alloc.committed(run.row) + 256)
    engine.retract(run)
    finish(bench, engine)
    assert (counts_of(engine).refused, counts_of(engine).saved) == (1, 0)


def test_an_abort_while_it_waits_drops_the_snapshot(bench: Bench) -> None:
    engine = bench.engine(replace(SETTING, overlap=True), "early-exit")
    runs = [engine.submit(words(seed, 130), 10) for seed in range(2)]
    for _ in range(3):
        engine.step()
    engine.retract(runs[0])
    assert engine.parking is not None
    assert engine.parking.store.keys() == [0]
    engine.abort(runs[0])
    settled(engine)
    finish(bench, engine)
    assert [run.finish for run in runs] == ["abort", "length"]
    assert counts_of(engine).restored == 0


def test_a_return_without_room_leaves_nothing_half_done(bench: Bench) -> None:
    engine = bench.engine(replace(SETTING, prefix_cache=False), "early-exit")
    run, other = engine.submit(words(1, 200), 8), engine.submit(words(2, 20), 20)
    for _ in range(3):
        engine.step()
    engine.retract(run)
    before = engine.alloc.usage()
    parking = engine.parking
    assert parking is not None
    for family in range(3):
        taken = engine.alloc.ledger.take(*(engine.alloc.state.free(one) if one == family else 0 for one in range(3)))
        engine._admit()
        assert run in engine.waiting
        assert run.request.state is State.QUEUED
        assert parking.store.keys() == [0]
        engine.alloc.ledger.untake(*taken)
        assert {k: v[0] for k, v in engine.alloc.usage().items()} == {k: v[0] for k, v in before.items()}
        engine.alloc.audit()
    assert parking.counts.put_off == 3
    assert run.retractions == 1
    finish(bench, engine)
    assert parking.counts.restored == 1
    assert other.finish == "length"
    settled(engine)


@pytest.mark.parametrize(
    ("platform", "keep", "restored", "outdated"), [("a3", None, 1, 0), ("a5", None, 1, 0), ("a5", 141, 0, 1)]
)
def test_an_idle_session_that_gave_way(
    bench: Bench, platform: str, keep: int | None, restored: int, outdated: int
) -> None:
    engine = bench.engine(replace(SETTING, platform=platform), "early-exit")
    run = engine.submit(words(1, 140), 10, session=True)
    engine.run()
    bench.check(run)
    assert engine._give_up_a_session()
    assert run.request.state is State.QUEUED
    poison(engine)
    engine.resume(run, words(3, 7), 12, keep=keep)
    while not run.finish:
        engine.step()
    bench.check(run)
    engine.end_session(run)
    finish(bench, engine)
    assert (counts_of(engine).restored, counts_of(engine).outdated) == (restored, outdated)
    settled(engine)


def test_a_session_that_ends_while_it_waits_drops_its_snapshot(bench: Bench) -> None:
    engine = bench.engine(SETTING, "early-exit")
    run = engine.submit(words(1, 140), 4, session=True)
    engine.run()
    assert engine._give_up_a_session()
    engine.end_session(run)
    settled(engine)


@pytest.fixture(scope="module", params=["mtp", "dspark"])
def staged(request: pytest.FixtureRequest, bench: Bench) -> StageBench:
    """Draft stages of the model's own: an MTP row is made from the token behind it, a DSpark row is not."""
    return StageBench(bench, request.param)


def idle(staged: StageBench, max_new: int, accept: int) -> tuple[Watched, RequestRun]:
    """A session between its turns, after rounds that accepted ``accept`` drafts each."""
    watched = staged.own(replace(SETTING, width=4, prefix_cache=False), lambda request, length: accept)
    run = watched.engine.submit(words(1, 140), max_new, session=True)
    watched.engine.run()
    watched.settle(run)
    assert run.request.state is State.KEPT
    return watched, run


def another_turn(watched: Watched, run: RequestRun, more: list[int], keep: int | None = None) -> ParkingCounts:
    """Let a newcomer push the session out, resume it, and compare its outputs and proposals with the oracles'."""
    engine = watched.engine
    taken = [engine.alloc.open(f"other {index}") for index in range(engine.options.batch - 1)]
    other = engine.submit(words(2, 20), 4)
    while not other.finish:
        engine.step()
    assert run.request.state is State.QUEUED
    for index, row in enumerate(taken):
        engine.alloc.close(row, f"other {index}")
    poison(engine)
    engine.resume(run, more, 8, keep=keep)
    while not run.finish:
        engine.step()
    engine.end_session(run)
    watched.finish()
    settled(engine)
    return counts_of(engine)


@pytest.mark.parametrize("ended", ["length", "stop"])
def test_a_session_that_ended_inside_an_accepted_run_gives_way(staged: StageBench, ended: str) -> None:
    """Its last position has an MTP row of a draft that is no history: no snapshot, and no way to fail."""
    outputs = staged.oracle.greedy(words(1, 140), 6).tokens
    watched = staged.own(replace(SETTING, width=4, prefix_cache=False), lambda request, length: 3)
    engine = watched.engine
    if ended == "stop":
        assert outputs.index(outputs[5]) == 5
        engine.options = replace(engine.options, stop=(outputs[5],))
    # One output of the prefill, four of the first round, and the first of the second.
    run = engine.submit(words(1, 140), 6 if ended == "length" else 20, session=True)
    engine.run()
    watched.settle(run)
    assert (run.finish, len(run.outputs)) == (ended, 6)
    assert engine.alloc.committed(run.row) == len(run.request) == 146
    run.request.stop_ids = frozenset()
    counts = another_turn(watched, run, words(3, 7))
    refused = int(staged.kind == "mtp")
    assert (counts.saved, counts.refused, counts.restored) == (1 - refused, refused, 1 - refused)


def test_a_session_rewound_to_its_committed_end_gives_way(staged: StageBench) -> None:
    watched, run = idle(staged, 5, 3)
    engine = watched.engine
    committed = engine.alloc.committed(run.row)
    assert committed == len(run.request) - 1
    assert engine.life.rewind(run.request, committed) == committed == len(run.request)
    counts = another_turn(watched, run, words(3, 7))
    refused = int(staged.kind == "mtp")
    assert (counts.saved, counts.refused, counts.restored) == (1 - refused, refused, 1 - refused)


@pytest.mark.parametrize("same", [False, True])
def test_a_turn_that_exchanges_the_token_behind_a_snapshot(staged: StageBench, same: bool) -> None:
    """A snapshot ends at the committed end; the token behind it is part of the history of an MTP row alone."""
    watched, run = idle(staged, 5, 3)
    tokens = run.request.tokens.tolist()
    last = tokens[-1] if same else (tokens[-1] + 1) % 320
    counts = another_turn(watched, run, [last, *words(3, 7)], keep=len(tokens) - 1)
    outdated = int(staged.kind == "mtp" and not same)
    assert (counts.saved, counts.restored, counts.outdated) == (1, 1 - outdated, outdated)


def test_without_the_look_ahead(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parking that knows of no token behind a snapshot takes what it must refuse, and restores what it must drop."""
    staged = StageBench(bench, "mtp")
    watched, run = idle(staged, 6, 3)
    parking = watched.engine.parking
    assert parking is not None
    blind = SimpleNamespace(alloc=parking.life.alloc, rules=replace(parking.life.rules, lookahead=0))
    monkeypatch.setattr(parking, "life", blind)
    with pytest.raises(OwnershipError, match="the token behind it is not known"):
        another_turn(watched, run, words(3, 7))

    watched, run = idle(staged, 5, 3)
    tokens = run.request.tokens.tolist()
    monkeypatch.setattr(Parking, "_digest", lambda self, request, length: digest_of(request, length))
    with pytest.raises(InputError, match="is none of request 0's history"):
        another_turn(watched, run, [(tokens[-1] + 1) % 320, *words(3, 7)], keep=len(tokens) - 1)


#: Snapshots dropped because their request ended, per random life.
DROPPED: list[int] = []


def lives(bench: Bench, seed: int) -> ParkingCounts:
    """A random life in which every retraction saves; returns what became of the snapshots."""
    made: list[Engine] = []

    class Parked(Bench):
        def __init__(self) -> None:
            self.__dict__.update(bench.__dict__)

        def engine(self, setting: Setting, *args: object) -> Engine:  # type: ignore[override]
            rng = random.Random(seed)
            overlap, size = rng.random() < 0.5, rng.choice([250_000, 1 << 30])
            drafter = "early-exit" if overlap else args[0]
            changed = replace(setting, retract="snapshot", host_bytes=size, overlap=overlap)
            made.append(super().engine(changed, drafter, *args[1:]))  # type: ignore[arg-type]
            return made[-1]

    dropped, real = [0], Parking.forget

    def forget(self: Parking, request: object) -> None:
        if getattr(request, "state", None) is not State.PREFILL and request.rid in self.store:  # type: ignore[attr-defined]
            dropped[0] += 1
        real(self, request)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parking, "forget", forget)
        random_life(Parked(), seed)
    DROPPED.append(dropped[0])
    settled(made[0])
    return counts_of(made[0])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300, 320))
def test_many_random_lives(bench: Bench, seed: int) -> None:
    counts = lives(bench, seed)
    assert counts.saved == counts.restored + counts.evicted + counts.outdated + DROPPED[-1]


def broken(bench: Bench, platform: str = "a3") -> bool:
    """Whether a retraction and return under the present rules goes wrong."""
    engine = bench.engine(replace(SETTING, platform=platform, overlap=True), "early-exit")
    run: RequestRun = engine.submit(words(1, 125), 8)
    other = engine.submit(words(2, 20), 8)
    for _ in range(3):
        engine.step()
    engine.retract(run)
    poison(engine)
    engine.step()
    try:
        finish(bench, engine)
    except (AssertionError, InputError):
        return True
    assert other.finish
    return False


def test_what_must_be_caught(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not broken(bench)
    real = StateKeeper.before_forward
    with monkeypatch.context() as patch:
        # Banks of freed pages emptied a second time, after the rows came back.
        def again(self: StateKeeper, requests) -> None:  # type: ignore[no-untyped-def]
            real(self, requests)
            for request in requests:
                if request.planned == len(request) and request.state is State.PREFILL:
                    self.pools.c4_state.data[..., self.pools.c4_state.half :] = float("-inf")

        patch.setattr(StateKeeper, "before_forward", again)
        assert broken(bench)
    with monkeypatch.context() as patch:
        # A position too far: the last known token is taken for computed.
        patch.setattr(
            Parking, "bring_back", lambda self, request: setattr(request, "planned", len(request) - 1), raising=True
        )
        assert broken(bench)


@pytest.mark.parametrize(("options", "error"), [({"retract": "swap"}, InputError), ({"host_bytes": 0}, ConfigError)])
def test_wrong_options(bench: Bench, options: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options)) if "retract" in options else "budget_bytes"):
        bench.engine(replace(SETTING, **options), "early-exit")  # type: ignore[arg-type]


def test_withdraw_needs_a_fresh_admission(bench: Bench) -> None:
    engine = bench.engine(SETTING, "early-exit")
    run = engine.submit(words(1, 140), 10)
    engine.step()
    with pytest.raises(OwnershipError, match="withdraw"):
        engine.life.withdraw(run.request)
