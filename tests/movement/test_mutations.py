"""Each rule switched off once: the checks of this folder must see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dsv4_npu.config import CacheConfig
from dsv4_npu.emulation.result import LOGIT_TOLERANCE
from dsv4_npu.errors import InputError
from dsv4_npu.movement import belongings, check_paired, payload, payload_lists, restore_snapshot, rows, take_snapshot
from dsv4_npu.movement.belongings import Span
from tests.emulation.harness import Bench
from tests.movement import test_model as model
from tests.movement.test_model import PLAIN, SETTING, hand_over, left_and_came_back
from tests.movement.test_snapshot import round_trip
from tests.movement.world import Shape, World, tokens

Patch = pytest.MonkeyPatch
REAL = belongings.describe


def leave_behind(patch: Patch, *families: str) -> None:
    """Both directions forget some families, and agree on it."""
    real = rows.locate

    def fewer(*args: Any) -> dict[str, Any]:
        return {name: at[:0] if name in families else at for name, at in real(*args).items()}

    patch.setattr(rows, "locate", fewer)
    patch.setattr(rows, "describe", lambda *args: {**REAL(*args), **dict.fromkeys(families, Span(0, 0))})


@pytest.mark.parametrize("platform", ["a3", "a5"])
@pytest.mark.parametrize("family", ["swa", "c4", "c4 indexer", "c128", "c4 state", "c4 indexer state", "c128 state"])
def test_a_family_left_behind(monkeypatch: Patch, platform: str, family: str) -> None:
    assert round_trip(Shape(platform), 390) == []
    leave_behind(monkeypatch, family)
    assert round_trip(Shape(platform), 390) == [family]


@pytest.mark.parametrize("short", [1, 2, 3, 4, 5])
def test_one_pending_row_too_few(monkeypatch: Patch, short: int) -> None:
    """The oldest overlap rows are the ones that are forgotten easily."""

    def later(config: CacheConfig, length: int, shared: int = 0) -> dict[str, Span]:
        spans = REAL(config, length, shared)
        for name in ("c4 state", "c4 indexer state"):
            spans[name] = Span(min(length, spans[name].start + short), length)
        return spans

    for module in (belongings, rows):
        monkeypatch.setattr(module, "describe", later)
    assert round_trip(Shape("a5"), 390) == ["c4 state", "c4 indexer state"]


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_banks_emptied_after_the_restore(monkeypatch: Patch, platform: str) -> None:
    assert round_trip(Shape(platform), 390, others=(1,)) == []
    monkeypatch.setattr(rows, "clear_freed_banks", lambda pools, alloc: None)
    lost = ["c4 state", "c4 indexer state"] if platform == "a3" else []
    assert round_trip(Shape(platform), 390, others=(1,)) == lost


def handed_over(monkeypatch: Patch, switch: Callable[[World], None]) -> list[str]:
    """Families that are wrong at a peer that restored while ``switch`` was in force."""
    source, target = World(Shape("a5", width=1)), World(Shape("a5"))
    snapshot = take_snapshot(source.pools, source.alloc, source.prefilled("a", 390))
    target.occupy([3])
    receiver = target.life.admit("a", tokens(391), 8)
    switch(source)
    restore_snapshot(target.pools, target.life, receiver, snapshot)
    monkeypatch.undo()
    return target.wrong(receiver.row, 390)


def test_the_ring_of_the_wrong_side(monkeypatch: Patch) -> None:
    assert handed_over(monkeypatch, lambda source: None) == []
    plain = CacheConfig.ring

    def senders(source: World) -> None:
        monkeypatch.setattr(CacheConfig, "ring", lambda self, ratio: plain(source.config, ratio))

    assert handed_over(monkeypatch, senders) == ["c4 state", "c4 indexer state", "c128 state"]


def stale_pages(world: World, row: int, length: int) -> list[str]:
    """Pages listed for sending that hold no readable row, and pages missing from the lists."""
    lists, page, problems = payload_lists(world.alloc, world.config, row, length), world.config.page, []
    for name, family, unit in (
        ("full", "c4", page // 4),
        ("swa", "swa", page),
        ("c128", "c128", world.shape.c128_page),
    ):
        needed = {world.address(family, row, p) // unit for p in world.positions(family, length)}
        listed = getattr(lists, name).tolist()
        # The last FULL page may hold an open C4 window only: no entry yet, but it is the request's.
        extra = [p for p in listed if p not in needed and not (name == "full" and p == listed[-1])]
        if extra or needed - set(listed):
            problems.append(name)
    return problems


@pytest.mark.parametrize("length", [129, 257, 300, 384])
def test_stale_tail_pages(monkeypatch: Patch, length: int) -> None:
    source, target = World(Shape()), World(Shape())
    request = source.prefilled("a", length)
    receiver = target.life.admit("a", tokens(length + 1), 8)
    target.life.preallocate(receiver, length)
    into = payload_lists(target.alloc, target.config, receiver.row, length)
    source.life.preallocate(request, 640)
    assert stale_pages(source, request.row, length) == []
    check_paired(payload_lists(source.alloc, source.config, request.row, length), into)

    def all_of_them(pages: Any, n: int, page: int, window: int) -> Any:
        row = source.alloc.state.block_table[request.row]
        return np.trim_zeros(source.alloc.state.full_to_swa[row[max(0, n - window + 1) // page :]].astype(np.int64))

    monkeypatch.setattr(payload, "window_pages", all_of_them)
    assert stale_pages(source, request.row, length) == ["swa"]
    with pytest.raises(InputError, match="swa: "):
        check_paired(payload_lists(source.alloc, source.config, request.row, length), into)


# -- the model sees it too --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "length", "forgotten"),
    [
        # With more entries than the indexer picks (64), else its keys decide nothing.
        ("a3", 300, ("c4 indexer",)),
        ("a5", 126, ("c4 state", "c4 indexer state")),
        ("a3", 118, ("c128 state",)),
    ],
)
def test_outputs_show_what_was_left_behind(
    bench: Bench, monkeypatch: Patch, platform: str, length: int, forgotten: tuple[str, ...]
) -> None:
    leave_behind(monkeypatch, *forgotten)
    _, run = left_and_came_back(bench, replace(SETTING, platform=platform), length, 3)
    want = bench.oracle.greedy(run.prompt, len(run.outputs))
    error = float((torch.stack(run.logits) - want.logits).abs().max())
    assert not error <= LOGIT_TOLERANCE
    with pytest.raises(AssertionError):
        bench.check(run)


@pytest.mark.parametrize("platform", ["a3", "a5"])
@pytest.mark.parametrize("rule", ["pending rows not sent", "ring of the wrong side"])
def test_a_peers_outputs_show_it(bench: Bench, monkeypatch: Patch, platform: str, rule: str) -> None:
    """A prefill without speculation hands over to a decode with it, in the middle of a C4 and of a C128 window."""
    mine, theirs = replace(PLAIN, platform=platform), replace(SETTING, platform=platform)
    sender, receiver = hand_over(bench, mine, theirs, 126, 1)
    _, snapshot = sender()
    assert receiver(snapshot)
    restore, ring = restore_snapshot, CacheConfig.ring
    senders = bench.engine(mine, None).config

    def wrong(*args: Any) -> int:
        with monkeypatch.context() as patch:
            if rule == "pending rows not sent":
                leave_behind(patch, "c4 state", "c4 indexer state", "c128 state")
                empty = {name: tuple(t[:, :0] for t in part) for name, part in args[3].rows.items() if "state" in name}
                args = (*args[:3], replace(args[3], rows={**args[3].rows, **empty}))
            else:
                patch.setattr(CacheConfig, "ring", lambda self, ratio: ring(senders, ratio))
            return restore(*args)

    monkeypatch.setattr(model, "restore_snapshot", wrong)
    with pytest.raises(AssertionError):
        receiver(snapshot)
