"""The real model: a request that left and came back goes on as if nothing had happened."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4_npu.emulation.engine import Engine, RequestRun
from dsv4_npu.errors import CapacityError
from dsv4_npu.movement import (
    HostStore,
    Snapshot,
    receive_snapshot,
    restore_snapshot,
    send_snapshot,
    take_snapshot,
)
from tests.emulation.harness import Bench, Setting, always, varied
from tests.movement.processes import two_processes
from tests.movement.world import raw

SETTING = Setting(c128_page=1, width=6, batch=2, new_tokens=12, chunk=128, prefix_cache=False)


def poison(engine: Engine) -> None:
    """NaN in everything that no request holds: rows of free pages, and their banks of states."""
    state, pools = engine.alloc.state, engine.pools
    held = {"swa": state.page_state[1] != 0, "c4": state.page_state[0] != 0, "c128": state.page_state[2] != 0}
    held["c4 indexer"], rows = held["c4"], state.page_state[3] != 0
    for name, slab in pools.families().items():
        owners = held.get(name, held["swa"] if name != "c128 state" and pools.c4_state_by_page else rows)
        for bank, used in enumerate(owners.tolist()):
            if bank and not used:
                for tensor in slab.tensors():
                    size = slab.ring if "state" in name else slab.page  # type: ignore[union-attr]
                    raw(tensor)[:, bank * size : (bank + 1) * size] = 0xFF


def run_until(engine: Engine, run: RequestRun, outputs: int) -> None:
    while len(run.outputs) < outputs:
        engine.step()
    assert not run.finish


def enter(engine: Engine, run: RequestRun, snapshot: Snapshot) -> None:
    """Admit a waiting request with its snapshot instead of a prefill."""
    engine.waiting.remove(run)
    if run.life is None:
        run.life = engine.life.admit(run.rid, run.prompt, run.max_new, engine.options.stop)
    else:
        engine.life.readmit(run.life)
    restore_snapshot(engine.pools, engine.life, run.request, snapshot)
    engine.running.append(run)


def left_and_came_back(bench: Bench, setting: Setting, length: int, outputs: int) -> tuple[Engine, RequestRun]:
    engine = bench.engine(setting, bench.scripted(varied(setting.width)))
    run = engine.submit(bench.prompt(length), setting.new_tokens)
    other = engine.submit(bench.prompt(140), setting.new_tokens)
    run_until(engine, run, outputs)
    store = HostStore(1 << 24)
    store.put(run.rid, take_snapshot(engine.pools, engine.alloc, run.request))
    committed = engine.alloc.committed(run.row)
    engine.retract(run)
    poison(engine)
    engine.waiting.remove(run)
    engine.step()
    engine.waiting.appendleft(run)
    snapshot = store.take(run.rid)
    assert snapshot is not None
    assert not store.used_bytes
    enter(engine, run, snapshot)
    assert run.request.planned == committed > run.request.cached
    engine.run()
    bench.check(other)
    engine.alloc.audit()
    return engine, run


@pytest.mark.parametrize(
    ("platform", "length", "outputs"),
    [("a3", 122, 3), ("a3", 126, 5), ("a3", 300, 4), ("a5", 124, 3), ("a5", 127, 4), ("a5", 290, 5)],
)
def test_retracted_without_a_recompute(bench: Bench, platform: str, length: int, outputs: int) -> None:
    _, run = left_and_came_back(bench, replace(SETTING, platform=platform), length, outputs)
    bench.check(run)
    assert run.retractions == 1


def at_every_position(bench: Bench, platform: str, first: int, last: int) -> None:
    """Leave and come back at every second length; a prefill of one token and a round that accepts nothing lie between.

    Even first lengths share cached prefixes meanwhile.
    """
    setting = replace(SETTING, platform=platform, new_tokens=last - first + 8, batch=1, prefix_cache=first % 2 == 0)
    engine = bench.engine(setting, bench.scripted(always(0)))
    run = engine.submit(bench.prompt(first), setting.new_tokens)
    engine.step()
    run_until(engine, run, 1)
    lengths = []
    while not lengths or lengths[-1] < last:
        snapshot = take_snapshot(engine.pools, engine.alloc, run.request)
        lengths.append(snapshot.length)
        engine.retract(run)
        poison(engine)
        enter(engine, run, snapshot)
        engine.step()
        if len(lengths) % 2:
            lengths.append(engine.alloc.committed(run.row))
            engine.step()
    assert lengths == list(range(first, len(lengths) + first))
    engine.run()
    bench.check(run)


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_around_the_end_of_a_window(bench: Bench, platform: str) -> None:
    at_every_position(bench, platform, 124, 132)


@pytest.mark.slow
@pytest.mark.parametrize("first", [123, 124])
@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_at_every_position_of_a_window(bench: Bench, platform: str, first: int) -> None:
    at_every_position(bench, platform, first, first + 134)


def test_an_evicted_snapshot_means_a_recompute(bench: Bench) -> None:
    engine = bench.engine(SETTING, bench.scripted(varied(6)))
    runs = [engine.submit(bench.prompt(n), 8) for n in (130, 90)]
    run_until(engine, runs[0], 2)
    snapshots = [take_snapshot(engine.pools, engine.alloc, run.request) for run in runs]
    store = HostStore(max(s.nbytes for s in snapshots))
    assert store.put(0, snapshots[0]) == []
    assert store.put(1, snapshots[1]) == [0]
    for run in runs:
        engine.retract(run)
    poison(engine)
    for run in runs:
        snapshot = store.take(run.rid)
        if snapshot is not None:
            enter(engine, run, snapshot)
    assert [run in engine.waiting for run in runs] == [True, False]
    for run in engine.run():
        bench.check(run)


def hand_over(bench: Bench, mine: Setting, theirs: Setting, length: int, outputs: int) -> tuple[Any, Any]:
    """What the sender does, and what the receiver does with the tokens so far."""
    prompt = bench.prompt(length)
    so_far = bench.oracle.greedy(prompt, 30).tokens

    def sender() -> tuple[list[int], Snapshot]:
        engine = bench.engine(mine, bench.scripted(varied(mine.width)) if mine.width > 1 else None)
        run = engine.submit(prompt, 30)
        run_until(engine, run, outputs)
        return run.outputs, take_snapshot(engine.pools, engine.alloc, run.request)

    def receiver(snapshot: Snapshot | None = None) -> list[int]:
        engine = bench.engine(theirs, "ngram")
        other = engine.submit(bench.prompt(150), 3)
        engine.step()
        if snapshot is None:
            snapshot = receive_snapshot(engine.pools, 0)
        run = engine.submit(prompt + so_far[: snapshot.length + 1 - length], 10)
        enter(engine, run, snapshot)
        engine.run()
        bench.check(run)
        bench.check(other)
        engine.alloc.audit()
        return run.outputs

    return sender, receiver


PLAIN = replace(SETTING, kind="none", width=1)


@pytest.mark.parametrize(
    ("mine", "theirs", "length", "outputs"),
    [
        (PLAIN, replace(SETTING, page=256, c128_page=2), 126, 1),
        (replace(SETTING, platform="a5"), replace(SETTING, width=10), 247, 7),
        (SETTING, replace(SETTING, platform="a5", width=4), 131, 4),
    ],
)
def test_a_peer_goes_on(bench: Bench, mine: Setting, theirs: Setting, length: int, outputs: int) -> None:
    sender, receiver = hand_over(bench, mine, theirs, length, outputs)
    done, snapshot = sender()
    got = receiver(snapshot)
    want = bench.oracle.greedy(bench.prompt(length), len(done) + len(got)).tokens
    assert done + got == want


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (PLAIN, replace(SETTING, width=7)),
        (replace(SETTING, width=4), replace(SETTING, width=7, page=256, c128_page=2)),
        (replace(SETTING, platform="a5", width=4), replace(SETTING, platform="a5", width=7, page=256, c128_page=2)),
    ],
    ids=[
        "prefill without speculation, a3",
        "in the middle of a speculative decode, a3",
        "in the middle of a speculative decode, a5",
    ],
)
def test_another_process_goes_on(bench: Bench, tmp_path: Path, mine: Setting, theirs: Setting) -> None:
    sender, receiver = hand_over(bench, mine, theirs, 125, 1 if mine.width == 1 else 4)
    gc.collect()

    def send() -> list[int]:
        done, snapshot = sender()
        send_snapshot(snapshot, 1)
        return done

    done, got = two_processes(tmp_path, send, receiver)
    assert done + got == bench.oracle.greedy(bench.prompt(125), len(done) + len(got)).tokens


def test_a_request_that_cannot_come_back_waits(bench: Bench) -> None:
    engine = bench.engine(SETTING, bench.scripted(varied(6)))
    run = engine.submit(bench.prompt(200), 8)
    run_until(engine, run, 2)
    snapshot = take_snapshot(engine.pools, engine.alloc, run.request)
    engine.retract(run)
    engine.life.readmit(run.request)
    taken = engine.alloc.ledger.take(engine.alloc.state.free(0), 0, 0)
    with pytest.raises(CapacityError):
        restore_snapshot(engine.pools, engine.life, run.request, snapshot)
    engine.alloc.ledger.untake(*taken)
    engine.life.retract(run.request)
    enter(engine, run, snapshot)
    engine.run()
    bench.check(run)


def random_moves(bench: Bench, seed: int) -> int:
    """Requests that leave at any time and come back at any time, some of them after their snapshot was evicted.

    Returns how many positions were restored and not shared.
    """
    rng = random.Random(seed)
    setting = replace(
        SETTING,
        platform=rng.choice(["a3", "a5"]),
        width=rng.choice([1, 4, 6, 10]),
        page=rng.choice([128, 256]),
        batch=3,
        new_tokens=16,
        prefix_cache=rng.random() < 0.6,
        swa_ratio=rng.choice([0.6, 1.0]),
    )
    if setting.width == 1:
        setting = replace(setting, kind="none")
    engine = bench.engine(setting, None if setting.width == 1 else "ngram")
    shared = bench.prompt(300)
    runs = [engine.submit(shared[: rng.choice([120, 126, 255, 290])], 16) for _ in range(4)]
    store, parked, restored = HostStore(rng.choice([300_000, 1 << 24])), [], 0
    while engine.step() or parked:
        for run in list(engine.running):
            if rng.random() < 0.25 and run.request.planned and run.life is not None and not run.finish:
                store.put(run.rid, take_snapshot(engine.pools, engine.alloc, run.request))
                engine.retract(run)
                engine.waiting.remove(run)
                parked.append(run)
                poison(engine)
        for run in list(parked):
            if len(engine.running) < 3 and rng.random() < 0.5:
                parked.remove(run)
                snapshot = store.take(run.rid)
                engine.waiting.appendleft(run)
                if snapshot is not None:
                    enter(engine, run, snapshot)
                    restored += run.request.planned - run.request.cached
        engine.alloc.audit()
    assert len(engine.finished) == len(runs)
    for run in runs:
        bench.check(run)
    if engine.life.cache is not None:
        engine.life.cache.clear()
    engine.alloc.audit()
    assert not any(used for used, _, _ in engine.alloc.usage().values())
    return restored


@pytest.mark.parametrize("seed", range(3))
def test_random_moves(bench: Bench, seed: int) -> None:
    assert random_moves(bench, seed) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_many_random_moves(bench: Bench, seed: int) -> None:
    random_moves(bench, seed)
