"""Inputs that broke such systems, each as its kind: lengths, pages, transactions, C128 pages, window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_npu.alloc import AllocSpec, KVAllocator, OutCacheLoc, require_whole
from dsv4_npu.alloc.state import C128, FULL, SWA
from dsv4_npu.errors import CapacityError, InputError, OwnershipError

PAGE = 128
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make(backend: str, **sizes: Any) -> KVAllocator:
    base = {
        "page_size": PAGE,
        "c128_page_size": 16,
        "full_pages": 64,
        "swa_pages": 64,
        "c128_pages": 32,
        "request_rows": 8,
        "row_width": 4096,
    }
    return KVAllocator(AllocSpec(**{**base, **sizes}), backend=backend)  # type: ignore[arg-type]


def extend(alloc: KVAllocator, row: int, length: int, tail: int | None = None, commit: bool = True) -> OutCacheLoc:
    with alloc.transaction() as tx:
        tx.extend(row, length, tail)
        out = tx.commit()
    if commit:
        alloc.commit(row, length)
    return out


def used(alloc: KVAllocator) -> dict[str, int]:
    return {name: count for name, (count, _, _) in alloc.usage().items()}


EMPTY = {"FULL": 0, "SWA": 0, "C128": 0, "ROW": 0}


class Shelf:
    """A holder of pages that were taken over."""

    def __init__(self) -> None:
        self.full: list[int] = []
        self.swa: list[int] = []
        self.c128: list[int] = []

    def held_pages(self) -> tuple[list[int], list[int], list[int]]:
        return self.full, self.swa, self.c128


def shelve(alloc: KVAllocator, tokens: int, rid: object = "donor") -> Shelf:
    """``tokens`` of history that a holder outside owns."""
    row = alloc.open(rid)
    extend(alloc, row, tokens)
    shelf = Shelf()
    full, c128 = alloc.take_over(row, tokens // alloc.spec.page_size)
    shelf.full, shelf.swa, shelf.c128 = full.tolist(), full.tolist(), c128.tolist()
    alloc.register_holder(f"shelf of {rid}", shelf)
    alloc.close(row)
    alloc.audit()
    return shelf


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
