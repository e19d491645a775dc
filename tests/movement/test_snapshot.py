"""Snapshot, give up, overwrite, restore elsewhere: every readable row is the same bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu.errors import CapacityError, ConfigError, InputError, OwnershipError
from dsv4_npu.movement import HostStore, clear_freed_banks, describe, locate, restore_snapshot, rows, take_snapshot
from tests.movement.world import Shape, World, raw, tokens

#: Every phase of both compressors around the first window, page ends, and later windows.
LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8, *range(123, 134), *range(251, 262), *range(380, 389), 511, 512, 513, 516, 600]


def round_trip(shape: Shape, length: int, overshoot: int = 0, others: Sequence[int] = (130, 1)) -> list[str]:
    """Families that do not come back whole."""
    world = World(shape)
    request = world.prefilled("a", length, overshoot)
    assert world.wrong(request.row, length) == []
    old = request.row
    snapshot = take_snapshot(world.pools, world.alloc, request)
    world.life.retract(request)
    world.poison()
    world.occupy(others)
    world.life.readmit(request)
    assert request.row != old
    assert restore_snapshot(world.pools, world.life, request, snapshot) == length
    # What every forward begins with; it may not touch what was restored.
    clear_freed_banks(world.pools, world.alloc)
    world.alloc.audit()
    assert world.alloc.committed(request.row) == request.planned == length
    assert request.log.resident(length)
    return world.wrong(request.row, length)


@settings(max_examples=60, deadline=None)
@given(
    length=st.sampled_from(LENGTHS) | st.integers(1, 630),
    platform=st.sampled_from(["a3", "a5"]),
    page=st.sampled_from([128, 256]),
    c128_page=st.sampled_from([1, 2, 16]),
    width=st.sampled_from([1, 4, 10]),
    native=st.booleans(),
    draft_stages=st.booleans(),
    data=st.data(),
)
def test_everything_comes_back(
    length: int, platform: str, page: int, c128_page: int, width: int, native: bool, draft_stages: bool, data: Any
) -> None:
    shape = Shape(platform, page, c128_page, width, native, draft_stages)
    rejected = data.draw(st.integers(0, width - 1), "rejected rows")
    others = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=2), "other requests")
    assert round_trip(shape, length, rejected, others) == []


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_every_position_of_a_window(platform: str) -> None:
    for length in range(250, 387):
        assert round_trip(Shape(platform), length, overshoot=3) == [], length


def test_nothing_else_is_written() -> None:
    world = World(Shape(platform="a5"))
    request = world.prefilled("a", 300)
    snapshot = take_snapshot(world.pools, world.alloc, request)
    world.life.retract(request)
    world.poison()
    world.life.readmit(request)
    restore_snapshot(world.pools, world.life, request, snapshot)
    for name, slab in world.pools.families().items():
        for tensor in slab.tensors():
            view = raw(tensor)
            changed = (view[:, :-1] != 0xFF).any(-1).any(0).nonzero().flatten().tolist()
            assert len(changed) == len(world.positions(name, 300)), name


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_a_cached_prefix_stays_shared(platform: str) -> None:
    world = World(Shape(platform, c128_page=1), cache=True)
    world.life.abort(world.prefilled("first", 300))
    request = world.prefilled("a", 300)
    assert request.cached == 256
    snapshot = take_snapshot(world.pools, world.alloc, request)
    world.life.retract(request)
    world.occupy([40])
    world.life.readmit(request)
    assert (request.cached, request.restore is not None) == (256, platform == "a5")
    pages = world.alloc.state.block_table[request.row, :2].tolist()
    banks = world.alloc.state.full_to_swa[pages]
    before = [t.clone() for t in (world.pools.c4.data[:, pages], world.pools.swa.data[:, banks])]
    for name in ("c4", "c4 indexer", "swa", "c128", "c4 state"):
        snapshot.rows[name][0][:, 0] ^= 1  # the oldest row: shared, but for C4 state, which begins at 296
    restore_snapshot(world.pools, world.life, request, snapshot)
    assert request.cached == world.alloc.shared(request.row) == 256
    after = (world.pools.c4.data[:, pages], world.pools.swa.data[:, banks])
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(before, after, strict=True))
    assert world.wrong(request.row, 300) == ["c4 state"]
    assert request.restore is None, "rows captured at 256 would overwrite those of 300"
    world.alloc.audit()


def test_a_prefix_as_long_as_the_snapshot_is_enough() -> None:
    world = World(Shape(c128_page=1), cache=True)
    snapshot = take_snapshot(world.pools, world.alloc, world.prefilled("first", 200))
    world.prefilled("b", 300)
    world.life.abort(world.life.requests["first"])
    request = world.life.admit("c", tokens(290), 8)
    assert restore_snapshot(world.pools, world.life, request, snapshot) == request.planned == 256


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_hole_raises_and_never_becomes_the_dummy_page() -> None:
    world = World(Shape(c128_page=1))
    request = world.prefilled("a", 400)
    state, row = world.alloc.state, request.row
    for table, at, says in (
        (state.block_table, (row, 1), "FULL page list"),
        (state.c128_table, (row, 1), "C128 page list"),
        (state.full_to_swa, (state.block_table[row, 3],), "SWA page list"),
    ):
        kept, table[at] = table[at], 0
        with pytest.raises(OwnershipError, match=says):
            take_snapshot(world.pools, world.alloc, request)
        table[at] = kept
    take_snapshot(world.pools, world.alloc, request)


def test_only_a_row_of_ones_own_at_its_committed_end() -> None:
    world = World(Shape())
    request = world.prefilled("a", 200)
    with pytest.raises(InputError, match="200 are committed"):
        rows.read_rows(world.pools, world.alloc, request.row, 201)
    with pytest.raises(InputError, match="allocated"):
        locate(world.alloc, world.config, request.row, 500)
    with pytest.raises(InputError, match="shared"):
        describe(world.config, 5, 6)
    step = world.life.extend([(request, 201)])
    with pytest.raises(OwnershipError, match="not learned"):
        take_snapshot(world.pools, world.alloc, request)
    world.life.cancel(step)
    request.log.overrun(200, 460)
    with pytest.raises(OwnershipError, match="not all in their rings"):
        take_snapshot(world.pools, world.alloc, request)
    world.life.retract(request)
    with pytest.raises(OwnershipError, match="no row"):
        take_snapshot(world.pools, world.alloc, request)


def test_another_history_or_format_is_refused_before_anything_changes() -> None:
    world = World(Shape())
    request = world.prefilled("a", 200)
    snapshot = take_snapshot(world.pools, world.alloc, request)
    with pytest.raises(OwnershipError, match="freshly admitted"):
        restore_snapshot(world.pools, world.life, request, snapshot)
    before = world.alloc.usage()
    other = world.life.admit("b", [7] * 201, 4)
    with pytest.raises(InputError, match="none of request 'b'"):
        restore_snapshot(world.pools, world.life, other, snapshot)
    short = world.life.admit("c", tokens(200), 4)
    with pytest.raises(InputError, match="none of request 'c'"):
        restore_snapshot(world.pools, world.life, short, snapshot)
    for rest in (other, short):
        assert world.alloc.allocated(rest.row) == 0
        world.life.abort(rest)
    assert {k: v[0] for k, v in world.alloc.usage().items()} == {k: v[0] for k, v in before.items()}
    fewer = {**snapshot.rows, "c128": tuple(t[:, :0] for t in snapshot.rows["c128"])}
    guest = world.life.admit("d", tokens(201), 4)
    with pytest.raises(InputError, match="family 'c128'"):
        restore_snapshot(world.pools, world.life, guest, replace(snapshot, rows=fewer))
    assert world.alloc.allocated(guest.row) == 0
    peer = World(Shape(platform="a5"))
    guest = peer.life.admit("a", tokens(201), 4)
    with pytest.raises(InputError, match="family 'swa'"):
        restore_snapshot(peer.pools, peer.life, guest, snapshot)


def test_without_pages_nothing_is_changed() -> None:
    world = World(Shape())
    request = world.prefilled("a", 600)
    snapshot = take_snapshot(world.pools, world.alloc, request)
    world.life.retract(request)
    world.life.readmit(request)
    free = [world.alloc.state.free(family) for family in range(3)]
    for missing in range(3):
        taken = world.alloc.ledger.take(*(count if family == missing else 0 for family, count in enumerate(free)))
        with pytest.raises(CapacityError):
            restore_snapshot(world.pools, world.life, request, snapshot)
        world.alloc.ledger.untake(*taken)
        assert world.alloc.allocated(request.row) == request.planned == 0
        assert [world.alloc.state.free(family) for family in range(3)] == free
    assert restore_snapshot(world.pools, world.life, request, snapshot) == 600
    assert world.wrong(request.row, 600) == []


# -- host store -------------------------------------------------------------------------------------------------------


def test_the_store_keeps_to_its_budget_and_reports_what_it_evicts() -> None:
    world = World(Shape())
    snapshots = {}
    for rid, length in (("a", 40), ("b", 40), ("c", 40), ("d", 500)):
        snapshots[rid] = take_snapshot(world.pools, world.alloc, world.prefilled(rid, length))
    size = snapshots["a"].nbytes
    assert size == sum(
        len(world.positions(name, 40)) * sum(raw(t).shape[0] * raw(t).shape[2] for t in slab.tensors())
        for name, slab in world.pools.families().items()
    )
    store = HostStore(2 * size)
    assert store.put("a", snapshots["a"]) == []
    assert store.put("b", snapshots["b"]) == []
    assert store.touch("a")
    assert store.put("c", snapshots["c"]) == ["b"]
    assert store.keys() == ["a", "c"]
    assert store.used_bytes == 2 * size
    with pytest.raises(CapacityError, match="host budget"):
        store.put("d", snapshots["d"])
    with pytest.raises(OwnershipError, match="is there already"):
        store.put("b", snapshots["b"])
    assert not store.touch("b")
    assert store.take("b") is None
    assert store.take("a") is snapshots["a"]
    for key in ("a", "b"):
        with pytest.raises(OwnershipError, match="never put, or was taken"):
            store.take(key)
    store.drop("c")
    assert store.used_bytes == 0
    with pytest.raises(ConfigError, match="budget_bytes"):
        HostStore(0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["put", "take", "touch"]), st.integers(1, 5))))
def test_every_snapshot_comes_out_or_is_reported(events: list[tuple[str, str, int]]) -> None:
    class Sized:
        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes

    store, held, gone = HostStore(8), {}, set()
    for key, what, size in events:
        if what == "put" and key not in held and key not in gone:
            snapshot: Any = Sized(size)
            evicted = store.put(key, snapshot)
            order = list(held)
            assert evicted == order[: len(evicted)]
            for old in evicted:
                del held[old]
                gone.add(old)
            held[key] = snapshot
        elif what == "take" and (key in held or key in gone):
            assert store.take(key) is held.pop(key, None)
            gone.discard(key)
        elif what == "touch" and (key in held or key in gone):
            assert store.touch(key) is (key in held)
            if key in held:
                held[key] = held.pop(key)
        assert store.used_bytes == sum(s.nbytes for s in held.values()) <= 8
        assert store.keys() == list(held)
