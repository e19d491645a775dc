"""A request in another process: other rings, other pages, other tables, another C4 owner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu.errors import InputError
from dsv4_npu.movement import peer, receive_snapshot, restore_snapshot, send_snapshot, take_snapshot
from tests.movement.processes import two_processes
from tests.movement.world import Shape, World, tokens

SHAPES = st.builds(
    Shape,
    platform=st.sampled_from(["a3", "a5"]),
    page=st.sampled_from([128, 256]),
    c128_page=st.sampled_from([1, 2, 16]),
    width=st.sampled_from([1, 4, 10]),
    native=st.just(False),
)


@settings(max_examples=40, deadline=None)
@given(SHAPES, SHAPES, st.integers(1, 600))
def test_peers_need_not_be_alike(mine: Shape, theirs: Shape, length: int) -> None:
    source, target = World(mine), World(theirs)
    snapshot = take_snapshot(source.pools, source.alloc, source.prefilled("a", length))
    target.poison()
    target.occupy([150])
    receiver = target.life.admit("a", tokens(length + 1), 8)
    restore_snapshot(target.pools, target.life, receiver, snapshot)
    assert target.wrong(receiver.row, length) == []


def test_draft_stages_that_the_sender_lacks_start_from_zeros() -> None:
    source, target = World(Shape(width=1)), World(Shape(draft_stages=True))
    snapshot = take_snapshot(source.pools, source.alloc, source.prefilled("a", 200))
    target.poison()
    receiver = target.life.admit("a", tokens(201), 8)
    restore_snapshot(target.pools, target.life, receiver, snapshot)
    layers = target.config.model.num_layers
    slots = [target.address("swa", receiver.row, p) for p in target.positions("swa", 200)]
    stage = target.pools.swa.data[layers:].flatten(1, 3)
    assert not stage[:, slots].any()
    target.pools.swa.data = target.pools.swa.data[:layers].contiguous()
    assert target.wrong(receiver.row, 200) == []


def send(shape: Shape, length: int) -> None:
    world = World(shape)
    send_snapshot(take_snapshot(world.pools, world.alloc, world.prefilled("a", length, shape.width - 1)), 1)


def receive(shape: Shape, length: int) -> list[str]:
    world = World(shape)
    world.poison()
    world.occupy([140])
    receiver = world.life.admit("a", tokens(length + 1), 8)
    restore_snapshot(world.pools, world.life, receiver, receive_snapshot(world.pools, 0))
    world.alloc.audit()
    return world.wrong(receiver.row, length)


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_native_rows_reach_another_process(tmp_path: Path, platform: str) -> None:
    here, there = Shape(platform, width=1), Shape(platform, page=256, c128_page=16, width=10)
    _, wrong = two_processes(tmp_path, lambda: send(here, 301), lambda: receive(there, 301))
    assert wrong == []


def refusal(shape: Shape, length: int, sender: bool) -> str:
    try:
        if sender:
            send(shape, length)
        else:
            receive(shape, length)
    except InputError as error:
        return str(error)
    return "no error"


def test_both_sides_hear_of_a_refusal(tmp_path: Path) -> None:
    here, there = Shape("a3", width=1), Shape("a5")
    sent, received = two_processes(
        tmp_path, lambda: refusal(here, 301, sender=True), lambda: refusal(there, 301, sender=False)
    )
    assert "peer 1 refused the snapshot of 301 tokens" in sent
    assert "family 'swa'" in received


def test_a_header_is_checked() -> None:
    world = World(Shape())
    snapshot = take_snapshot(world.pools, world.alloc, world.prefilled("a", 9))
    header = peer.header_of(snapshot)
    assert peer.check_header(header, world.pools) == snapshot.layout
    with pytest.raises(InputError, match="convention"):
        peer.check_header({**header, "convention": "raw scores"}, world.pools)
    with pytest.raises(InputError, match="another version"):
        peer.check_header({"length": 9}, world.pools)
    with pytest.raises(InputError, match="rows of families"):
        peer.check_header({**header, "layout": {**header["layout"], "draft": []}}, world.pools)
    with pytest.raises(InputError, match="at length 10"):
        peer.check_header({**header, "length": 10}, world.pools)
    fewer = {name: tensors[:0] for name, tensors in snapshot.rows.items()}
    with pytest.raises(InputError, match="family 'swa'"):
        peer.check_header(peer.header_of(replace(snapshot, rows=fewer)), world.pools)
