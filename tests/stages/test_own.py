"""Outputs are the target's, and proposals those of a drafter with perfect memory, whatever happens in between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsv4_npu.emulation import device as emulated
from dsv4_npu.emulation.engine import Engine
from dsv4_npu.emulation.stages import OwnDrafter
from dsv4_npu.errors import UnavailableError
from dsv4_npu.movement import restore_snapshot, take_snapshot
from tests.emulation.harness import Setting
from tests.emulation.test_life import words
from tests.movement.test_model import poison
from tests.stages.harness import SHARED, StageBench, Watched, mixed


def some(*values: int, slow: tuple[int, ...]) -> list[object]:
    """Values of a parameter, and those that the slow tier adds."""
    return [*values, *(pytest.param(value, marks=pytest.mark.slow) for value in slow)]


def turn(watched: Watched, run: object) -> None:
    while not run.finish:  # type: ignore[attr-defined]
        watched.engine.step()


@pytest.mark.parametrize("drafts", some(1, 4, 9, slow=(2, 3, 5, 6, 7, 8)))
def test_every_width(stages: StageBench, drafts: int) -> None:
    platform = "a3" if drafts % 2 else "a5"
    setting = Setting(platform=platform, width=drafts + 1, new_tokens=11, chunk=50, page=256 if drafts == 2 else 128)
    watched = stages.own(setting, mixed(drafts + 1))
    for length in (3, 126):
        watched.engine.submit(stages.prompt(length), setting.new_tokens)
    watched.finish()
    accepted = {n for run in watched.engine.finished for n in run.accepts}
    assert len(accepted) > min(1, drafts // 2), "acceptance was meant to vary"


def test_drafts_as_they_are(stages: StageBench) -> None:
    watched = stages.own(Setting(width=4, new_tokens=8))
    for length in (2, 127):
        watched.engine.submit(stages.prompt(length), 8)
    watched.finish()


@pytest.mark.parametrize("width", some(6, slow=(3, 10)))
def test_with_overlap(stages: StageBench, width: int) -> None:
    watched = stages.own(Setting(platform="a3" if width == 3 else "a5", width=width, new_tokens=11), mixed(width), True)
    for length in (7, 124, 127):
        watched.engine.submit(stages.prompt(length), 11)
    watched.finish()


@pytest.mark.parametrize("platform", ["a3", pytest.param("a5", marks=pytest.mark.slow)])
def test_prefix_hits_bring_the_rows_along(stages: StageBench, platform: str) -> None:
    watched = stages.own(replace(SHARED, platform=platform), mixed(4))
    first = words(1, 270)
    watched.engine.submit(first, 6)
    watched.engine.run()
    same = watched.engine.submit([*first[:257], *words(2, 9)], 6)
    other = watched.engine.submit([*first[:256], (first[256] + 1) % 320, *words(3, 4)], 6)
    watched.finish()
    assert same.cached == 256
    # The last MTP row of the prefix was made from the token behind it: another token, and the granule is another one.
    assert other.cached == (128 if stages.kind == "mtp" else 256)


@pytest.mark.parametrize("keep", some(128, 133, slow=(1, 127, 129, 139, 140)))
def test_a_session_trimmed_between_turns(stages: StageBench, keep: int) -> None:
    watched = stages.own(replace(SHARED, platform="a5" if keep % 2 else "a3"), mixed(4))
    run = watched.engine.submit(words(1, 130), 10, session=True)
    turn(watched, run)
    stages.check(run)
    watched.settle(run)
    watched.engine.resume(run, words(2, 5), 8, keep=keep)
    turn(watched, run)
    watched.engine.end_session(run)
    watched.finish()


@pytest.mark.parametrize("back", some(4, slow=(1, 9)))
def test_a_running_request_rewound(stages: StageBench, back: int) -> None:
    watched = stages.own(replace(SHARED, platform="a3" if back == 4 else "a5", new_tokens=24), mixed(4))
    run = watched.engine.submit(words(1, 120), 24)
    while len(run.outputs) < 14:
        watched.engine.step()
    watched.settle(run)
    watched.engine.rewind(run, len(run.request) - back)
    watched.finish()


@pytest.mark.parametrize("at", some(6, slow=(5, 7)))
def test_a_stop_inside_an_accepted_run_then_another_turn(stages: StageBench, at: int) -> None:
    """The session keeps the rows up to its stop; the overshoot's token behind the last of them is replaced."""
    prompt = words(1, 121)
    want = stages.oracle.greedy(prompt, 10).tokens
    watched = stages.own(replace(SHARED, width=6), lambda b, n: 5)
    watched.engine.options = replace(watched.engine.options, stop=(want[at],))
    run = watched.engine.submit(prompt, 10, session=True)
    turn(watched, run)
    assert run.finish == "stop"
    watched.settle(run)
    watched.engine.resume(run, words(2, 7), 6)
    turn(watched, run)
    watched.engine.end_session(run)
    watched.finish()


