"""Each rule switched off in turn: a walk over the life cycle must see it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dsv4_npu.alloc.allocator import KVAllocator
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.prefix_cache import PrefixCache
from dsv4_npu.alloc.py_ledger import PyLedger
from dsv4_npu.alloc.py_pages import PyPages
from dsv4_npu.alloc.request import Request, State
from dsv4_npu.alloc.rollback import RingLog, RollbackRules
from dsv4_npu.alloc.state import C128, FULL, SWA, TAKEN
from dsv4_npu.errors import AuditError, CapacityError, OwnershipError
from tests.lifecycle.device import WrongReadError
from tests.lifecycle.truth import Shape, Truth
from tests.lifecycle.world import World

Patch = Callable[[pytest.MonkeyPatch], None]
MUTATIONS: dict[str, tuple[Patch, Shape]] = {}


def mutation(name: str, **shape: Any) -> Callable[[Patch], Patch]:
    def add(patch: Patch) -> Patch:
        MUTATIONS[name] = patch, Shape(**shape)
        return patch

    return add


def steps_until_seen(shape: Shape, seed: int, limit: int) -> int | None:
    """Steps of a seeded walk until something is found; None if nothing is."""
    world, rng = World(shape), random.Random(seed)
    for step in range(limit):
        try:
            world.step(rng.randrange)
        except (AssertionError, AuditError, OwnershipError):
            return step
    return None


@mutation("early return at length 0")
def _(patch: pytest.MonkeyPatch) -> None:
    close = PyLedger.close

    def mutated(self: PyLedger, row: int) -> Any:
        if self.state.committed[row] == 0:
            self.state.allocated[row] = 0
            return np.zeros(0, np.int32)
        return close(self, row)

    patch.setattr(PyLedger, "close", mutated)


@mutation("no rollback of C128", swa=8)
def _(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: PyPages, full: int, swa: int, c128: int) -> Any:
        if c128 > self.state.free(C128):
            raise CapacityError("C128")
        third = self._pop(C128, c128, TAKEN)
        if full > self.state.free(FULL) or swa > self.state.free(SWA):
            raise CapacityError("FULL or SWA")
        return self._pop(FULL, full, TAKEN), self._pop(SWA, swa, TAKEN), third

    patch.setattr(PyPages, "take", mutated)


@mutation("tail reclaim without alignment")
def _(patch: pytest.MonkeyPatch) -> None:
    trim = PyLedger.trim

    def mutated(self: PyLedger, row: int, boundary: int) -> None:
        allocated = int(self.state.allocated[row])
        trim(self, row, boundary // self.spec.page_size * self.spec.page_size)
        self.state.committed[row], self.state.allocated[row] = boundary, min(allocated, boundary)

    patch.setattr(PyLedger, "trim", mutated)


@mutation("SWA mapping not cleared")
def _(patch: pytest.MonkeyPatch) -> None:
    unmap = PyPages._unmap

    def mutated(self: PyPages, full: Any) -> Any:
        before = self.state.full_to_swa[full].copy()
        freed = unmap(self, full)
        self.state.full_to_swa[full] = before
        return freed

    patch.setattr(PyPages, "_unmap", mutated)


@mutation("eviction by the speculative end", width=10)
def _(patch: pytest.MonkeyPatch) -> None:
    evict = KVAllocator.evict_window

    def mutated(self: KVAllocator, row: int, verify_width: int | None = None) -> int:
        committed = self.state.committed[row]
        self.state.committed[row] = self.state.allocated[row]
        freed = evict(self, row, verify_width)
        self.state.committed[row] = committed
        return freed

    patch.setattr(KVAllocator, "evict_window", mutated)


@mutation("unaligned rewind")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RollbackRules, "target", lambda self, log, wanted, low: max(low, wanted))


@mutation("aligned rewind without proof", owner="request")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        RollbackRules, "target", lambda self, log, wanted, low: t if (t := wanted // 128 * 128) >= low else None
    )


@mutation("row given back before its last forward is learned")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lifecycle, "_end", lambda self, request, ending: self._release(request, ending))


@mutation("a prefix is hit where its C4 rows were not saved")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RingLog, "overlap_kept", lambda self, boundary: True)


@mutation("C4 rows are captured although a later forward has overwritten them", owner="request", width=10)
def _(patch: pytest.MonkeyPatch) -> None:
    insert = PrefixCache.insert

    def mutated(self: PrefixCache, tokens: Any, row: int, resident: Any) -> int:
        return insert(self, tokens, row, lambda end: True)

    patch.setattr(PrefixCache, "insert", mutated)


@mutation("a running request's prefix is evictable")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "_add_reader", lambda self, node: None)
    patch.setattr(PrefixCache, "_drop_reader", lambda self, node: None)


@mutation("overshoot tokens enter the outputs")
def _(patch: pytest.MonkeyPatch) -> None:
    take = Request.take_outputs

    def mutated(self: Request, run: Any) -> None:
        take(self, run)
        if self.reason == "stop":
            self.append(run[-1:])

    patch.setattr(Request, "take_outputs", mutated)


def overlapped_decode_beside_prefills() -> None:
    """One request decodes with overlap over several pages while others are prefilled between launch and done."""
    world, rng = World(Shape(swa=8, cache=False)), random.Random(1)
    one = world.life.admit("one", [3] * 120, 170)
    world.live.append(one)
    world.truth[one] = Truth(one.tokens.tolist())
    while one.state is State.PREFILL:
        world.prefill(rng.randrange)
        world.turn(rng.randrange)
    for turn in range(90):
        if one.state is State.DECODE:
            assert world.plan(lambda: world.life.decode_plan([one]))
            world.check()
            world.launch(rng.randrange)
        if one.state is State.DECODE:
            other = world.life.admit(turn, [turn % 20] * 200, 1)
            world.live.append(other)
            world.life.preallocate(other, 200)
            world.check()
            world.life.abort(other)
            world.sweep()
        if one.unlearned == 2:
            world.done(rng.randrange)
            world.learn(rng.randrange)
            world.check()
    world.shut_down()


def test_a_page_freed_in_flight_waits_for_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    overlapped_decode_beside_prefills()
    monkeypatch.setattr(PyPages, "set_tag", lambda self, epoch: None)
    with pytest.raises(AssertionError, match="given out while step"):
        overlapped_decode_beside_prefills()


def session_behind_a_further_verify(width: int, owner: str) -> None:
    """Turns that end while one more verify has been launched already; the next turn reads right rows (case 47)."""
    for length in (250, 253, 255, 259):
        world, rng = World(Shape(width=width, owner=owner, rows=2)), random.Random(length)
        one = world.life.admit("one", [length % 23] * length, 4 + width)
        world.live.append(one)
        world.truth[one] = Truth(one.tokens.tolist())
        for _ in range(3):
            while one.state is State.PREFILL:
                world.prefill(lambda n: n - 1)
                world.turn(rng.randrange)
            while one.state is State.DECODE:
                world.pipeline(rng.randrange)
                if one.state is State.DECODE:
                    world.turn(rng.randrange)
            while world.steps:
                world.turn(rng.randrange)
            assert one.state is State.ENDED
            world.life.keep(one)
            world.sweep()
            position = world.life.resume(one, [1, 2, 3, 4, 5], 4 + width)
            world.moved_to(one, position, one.row)
        world.shut_down()


@pytest.mark.parametrize("owner", ["swa_page", "request"])
@pytest.mark.parametrize("width", [6, 10])
def test_a_session_continues_behind_a_further_verify(width: int, owner: str) -> None:
    session_behind_a_further_verify(width, owner)


def test_the_rows_that_a_further_verify_overwrites_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingLog, "overrun", lambda self, start, end: None)
    with pytest.raises(WrongReadError):
        session_behind_a_further_verify(10, "request")


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_walk_sees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, shape = MUTATIONS[name]
    patch(monkeypatch)
    assert any(steps_until_seen(shape, seed, 1000) is not None for seed in (1, 2, 3)), f"nobody saw: {name}"
