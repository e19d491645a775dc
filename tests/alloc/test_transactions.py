"""Transactions: all families or none, rollback, room in partly filled pages, slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_npu.errors import CapacityError, InputError, OwnershipError

from .helpers import QUICK, extend, make, used


@pytest.mark.parametrize("short", ["FULL", "SWA", "C128"])
def test_a_family_that_runs_dry_leaves_the_others(backend: str, short: str) -> None:
    sizes = {"full_pages": 40, "swa_pages": 40, "c128_pages": 40, short.lower() + "_pages": 3}
    alloc = make(backend, c128_page_size=1, **sizes)
    rows = [alloc.open(i) for i in range(2)]
    for row in rows:
        extend(alloc, row, 128)
    before = {name: array.copy() for name, array in alloc.state.arrays().items()}
    alloc.commit_batch(np.array(rows), np.array([128, 128]))
    with pytest.raises(CapacityError, match=rf"{short} pages: need 2, free 1 of 3"):
        alloc.decode_step(np.array(rows), 128, 4)
    tx = alloc.transaction()
    for row in rows:
        tx.extend(row, 256)
    assert not tx.fits()
    with pytest.raises(CapacityError, match=rf"{short} pages: need 2, free 1 of 3"):
        tx.reserve()
    tx.rollback()
    for name, array in alloc.state.arrays().items():
        assert name == "counters" or np.array_equal(array, before[name]), name
    alloc.audit()


@QUICK
@given(data=st.data())
def test_rollback_restores_every_family(backend: str, data: st.DataObject) -> None:
    alloc = make(backend, c128_page_size=1, c128_pages=60)
    rows = [alloc.open(i) for i in range(3)]
    for row in rows:
        extend(alloc, row, data.draw(st.integers(0, 400)))
    before = {name: array.copy() for name, array in alloc.state.arrays().items()}
    with alloc.transaction() as tx:
        for row in rows:
            tx.extend(
                row, alloc.allocated(row) + data.draw(st.integers(0, 500)), data.draw(st.sampled_from([None, 0, 128]))
            )
        tx.reserve()
        assert used(alloc)["FULL"] == (before["page_state/FULL"] == 1).sum() + tx.need.full
        alloc.audit()
    for name, array in alloc.state.arrays().items():
        assert name == "counters" or np.array_equal(array, before[name]), name
    alloc.audit()


def test_transaction_rules(backend: str) -> None:
    alloc = make(backend)
    row, other = alloc.open("r"), alloc.open("s")
    tx = alloc.transaction()
    tx.extend(row, 100)
    with pytest.raises(InputError, match="plans a row once"):
        tx.extend(row, 200)
    with pytest.raises(InputError, match="swa_tail = -1"):
        tx.extend(other, 200, -1)
    tx.reserve()
    with pytest.raises(InputError, match="reserved"):
        tx.extend(other, 100)
    with pytest.raises(InputError, match="reserved"):
        tx.reserve()
    extend(alloc, row, 50)
    with pytest.raises(OwnershipError, match="allocated changed from 0 to 50"):
        tx.commit()
    tx.rollback()
    with pytest.raises(InputError, match="over"):
        tx.commit()
    alloc.audit()
    assert used(alloc) == {"FULL": 1, "SWA": 1, "C128": 0, "ROW": 2}


def test_two_transactions_at_once(backend: str) -> None:
    alloc = make(backend)
    rows = [alloc.open(i) for i in range(2)]
    first, second = alloc.transaction(), alloc.transaction()
    first.extend(rows[0], 300)
    second.extend(rows[1], 300)
    first.reserve()
    second.reserve()
    alloc.audit()
    first.rollback()
    second.commit()
    alloc.audit()
    assert used(alloc)["FULL"] == 3


def test_room_in_partial_pages_counts(backend: str) -> None:
    alloc = make(backend, full_pages=16, swa_pages=16, c128_pages=1)
    row = alloc.open("r")
    extend(alloc, row, 128)
    with alloc.transaction() as tx:  # 1920 tokens more fit into the one C128 page that is held
        tx.extend(row, 2048)
        assert tx.need.c128 == 0
        assert tx.fits()
        tx.commit()
    with alloc.transaction() as tx:
        tx.extend(row, 2048 + 128)
        assert not tx.fits()


@QUICK
@given(total=st.integers(0, 4096), start=st.integers(0, 4096), page=st.sampled_from([128, 256]))
def test_slots_by_brute_force(backend: str, total: int, start: int, page: int) -> None:
    alloc = make(backend, page_size=page, c128_page_size=2, c128_pages=40)
    other, row = alloc.open("other"), alloc.open("r")
    extend(alloc, other, 700)
    extend(alloc, row, total)
    start = min(start, total)
    out = alloc.slots(row, start, total)
    full = [int(alloc.state.block_table[row, p // page]) * page + p % page for p in range(start, total)]
    swa = [int(alloc.state.full_to_swa[slot // page]) * page + slot % page for slot in full]
    side = alloc.state.c128_table[row]
    c128 = [int(side[p // 128 // 2]) * 2 + p // 128 % 2 for p in range(start, total) if p % 128 == 127]
    assert out.out_full.tolist() == full
    assert out.out_swa.tolist() == swa
    assert out.out_c4.tolist() == [slot // 4 for slot in full if slot % 4 == 3]
    assert out.out_c128.tolist() == c128
