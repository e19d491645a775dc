"""C128 pages: counts, prefix replacement, release by content, resize, holes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_npu.alloc import KVAllocator, require_whole
from dsv4_npu.alloc.state import C128
from dsv4_npu.errors import InputError, OwnershipError

from .helpers import EMPTY, PAGE, QUICK, extend, make, shelve, used


@pytest.mark.parametrize(
    ("tokens", "entries", "pages", "c4"), [(5000, 39, 3, 1250), (2047, 15, 1, 511), (127, 0, 0, 31)]
)
def test_c128_pages_of_a_length(backend: str, tokens: int, entries: int, pages: int, c4: int) -> None:
    alloc = make(backend, row_width=8192)
    out = extend(alloc, alloc.open("r"), tokens)
    assert (len(out.out_c128), used(alloc)["C128"], len(out.out_c4)) == (entries, pages, c4)


def counts(alloc: KVAllocator, pages: list[int]) -> list[int]:
    return [int(alloc.state.c128_count[page]) for page in pages]


def pages_held(alloc: KVAllocator, count: int, rid: object) -> tuple[int, list[int]]:
    row = alloc.open(rid)
    extend(alloc, row, count * 128 * alloc.spec.c128_page_size)
    return row, alloc.state.c128_table[row, :count].tolist()


@QUICK
@given(data=st.data())
def test_prefix_replacement_retains_before_it_releases(backend: str, data: st.DataObject) -> None:
    alloc = make(backend, c128_page_size=1, c128_pages=20)
    row, mine = pages_held(alloc, 4, "mine")
    other, theirs = pages_held(alloc, 4, "theirs")
    fresh = data.draw(st.lists(st.sampled_from(mine + theirs), min_size=1, max_size=4, unique=True))
    want = {page: int(alloc.state.c128_count[page]) for page in mine + theirs}
    for page in fresh:
        want[page] += 1
    for page in mine[: len(fresh)]:
        want[page] -= 1
    alloc.replace_c128_prefix(row, fresh)
    assert counts(alloc, list(want)) == list(want.values())
    assert alloc.state.c128_table[row, :4].tolist() == fresh + mine[len(fresh) :]
    for page, count in want.items():
        assert (alloc.state.page_state[C128][page] == 0) == (count == 0)
    alloc.close(row)
    alloc.close(other)
    assert used(alloc) == EMPTY


def test_prefix_replacement_worked(backend: str) -> None:
    alloc = make(backend, c128_page_size=1)
    row, (five, seven) = pages_held(alloc, 2, "a")
    _, (eight,) = pages_held(alloc, 1, "b")
    alloc.replace_c128_prefix(row, [seven, eight])
    assert counts(alloc, [five, seven, eight]) == [0, 1, 2]
    assert alloc.state.page_state[C128][five] == 0


def test_multiset_rules(backend: str) -> None:
    alloc = make(backend, c128_page_size=1)
    row, (one, two, three) = pages_held(alloc, 3, "a")
    before = counts(alloc, [one, two, three])
    alloc.retain_c128([three, three])
    assert counts(alloc, [three]) == [3]
    alloc.release_c128([three, three])
    assert counts(alloc, [one, two, three]) == before
    alloc.retain_c128([two])
    alloc.replace_c128_prefix(row, [one, one])
    assert counts(alloc, [one, two]) == [2, 1]
    alloc.release_c128([two])
    with pytest.raises(OwnershipError, match=f"C128 page {two} has count 0 and is free"):
        alloc.release_c128([two])
    with pytest.raises(OwnershipError, match=f"C128 page {two} has count 0"):
        alloc.retain_c128([one, two])
    with pytest.raises(OwnershipError, match="released more often"):
        alloc.release_c128([three, three])
    assert counts(alloc, [one, two, three]) == [2, 0, 1]
    for page in (0, -1, alloc.state.total(C128) + 1):
        for call in (alloc.retain_c128, alloc.release_c128):
            with pytest.raises(InputError, match=rf"C128 page {page}: 1 to {alloc.state.total(C128)} is allowed"):
                call([page])


def test_two_holders_released_in_one_call(backend: str) -> None:
    alloc = make(backend, c128_page_size=1)
    row, (page,) = pages_held(alloc, 1, "a")
    alloc.retain_c128([page, page])
    alloc.close(row)
    assert counts(alloc, [page]) == [2]
    alloc.release_c128([page, page])
    assert used(alloc)["C128"] == 0


@QUICK
@given(length=st.integers(1, 4096), lie=st.integers(0, 4096))
def test_close_goes_by_content(backend: str, length: int, lie: int) -> None:
    alloc = make(backend)
    row = alloc.open("r")
    extend(alloc, row, length)
    alloc.state.committed[row] = alloc.state.allocated[row] = lie
    alloc.state.held_cols[row] = alloc.state.c128_cols[row] = 0
    alloc.close(row)
    assert used(alloc) == EMPTY
    alloc.audit()


def test_resize(backend: str) -> None:
    alloc = make(backend, c128_page_size=16, c128_pages=2, row_width=64 * 128 * 4)
    row, first = pages_held(alloc, 2, "a")
    alloc.resize_c128(8)
    assert alloc.state.total(C128) == 8
    extend(alloc, alloc.open("b"), 100)
    alloc.close(row)
    other, pages = pages_held(alloc, 3, "c")
    extra = [page for page in range(1, 9) if page not in pages]
    assert set(first) < set(pages)
    assert set(pages) | set(extra) == set(range(1, 9))
    alloc.retain_c128([max(pages)])
    alloc.release_c128([max(pages)])
    with pytest.raises(OwnershipError, match="in use"):
        alloc.resize_c128(1)
    alloc.close(other)
    alloc.resize_c128(1)
    assert alloc.state.total(C128) == 1
    alloc.audit()


def test_the_page_behind_the_old_end_works_after_a_resize(backend: str) -> None:
    alloc = make(backend, c128_page_size=16, c128_pages=2, full_pages=200, swa_pages=200, row_width=32768)
    alloc.resize_c128(8)
    row, pages = pages_held(alloc, 8, "a")
    assert sorted(pages) == list(range(1, 9))
    alloc.retain_c128([8])
    alloc.release_c128([8])
    alloc.close(row)
    assert used(alloc) == EMPTY


def test_compressed_prefix_over_an_empty_column(backend: str) -> None:
    alloc = make(backend)
    row = alloc.open("r")
    extend(alloc, row, 17 * 128)
    assert len(alloc.slots(row, 0, 17 * 128).out_c128) == 17
    alloc.trim(row, 16 * 128 + 127)
    with pytest.raises(OwnershipError, match="C128 column 1 is empty"):
        alloc.slots(row, 0, 17 * 128)
    with pytest.raises(OwnershipError, match="C128 column 1 is empty"):
        alloc.window(np.array([row]), np.array([16 * 128]), 128)


def test_partial_groups_are_not_shared(backend: str) -> None:
    alloc = make(backend, row_width=8192)
    shelf = shelve(alloc, 2048)
    assert len(shelf.c128) == 1
    short = shelve(alloc, 15 * 128, "short")
    assert short.c128 == []
    row = alloc.open("r")
    with pytest.raises(InputError, match="whole C128 pages of 2048 tokens"):
        alloc.attach_prefix(row, short.full, [], 15 * 128)
    with pytest.raises(InputError):
        alloc.attach_prefix(row, shelf.full, shelf.c128, 2047)
    with pytest.raises(InputError, match="16 and 1 are needed"):
        alloc.attach_prefix(row, shelf.full, [], 2048)
    alloc.attach_prefix(row, shelf.full, shelf.c128, 2048)
    assert (alloc.committed(row), alloc.allocated(row), alloc.shared(row)) == (2048, 2048, 2048)
    alloc.audit()
    alloc.close(row)
    alloc.audit()


def test_holes_never_leave_the_process(backend: str) -> None:
    with pytest.raises(OwnershipError, match=r"C128 page list: entry 1 of 3 is 0, a hole"):
        require_whole("C128", [5, 0, 7])
    require_whole("C128", [5, 6, 7])
    alloc = make(backend)
    row = alloc.open("r")
    extend(alloc, row, 1000)
    pages = alloc.row_pages(row, 1000)
    assert (len(pages.full), pages.swa_column, len(pages.swa), len(pages.c128)) == (8, 6, 2, 1)
    alloc.evict_window(row)
    assert alloc.row_pages(row, 1000).swa.tolist() == pages.swa.tolist()
    with pytest.raises(OwnershipError, match="SWA page list"):
        alloc.row_pages(row, 500)
    alloc.free_slots([int(pages.full[3]) * PAGE])
    with pytest.raises(OwnershipError, match="FULL page list: entry 3 of 8"):
        alloc.row_pages(row, 1000)
