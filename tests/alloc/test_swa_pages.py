"""SWA pages: mapping, tails, eviction of the window, prefixes whose window is gone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_npu.alloc.state import FULL, SWA
from dsv4_npu.errors import CapacityError, OwnershipError

from .helpers import EMPTY, PAGE, QUICK, extend, make, shelve, used


def test_freed_swa_page_is_not_freed_again(backend: str) -> None:
    alloc = make(backend, swa_pages=2)
    a, b = alloc.open("a"), alloc.open("b")
    first = extend(alloc, a, 256, tail=128)
    swa = int(first.out_swa[-1]) // PAGE
    alloc.free_swa_slots([int(first.out_full[-1])])
    second = extend(alloc, b, 128)
    assert int(second.out_swa[0]) // PAGE == swa
    alloc.close(a)
    assert alloc.state.page_state[SWA][swa] == 1
    assert alloc.slots(b, 0, 128).out_swa[0] == second.out_swa[0]
    alloc.audit()
    alloc.close(b)
    assert used(alloc) == EMPTY


@QUICK
@given(
    old=st.integers(0, 600),
    grow=st.integers(1, 900),
    tail=st.none() | st.integers(0, 1500),
    page=st.sampled_from([128, 256]),
)
def test_swa_tail_maps_the_last_positions(backend: str, old: int, grow: int, tail: int | None, page: int) -> None:
    alloc = make(backend, page_size=page)
    row = alloc.open("r")
    extend(alloc, row, old)
    new = old + grow
    out = extend(alloc, row, new, tail)
    mapped = alloc.state.full_to_swa[alloc.state.block_table[row, : -(-new // page)]] > 0
    for column, has in enumerate(mapped.tolist()):
        held_before = column * page < old
        in_tail = tail is None or column in {p // page for p in range(max(0, new - tail), new)}
        assert has == (held_before or in_tail)
    for position, slot in zip(range(old, new), out.out_swa.tolist(), strict=True):
        assert (slot > 0) == bool(mapped[position // page])
    alloc.audit()
    alloc.close(row)
    assert used(alloc) == EMPTY


def test_swa_tail_worked(backend: str) -> None:
    for tail, want in ((128, [False, True]), (0, [False, False])):
        alloc = make(backend)
        row = alloc.open("r")
        extend(alloc, row, 256, tail)
        pages = alloc.state.block_table[row, :2]
        assert (alloc.state.full_to_swa[pages] > 0).tolist() == want
        free = alloc.state.free(SWA)
        alloc.free_swa_slots([int(page) * PAGE + 5 for page in pages])  # the unmapped one never reaches a free list
        assert alloc.state.free(SWA) == free + sum(want)
        assert 0 not in alloc.state.free_list[SWA][: alloc.state.free(SWA)]


def test_any_slot_frees_its_whole_page(backend: str) -> None:
    alloc = make(backend)
    row = alloc.open("r")
    out = extend(alloc, row, 256)
    free = alloc.state.free(SWA)
    alloc.free_swa_slots([int(out.out_full[130])])
    assert alloc.slots(row, 128, 256).out_swa.tolist() == [0] * 128
    alloc.free_swa_slots([int(out.out_full[131])])
    assert alloc.state.free(SWA) == free + 1
    alloc.free_slots([int(out.out_full[130]), int(out.out_full[131])])
    assert used(alloc) == {"FULL": 1, "SWA": 1, "C128": 1, "ROW": 1}
    with pytest.raises(OwnershipError):
        alloc.free_slots([int(out.out_full[130])])
    with pytest.raises(OwnershipError, match="column 1 is empty"):
        alloc.slots(row, 128, 129)
    alloc.audit()
    alloc.close(row)
    assert used(alloc) == EMPTY
    alloc.audit()


@QUICK
@given(length=st.integers(1, 4096), tail=st.none() | st.integers(0, 300), committed=st.booleans())
def test_abort_of_preallocated_tokens(backend: str, length: int, tail: int | None, committed: bool) -> None:
    alloc = make(backend)
    row = alloc.open("r")
    extend(alloc, row, length, tail, commit=committed)
    swa = {int(one) for one in alloc.state.full_to_swa if one}
    cleanup = alloc.close(row)
    assert cleanup.row == row
    assert set(cleanup.swa_pages.tolist()) == swa == set(alloc.drain_freed_swa().tolist())
    assert used(alloc) == EMPTY
    assert not alloc.state.tables.any()
    alloc.audit()


def test_a_long_prompt_and_many_short_ones(backend: str) -> None:
    pages = 100_000 // PAGE + 64 * 3
    alloc = make(
        backend,
        full_pages=pages,
        swa_pages=pages // 10,
        c128_pages=pages // 16 + 66,
        request_rows=65,
        row_width=100_480,
        verify_width=4,
    )
    waiting = [(0, 100_000), *((i, 200) for i in range(1, 65))]
    target: dict[int, int] = {}
    running: dict[int, int] = {}
    served, peak = 0, 0
    for _ in range(3000):
        if waiting:
            rid, length = waiting[0]
            row = alloc.open(rid)
            target[row] = length
            running[row] = 0
            waiting.pop(0)
        for row in list(running):
            if alloc.committed(row) < target[row]:
                chunk = min(target[row], alloc.committed(row) + 512)
                try:
                    extend(alloc, row, chunk)
                except CapacityError:
                    continue
            else:
                try:
                    alloc.decode_step(np.array([row]), 8, 4)
                except CapacityError:
                    continue
                alloc.commit(row, alloc.committed(row) + 2)
                running[row] += 1
            alloc.evict_window(row)
            assert alloc.state.evict_cursor[row] * PAGE <= max(0, alloc.committed(row) - 128)
            if running[row] == 20:
                alloc.close(row)
                del running[row]
                served += 1
        peak = max(peak, used(alloc)["SWA"])
        if served == 65:
            break
    assert served == 65
    assert peak <= pages // 10
    alloc.audit()
    assert used(alloc) == EMPTY


def test_evicted_page_is_freed_once(backend: str) -> None:
    alloc = make(backend)
    row = alloc.open("r")
    extend(alloc, row, 1000)
    assert alloc.evict_window(row) == 6  # floor_page(1000 - 128) = 768
    assert alloc.evict_window(row) == 0
    freed = alloc.drain_freed_swa()
    assert len(freed) == 6
    assert used(alloc) == {"FULL": 8, "SWA": 2, "C128": 1, "ROW": 1}
    alloc.audit()
    cleanup = alloc.close(row)
    assert len(cleanup.swa_pages) == 2
    assert not set(cleanup.swa_pages.tolist()) & set(freed.tolist())
    assert used(alloc) == EMPTY
    alloc.audit()


@QUICK
@given(committed=st.integers(0, 3000), width=st.integers(1, 400), ahead=st.integers(0, 300))
def test_eviction_by_committed_length(backend: str, committed: int, width: int, ahead: int) -> None:
    alloc = make(backend)
    row = alloc.open("r")
    extend(alloc, row, committed + ahead, commit=False)
    alloc.commit(row, committed)
    last = -(-(committed + ahead) // PAGE)
    want = [c for c in range(last) if (c + 1) * PAGE <= committed - max(128, width)]
    assert alloc.evict_window(row, width) == len(want)
    mapped = alloc.state.full_to_swa[alloc.state.block_table[row, :last]] > 0
    assert np.flatnonzero(~mapped).tolist() == want
    alloc.audit()


def test_prefix_with_an_evicted_window_is_refused(backend: str) -> None:
    alloc = make(backend)
    shelf = shelve(alloc, 2048)
    alloc.free_swa(shelf.full[:10])
    shelf.swa = shelf.full[10:]
    row = alloc.open("r")
    alloc.attach_prefix(row, shelf.full, shelf.c128, 2048)
    alloc.audit()
    alloc.decode_step(np.array([row]), 8, 4)
    alloc.close(row)
    alloc.free_swa(shelf.full[-1:])
    shelf.swa = shelf.full[10:-1]
    row = alloc.open("s")
    with pytest.raises(OwnershipError, match="in the last window has no SWA page"):
        alloc.attach_prefix(row, shelf.full, shelf.c128, 2048)
    assert alloc.committed(row) == 0
    alloc.audit()


def test_rewind_needs_a_resident_window(backend: str) -> None:
    alloc = make(backend)
    row = alloc.open("r")
    extend(alloc, row, 1000)
    alloc.evict_window(row)
    alloc.rewind(row, 900)
    assert alloc.committed(row) == 900
    with pytest.raises(OwnershipError, match="rewind at 800 reads SWA from position 673, resident from 768"):
        alloc.rewind(row, 800)
    alloc.trim(row, 800)
    with pytest.raises(OwnershipError, match="decode at 800 reads SWA"):
        alloc.decode_step(np.array([row]), 8, 4)
    alloc.audit()
    alloc.trim(row, 0)
    extend(alloc, row, 300)
    alloc.decode_step(np.array([row]), 8, 4)
    alloc.audit()


def test_pages_that_rows_read_cannot_be_freed(backend: str) -> None:
    alloc = make(backend)
    shelf = shelve(alloc, 2048)
    row = alloc.open("r")
    alloc.attach_prefix(row, shelf.full, shelf.c128, 2048)
    with pytest.raises(OwnershipError, match="read as a shared prefix by 1 rows"):
        alloc.free_pages(shelf.full)
    with pytest.raises(OwnershipError, match="shared prefix"):
        alloc.trim(row, 100)
    alloc.close(row)
    alloc.free_pages(shelf.full)
    alloc.release_c128(shelf.c128)
    with pytest.raises(OwnershipError, match="is free: it must be held outside"):
        alloc.free_pages(shelf.full[:1])
    assert used(alloc) == EMPTY


def test_page_states_are_named(backend: str) -> None:
    alloc = make(backend)
    row = alloc.open("r")
    extend(alloc, row, 100)
    page = int(alloc.state.block_table[row, 0])
    with pytest.raises(OwnershipError, match=f"FULL page {page} is held: it must be held outside of the rows"):
        alloc.free_pages([page])
    assert alloc.state.page_state[FULL][page] == 1
