"""Lengths and rows: decode reserve, tail reclaim, release, admission."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.errors import CapacityError, InputError, OwnershipError

from .helpers import EMPTY, PAGE, QUICK, extend, make, used


@pytest.mark.parametrize(
    ("committed", "allocated", "reserve", "want", "need"), [(130, 256, 8, 256, 0), (250, 256, 8, 384, 1)]
)
def test_decode_length_worked(backend: str, committed: int, allocated: int, reserve: int, want: int, need: int) -> None:
    alloc = make(backend)
    row = alloc.open("r")
    extend(alloc, row, allocated, commit=False)
    alloc.commit(row, committed)
    with alloc.transaction() as tx:
        tx.reserve_decode(row, reserve)
        assert tx.need.full == need
    alloc.decode_step(np.array([row]), reserve, 1)
    assert alloc.allocated(row) == want
    assert used(alloc)["FULL"] == want // PAGE


@QUICK
@given(
    lengths=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 300)), min_size=1, max_size=4),
    reserve=st.integers(1, 40),
    page=st.sampled_from([128, 256]),
)
def test_decode_length_of_any_batch(backend: str, lengths: list[tuple[int, int]], reserve: int, page: int) -> None:
    alloc = make(backend, page_size=page)
    rows = [alloc.open(i) for i in range(len(lengths))]
    for row, (committed, ahead) in zip(rows, lengths, strict=True):
        extend(alloc, row, committed + ahead, commit=False)
        alloc.commit(row, committed)
    before = used(alloc)
    out = alloc.decode_step(np.array(rows), reserve, reserve)
    pages = entries = 0
    for row, (committed, ahead) in zip(rows, lengths, strict=True):
        covered = page * len(range(0, committed + reserve, page))
        want = max(committed + ahead, covered)
        assert alloc.allocated(row) == want
        pages += len(range(0, want, page))
        entries += len(range(0, want // 128, 16))
    assert used(alloc) == {**before, "FULL": pages, "SWA": pages, "C128": entries}
    at = 0
    for row, (committed, _) in zip(rows, lengths, strict=True):
        for position in range(committed, committed + reserve):
            slot = int(out.out_full[at])
            assert slot == alloc.state.block_table[row, position // page] * page + position % page
            at += 1
    assert at == len(out.out_full)
    alloc.audit()


def test_a_batch_may_name_rows_twice_and_the_padding_row(backend: str) -> None:
    alloc = make(backend)
    row = alloc.open("r")
    extend(alloc, row, 127)
    out = alloc.decode_step([row, 0, row], 8, 2)
    assert out.out_full[:2].tolist() == out.out_full[4:].tolist()
    assert out.out_full[2:4].tolist() == out.out_swa[2:4].tolist() == [0, 0]
    assert used(alloc)["FULL"] == 2
    alloc.audit()


def test_batches_of_unequal_length_are_refused(backend: str) -> None:
    alloc = make(backend)
    row = alloc.open("r")
    with pytest.raises(InputError, match="2 rows and 1 lengths"):
        alloc.commit_batch([row, 0], [1])
    with pytest.raises(InputError, match="1 rows and 0 lengths"):
        alloc.window([row], [], 4)
    with pytest.raises(InputError, match="one dimension"):
        alloc.decode_step(np.array([[row]]), 8, 2)
    with alloc.transaction() as tx, pytest.raises(InputError, match="one length"):
        tx.extend_batch(np.array([row]), np.array([1, 2]))


def test_a_thousand_rejected_rounds(backend: str) -> None:
    alloc = make(backend, swa_pages=6)
    row = alloc.open("r")
    extend(alloc, row, 100)
    rows = np.array([row, 0])
    for _ in range(1000):
        alloc.decode_step(rows, 8, 4)
        alloc.commit(row, alloc.committed(row) + 1)
        alloc.evict_window(row, 4)
    alloc.audit()
    assert alloc.committed(row) == 1100
    assert used(alloc)["FULL"] == -(-(1100 + 7) // PAGE)
    assert used(alloc)["SWA"] <= 3
    alloc.close(row)
    assert used(alloc) == EMPTY
    assert not alloc.state.tables.any()


def test_second_release_is_refused(backend: str) -> None:
    alloc = make(backend)
    row = alloc.open("r")
    extend(alloc, row, 300)
    alloc.close(row)
    with pytest.raises(OwnershipError, match=f"row {row} is not open"):
        alloc.close(row)
    again = alloc.open("s")
    assert again == row
    with pytest.raises(OwnershipError, match="belongs to request 's'"):
        alloc.close(row, "r")
    alloc.close(row, "s")
    assert used(alloc) == EMPTY
    alloc.audit()


@QUICK
@given(allocated=st.integers(1, 4000), cut=st.integers(0, 4000), page=st.sampled_from([128, 256]))
def test_tail_reclaim_starts_at_a_page(backend: str, allocated: int, cut: int, page: int) -> None:
    boundary = min(cut, allocated)
    alloc = make(backend, page_size=page)
    row = alloc.open("r")
    extend(alloc, row, allocated)
    kept = [int(p) for p in alloc.state.block_table[row, : -(-boundary // page)]]
    alloc.trim(row, boundary)
    live = {alloc.slots(row, p, p + 1).out_full[0] // page for p in range(0, boundary, 40)}
    assert live <= set(kept)
    assert used(alloc)["FULL"] == len(kept)
    assert used(alloc)["C128"] == -(-(boundary // 128) // 16)
    assert alloc.committed(row) == boundary
    assert alloc.allocated(row) == min(allocated, len(kept) * page)
    alloc.audit()
    if boundary + 8 <= 4096 - page:
        alloc.decode_step(np.array([row]), 8, 8)
        alloc.audit()
    alloc.close(row)
    assert used(alloc) == EMPTY


def test_tail_reclaim_worked(backend: str) -> None:
    alloc = make(backend, row_width=8192)
    row = alloc.open("r")
    extend(alloc, row, 4352, commit=False)
    alloc.commit(row, 4099)
    alloc.trim(row, 4099)
    assert alloc.allocated(row) == 4224
    alloc.audit()


def test_narrow_row_is_refused(backend: str) -> None:
    alloc = make(backend, row_width=200)
    with pytest.raises(CapacityError, match="needs a row of 256 tokens: row_width = 200"):
        alloc.admit_check(201)
    row = alloc.open("r")
    with pytest.raises(CapacityError, match="256 tokens, the row holds 200"), alloc.transaction() as tx:
        tx.extend(row, 256)
    extend(alloc, row, 120)
    with pytest.raises(CapacityError, match="the row holds 200"):
        alloc.decode_step(np.array([row]), 20, 4)
    assert alloc.allocated(row) == 120
    alloc.audit()


def test_row_width_and_sidecar_follow_from_context() -> None:
    spec = AllocSpec(PAGE, 16, 64, 64, 8, 4, 2176)
    assert (spec.columns, spec.sidecar_columns) == (17, 2)
    KVAllocator(spec, backend="python").admit_check(2048 + 8)


@QUICK
@given(tokens=st.integers(1, 20_000))
def test_admission_agrees_with_an_empty_pool(backend: str, tokens: int) -> None:
    alloc = make(backend, full_pages=48, swa_pages=200, c128_pages=2, row_width=8192)
    row = alloc.open("r")
    try:
        extend(alloc, row, -(-tokens // PAGE) * PAGE)
        served = True
    except CapacityError:
        served = False
    try:
        alloc.admit_check(-(-tokens // PAGE) * PAGE)
        admitted = True
    except CapacityError:
        admitted = False
    assert served == admitted
