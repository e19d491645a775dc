"""On the emulated npu device: one copy per tensor leaves, nothing is read back on the way in."""

from __future__ import annotations

import pytest
import torch

from dsv4_npu.emulation import device as emulated
from dsv4_npu.emulation.stream import EVENTS
from dsv4_npu.movement import restore_snapshot, take_snapshot
from dsv4_npu.pools import DSV4Pools
from tests.movement.world import Shape, World

pytest.importorskip("triton", reason="the emulated npu device runs kernels under Triton's interpreter")


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_native_rows_of_a_device(platform: str) -> None:
    emulated.activate()
    world = World(Shape(platform))
    request = world.prefilled("a", 390)
    pools = DSV4Pools(world.config, world.pools.sizes, device=emulated.NAME)
    pairs = [
        pair
        for name, slab in world.pools.families().items()
        for pair in zip(pools.families()[name].tensors(), slab.tensors(), strict=True)
    ]
    for there, here in pairs:
        there.copy_(here)
    before = EVENTS.copy()
    snapshot = take_snapshot(pools, world.alloc, request)
    spent = EVENTS.since(before)
    assert sum(spent.reads.values()) == sum(len(slab.tensors()) for slab in pools.families().values()) == 8
    want = take_snapshot(world.pools, world.alloc, request)
    for name, tensors in snapshot.rows.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, want.rows[name], strict=True)), name
    world.life.retract(request)
    world.occupy([5])
    world.life.readmit(request)
    before = EVENTS.copy()
    restore_snapshot(pools, world.life, request, snapshot)
    spent = EVENTS.since(before)
    assert not spent.reads
    assert not spent.stalls
    for there, here in pairs:
        here.copy_(there.cpu())
    assert world.wrong(request.row, 390) == []
