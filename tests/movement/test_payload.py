"""What a transfer engine is told to copy: indices of both sides, and the memory that they index."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu.errors import InputError, OwnershipError
from dsv4_npu.movement import PayloadLists, buffer_infos, check_paired, payload_lists
from dsv4_npu.movement.payload import window_pages
from tests.movement.world import Shape, World, tokens


def row_three(shape: Shape, length: int) -> tuple[World, PayloadLists]:
    world = World(shape)
    world.occupy([1, 1])
    request = world.prefilled("a", length)
    assert request.row == 3
    return world, payload_lists(world.alloc, world.config, 3, length)


@pytest.mark.parametrize(("width", "rows"), [(1, [28, 29, 30, 31, 24]), (4, [52, 53, 54, 55, 56])])
def test_c4_rows_go_in_the_order_of_their_positions(width: int, rows: list[int]) -> None:
    _, lists = row_three(Shape("a5", width=width), 9)
    assert lists.c4_state.tolist() == rows


@pytest.mark.parametrize(
    ("width", "length", "pages"), [(1, 300, [3]), (4, 300, [6]), (4, 130, [7]), (1, 256, []), (4, 256, [])]
)
@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_c128_state_goes_in_pages_of_128_rows(platform: str, width: int, length: int, pages: list[int]) -> None:
    _, lists = row_three(Shape(platform, width=width), length)
    assert lists.c128_state.tolist() == pages


def test_c4_rows_of_swa_pages_lie_in_their_banks() -> None:
    world, lists = row_three(Shape("a3"), 130)
    first, second = world.alloc.state.full_to_swa[world.alloc.state.block_table[3, :2]].tolist()
    assert lists.c4_state.tolist() == [first * 16 + r for r in (12, 13, 14, 15)] + [second * 16, second * 16 + 1]


def test_pages_behind_the_prompt_are_not_sent() -> None:
    pages = [100, 101, 102, 103]
    assert window_pages(pages, 129, 128, 128).tolist() == [100, 101]
    assert window_pages(pages, 128, 128, 128).tolist() == [100]
    assert window_pages(pages, 255, 128, 128).tolist() == [101]
    assert window_pages(pages, 257, 128, 128).tolist() == [101, 102]
    assert window_pages(pages, 0, 128, 128).tolist() == []
    world = World(Shape())
    request = world.prefilled("a", 129)
    world.life.preallocate(request, 420)
    assert len(payload_lists(world.alloc, world.config, request.row, 129).swa) == 2


def test_a_hole_does_not_leave_the_process() -> None:
    with pytest.raises(OwnershipError, match="SWA page list: entry 1 of 2 is 0"):
        window_pages([5, 0, 7], 129, 128, 128)
    world = World(Shape(c128_page=1))
    row = world.prefilled("a", 400).row
    assert len(payload_lists(world.alloc, world.config, row, 400).c128) == 3
    world.alloc.state.c128_table[row, 1] = 0
    with pytest.raises(OwnershipError, match="C128 page list"):
        payload_lists(world.alloc, world.config, row, 400)


def remote_copy(source: World, target: World, sent: PayloadLists, into: PayloadLists) -> None:
    """A transfer engine: it knows pointers, item lengths and indices, and nothing else."""
    check_paired(sent, into)
    here, there = buffer_infos(source.pools), buffer_infos(target.pools)
    for name in PayloadLists._fields:
        mine, theirs = here[name], there[name]
        for a, b, item, item_there, end, end_there in zip(
            mine.pointers,
            theirs.pointers,
            mine.item_lengths,
            theirs.item_lengths,
            mine.lengths,
            theirs.lengths,
            strict=True,
        ):
            assert item == item_there
            for i, j in zip(getattr(sent, name).tolist(), getattr(into, name).tolist(), strict=True):
                assert 0 < i < end // item
                assert 0 < j < end_there // item
                ctypes.memmove(b + j * item, a + i * item, item)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 600) | st.sampled_from([4, 5, 127, 128, 129, 130, 255, 256, 257, 384, 385]),
    platform=st.sampled_from(["a3", "a5"]),
    page=st.sampled_from([128, 256]),
    c128_page=st.sampled_from([1, 2, 16]),
    widths=st.sampled_from([(1, 10), (10, 1), (4, 4)]),
    stages=st.booleans(),
    reserve=st.integers(0, 40),
)
def test_a_transfer_engine_moves_everything(
    length: int, platform: str, page: int, c128_page: int, widths: tuple[int, int], stages: bool, reserve: int
) -> None:
    source, target = (World(Shape(platform, page, c128_page, width, draft_stages=stages)) for width in widths)
    sender = source.prefilled("a", length, overshoot=min(reserve, widths[0] - 1))
    source.life.preallocate(sender, length + reserve)
    target.poison()
    target.occupy([130, 140])
    receiver = target.life.admit("a", tokens(length + 1), 8)
    target.life.preallocate(receiver, length)
    sent = payload_lists(source.alloc, source.config, sender.row, length)
    into = payload_lists(target.alloc, target.config, receiver.row, length)
    remote_copy(source, target, sent, into)
    assert target.wrong(receiver.row, length) == []


def test_buffers_cover_the_slabs() -> None:
    for platform in ("a3", "a5"):
        world = World(Shape(platform, draft_stages=True))
        infos = buffer_infos(world.pools)
        assert sum(sum(info.lengths) for info in infos.values()) == world.pools.usage_bytes()
        pools = world.pools
        assert infos["full"].item_lengths[0] == 32 * pools.c4.row.width * pools.c4.data.element_size()
        assert set(infos["c128_state"].item_lengths) == {128 * pools.c128_state.data.shape[-1] * 4}
        assert len(infos["swa"].pointers) == pools.config.model.num_layers + 1


def test_sides_that_do_not_pair_are_refused() -> None:
    lists = PayloadLists(*(np.arange(n) for n in (2, 2, 1, 5, 1)))
    check_paired(lists, lists)
    with pytest.raises(InputError, match="swa: 2 items to send, 3 to receive"):
        check_paired(lists, lists._replace(swa=np.arange(3)))