@pytest.mark.parametrize("overlap", [False, True])
def test_retraction(stages: StageBench, overlap: bool) -> None:
    watched = stages.own(replace(SHARED, platform="a3" if overlap else "a5", chunk=64), mixed(4), overlap)
    runs = [watched.engine.submit(words(seed, 70 + 57 * seed), 12) for seed in range(2)]
    while len(runs[1].outputs) < 4:
        watched.engine.step()
    watched.engine.retract(runs[1])
    poison(watched.engine)
    watched.finish()
    assert runs[1].retractions == 1


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_a_snapshot_goes_on_at_a_peer(stages: StageBench, platform: str) -> None:
    setting = replace(SHARED, platform=platform, prefix_cache=False)
    here, there = stages.own(setting, mixed(4)), stages.own(replace(setting, page=256, c128_page=2), mixed(4))
    prompt = words(1, 131)
    run = here.engine.submit(prompt, 12)
    while len(run.outputs) < 5:
        here.engine.step()
    here.settle(run)
    snapshot = take_snapshot(here.engine.pools, here.engine.alloc, run.request)
    there.engine.submit(words(2, 140), 3)
    there.engine.step()
    guest = there.engine.submit(prompt + run.outputs, 8)
    there.engine.waiting.remove(guest)
    guest.life = there.engine.life.admit(guest.rid, guest.prompt, guest.max_new)
    restore_snapshot(there.engine.pools, there.engine.life, guest.request, snapshot)
    assert guest.request.planned == len(guest.prompt) - 1, "one token is left to prefill"
    there.engine.running.append(guest)
    there.finish()


@pytest.mark.slow
def test_a_window_that_moves_on(stages: StageBench) -> None:
    """Long enough that pages are evicted and given to others."""
    setting = replace(SHARED, width=6, swa_ratio=0.4, context=700, batch=2)
    watched = stages.own(setting, mixed(6))
    for length in (380, 250):
        watched.engine.submit(words(length, length), 12)
    watched.finish()


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_retraction_with_a_snapshot_of_the_engine(stages: StageBench, overlap: bool) -> None:
    """The rows come back from host memory; what is prefilled is one token."""
    setting = replace(SHARED, prefix_cache=False, retract="snapshot", platform="a3" if overlap else "a5")
    watched = stages.own(setting, mixed(4), overlap)
    engine, run = watched.engine, watched.engine.submit(words(1, 128), 20)
    for _ in range(2):
        outputs = len(run.outputs) + 3
        while len(run.outputs) < outputs:
            engine.step()
        engine.retract(run)
        poison(engine)
    watched.finish()
    assert engine.parking is not None
    assert engine.parking.counts.restored == 2


@pytest.mark.parametrize("kind", ["chain", "dspark"])
def test_on_the_emulated_device(mtp: StageBench, dspark: StageBench, kind: str) -> None:
    """Drafting and injection leave the host alone: no value is read, and nothing is sent in a steady step."""
    pytest.importorskip("triton", reason="the emulated npu device runs kernels under Triton's interpreter")
    bench = mtp if kind == "chain" else dspark
    try:
        emulated.activate()
    except UnavailableError as error:
        pytest.skip(str(error))
    base = bench.own(Setting(width=4, batch=2, context=320)).engine
    options = replace(base.options, device="npu", overlap=True)
    engine = Engine(
        bench.model,
        base.config,
        base.pools.sizes,
        OwnDrafter(bench.net, bench.kind),
        options,  # type: ignore[arg-type]
    )
    watched = Watched(bench, engine, mixed(4) if kind == "chain" else None)
    for length in (20, 6):
        engine.submit(bench.prompt(length), 6)
    watched.finish()
    assert not any(cost.reads for cost in engine.costs)
    # The steering of the test sends its drafts; the stages send nothing.
    assert kind == "chain" or any(not cost.copies_in for cost in engine.costs)
