"""The audit finds every kind of corruption, names what it found, and answers the three questions."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.alloc.audit import find_violations
from dsv4_npu.alloc.state import C128, FULL, HELD, N_FREE, OUTSIDE, ROW, SWA, LedgerState
from dsv4_npu.errors import AuditError

from .helpers import PAGE, Shelf


def scene(backend: str = "python", owner: str = "swa_page") -> tuple[KVAllocator, Shelf]:
    """Row 1 is closed, its 2 pages on the shelf; row 2 reads them and has 3 of its own; row 3 evicted its window."""
    spec = AllocSpec(PAGE, 1, 20, 20, 20, 4, 2048, c4_state_owner=owner)  # type: ignore[arg-type]
    alloc = KVAllocator(spec, backend=backend)  # type: ignore[arg-type]
    shelf = Shelf()
    alloc.register_holder("shelf", shelf)
    rows = [alloc.open(name) for name in ("donor", "reader", "long")]
    for row, length in zip(rows, (256, 600, 700), strict=True):
        if row == rows[1]:
            alloc.close(rows[0])
            alloc.attach_prefix(row, shelf.full, shelf.c128, 256)
        with alloc.transaction() as tx:
            tx.extend(row, length)
            tx.commit()
        alloc.commit(row, length)
        if row == rows[0]:
            full, c128 = alloc.take_over(row, 2)
            shelf.full, shelf.swa, shelf.c128 = full.tolist(), full.tolist(), c128.tolist()
    alloc.evict_window(rows[2])
    alloc.flush()
    alloc.audit()
    return alloc, shelf


def own(state: LedgerState, row: int) -> np.ndarray:
    return state.block_table[row, state.shared_cols[row] : state.held_cols[row]]


Corrupt = Callable[[KVAllocator, Shelf], None]


def corruption(state_change: Callable[[LedgerState], None]) -> Corrupt:
    return lambda alloc, shelf: state_change(alloc.state)


def leak_full(state: LedgerState) -> None:
    state.block_table[2, 4] = 0


def double_free_full(state: LedgerState) -> None:
    state.free_list[FULL][state.counters[N_FREE]] = own(state, 2)[0]
    state.counters[N_FREE] += 1


def two_owners(state: LedgerState) -> None:
    state.block_table[3, 0] = own(state, 2)[0]


def foreign_shared(state: LedgerState) -> None:
    state.page_state[FULL][state.block_table[2, 0]] = HELD
    state.full_owner[state.block_table[2, 0]] = 3


def wrong_count(state: LedgerState) -> None:
    state.c128_count[state.c128_table[2, 0]] -= 1


def counted_but_free(state: LedgerState) -> None:
    state.page_state[C128][state.c128_table[3, 0]] = 0


def hole(state: LedgerState) -> None:
    state.c128_table[3, 1] = 0


def mapping_left(state: LedgerState) -> None:
    state.full_to_swa[own(state, 3)[0]] = state.full_to_swa[own(state, 3)[-1]]


def mapping_lost(state: LedgerState) -> None:
    state.full_to_swa[own(state, 2)[1]] = 0


def window_lost(state: LedgerState) -> None:
    state.swa_start[2] = 4


def cursor_behind(state: LedgerState) -> None:
    state.evict_cursor[2] = 4


def committed_beyond(state: LedgerState) -> None:
    state.committed[2] = state.allocated[2] + 1


def length_without_pages(state: LedgerState) -> None:
    state.allocated[3] += PAGE


def entries_without_page(state: LedgerState) -> None:
    state.c128_cols[3] -= 1


def row_in_two_states(state: LedgerState) -> None:
    state.page_state[ROW][2] = 0


def closed_row_with_content(state: LedgerState) -> None:
    state.block_table[4, 0] = 1


def closed_row_with_length(state: LedgerState) -> None:
    state.committed[4] = 5


def dummy_owned(state: LedgerState) -> None:
    state.page_state[FULL][0] = HELD


def reader_missing(state: LedgerState) -> None:
    state.full_readers[state.block_table[2, 0]] = 0


def lost_page(state: LedgerState) -> None:
    state.counters[N_FREE + SWA] -= 1


def outside_unclaimed(state: LedgerState) -> None:
    page = state.free_list[FULL][state.counters[N_FREE] - 1]
    state.counters[N_FREE] -= 1
    state.page_state[FULL][page] = OUTSIDE


def mirror_stale(alloc: KVAllocator, shelf: Shelf) -> None:
    alloc.mirrors.block_table[2, 3] = 19


def claim_twice(alloc: KVAllocator, shelf: Shelf) -> None:
    shelf.full.append(shelf.full[0])


def claim_foreign(alloc: KVAllocator, shelf: Shelf) -> None:
    shelf.full.append(int(own(alloc.state, 2)[0]))


def claim_dropped(alloc: KVAllocator, shelf: Shelf) -> None:
    shelf.full.pop()


def claim_swa_dropped(alloc: KVAllocator, shelf: Shelf) -> None:
    shelf.swa.pop()


def claim_c128_dropped(alloc: KVAllocator, shelf: Shelf) -> None:
    shelf.c128.pop()


CORRUPTIONS: list[tuple[Corrupt, str]] = [
    (corruption(leak_full), "held by a row that does not name it"),
    (corruption(double_free_full), "listed as free, but it is not"),
    (corruption(two_owners), "named by a row that does not own it"),
    (corruption(foreign_shared), "read as shared prefix, but nobody outside holds it"),
    (corruption(wrong_count), "the reference count is not row entries plus holder entries"),
    (corruption(counted_but_free), "count and state disagree"),
    (corruption(hole), "the sidecar has a hole"),
    (corruption(mapping_left), "mapped by a FULL page that does not hold it"),
    (corruption(mapping_lost), "in the resident window, but without an SWA page"),
    (corruption(window_lost), "SWA pages of the live window were freed"),
    (corruption(cursor_behind), "before the eviction cursor, but it still has its SWA page"),
    (corruption(committed_beyond), "0 <= committed <= allocated <= row width does not hold"),
    (corruption(length_without_pages), r"pages held are not ceil_page\(allocated\)"),
    (corruption(entries_without_page), "committed C128 entries have no page"),
    (corruption(row_in_two_states), "open without a request, or named but not open"),
    (corruption(closed_row_with_content), "not open, but its FULL columns are not zero"),
    (corruption(closed_row_with_length), "not open, but its lengths are not zero"),
    (corruption(dummy_owned), "the dummy has an owner"),
    (corruption(reader_missing), "the number of reading rows is wrong"),
    (corruption(lost_page), "pages of the family are free"),
    (corruption(outside_unclaimed), "held outside, but no holder names it"),
    (mirror_stale, "the mirror differs from the host table"),
    (claim_twice, "named twice by holders"),
    (claim_foreign, "named by a holder that does not own it"),
    (claim_dropped, "held outside, but no holder names it"),
    (claim_swa_dropped, "its holder and the mapping disagree about its SWA page"),
    (claim_c128_dropped, "the reference count is not row entries plus holder entries"),
]


def test_a_lost_window_is_about_swa_pages() -> None:
    alloc, shelf = scene()
    corruption(window_lost)(alloc, shelf)
    (found,) = (one for one in find_violations(alloc) if "live window" in one.what and one.row)
    assert (found.family, found.page) == ("SWA", 0)
    assert str(found).startswith(f"SWA pages of request row {found.row}, step ")
    assert found.kind == "KV page, and the C4 compressor state in its bank"
    assert "SWA page" in found.owner


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTIONS, ids=[message for _, message in CORRUPTIONS])
def test_corruption_is_reported(corrupt: Corrupt, message: str) -> None:
    alloc, shelf = scene()
    corrupt(alloc, shelf)
    found = "\n".join(str(one) for one in find_violations(alloc))
    assert re.search(message, found), found
    with pytest.raises(AuditError):
        alloc.audit()


def test_message_names_everything(backend: str) -> None:
    alloc, _ = scene(backend)
    page = int(own(alloc.state, 2)[0])
    alloc.state.c128_count[alloc.state.c128_table[3, 0]] += 1
    double_free_full(alloc.state)
    with pytest.raises(AuditError) as caught:
        alloc.audit()
    text = str(caught.value)
    for part in (
        "C128 page",
        f"FULL page {page}",
        "row 2 (request 'reader') column 2",
        "row 3 (request 'long') column 0",
        f"step {alloc.state.counters[17]}",
        "KV page or compressor state: KV page",
        "Owned by: the request in row 2",
        "Cleanup: returning a page",
        "Cleanup: preventing a stale read",
    ):
        assert part in text, (part, text)


@pytest.mark.parametrize(
    ("owner", "answer"), [("swa_page", "and the C4 compressor state in its bank"), ("request", "KV page.")]
)
def test_c4_state_owner_is_named(owner: str, answer: str) -> None:
    alloc, _ = scene(owner=owner)
    mapping_left(alloc.state)
    found = [one for one in find_violations(alloc) if one.family == "SWA"]
    assert found
    assert all(answer in f"{one.kind}." for one in found)


def test_taken_pages_are_accounted(backend: str) -> None:
    alloc, _ = scene(backend)
    row = alloc.row_of("reader")
    with alloc.transaction() as tx:
        tx.extend(row, 900)
        tx.reserve()
        alloc.audit()
        alloc.transactions.clear()
        with pytest.raises(AuditError, match="taken by a transaction"):
            alloc.audit()
    alloc.audit()


def test_shallow_audit_sees_owners_and_counts(backend: str) -> None:
    alloc, _ = scene(backend)
    alloc.audit(deep=False)
    two_owners(alloc.state)
    with pytest.raises(AuditError):
        alloc.audit(deep=False)


def test_quarantined_pages_are_accounted(backend: str) -> None:
    alloc, _ = scene(backend)
    epoch = alloc.launch()
    alloc.close(alloc.row_of("long"))
    alloc.audit()
    alloc.done(epoch)
    alloc.audit()
    alloc.launch()
    alloc.close(alloc.row_of("reader"))
    alloc.epochs.done(2)  # the ledger was not told
    with pytest.raises(AuditError, match="still waits for an epoch that is done"):
        alloc.audit()
