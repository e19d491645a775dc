"""Pages by slot and the sidecar rows against a model of sets and counters, on both ledgers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsv4_npu.alloc.ledger import compiled_ledger_available
from dsv4_npu.alloc.sidecar_rows import SidecarRows
from dsv4_npu.alloc.slot_pages import SHOWN, SlotPages
from dsv4_npu.alloc.state import C128, FULL, SWA
from dsv4_npu.errors import CapacityError, InputError, OwnershipError

BACKENDS = ["python", *(["cpp"] if compiled_ledger_available() else [])]
SIZES = {"full_pages": 9, "swa_pages": 7, "c128_pages": 6}


def ids(*pages: int) -> Any:
    return np.array(pages, np.int32)


class Machine(RuleBasedStateMachine):
    """The model: FULL pages out and the SWA page of each, loose SWA pages, C128 counts, rows of the sidecar."""

    backend = "python"

    def __init__(self) -> None:
        super().__init__()
        self.pages = SlotPages(128, 16, **SIZES, backend=self.backend)
        self.rows = SidecarRows(4, 5, 16)
        self.full: dict[int, int] = {}
        self.loose: set[int] = set()
        self.taken: list[int] = []
        self.tree: Counter[int] = Counter()
        self.table = np.zeros((4, 5), int)

    @rule(full=st.integers(0, 4), swa=st.integers(0, 4), c128=st.integers(0, 3))
    def take(self, full: int, swa: int, c128: int) -> None:
        room = 9 - len(self.full), 7 - self.swa_out(), 6 - len(self.counts()) - len(self.taken)
        if any(a > b for a, b in zip((full, swa, c128), room, strict=True)):
            with pytest.raises(CapacityError):
                self.pages.take(full, swa, c128)
            return
        a, b, c = (array.tolist() for array in self.pages.take(full, swa, c128))
        assert not set(a) & set(self.full)
        assert not set(c) & (set(self.counts()) | set(self.taken))
        mapped = min(full, swa)
        self.full |= dict.fromkeys(a, 0) | dict(zip(a[full - mapped :], b[:mapped], strict=True))
        self.loose |= set(b[mapped:])
        self.taken += c

    @precondition(lambda self: self.full)
    @rule(data=st.data(), peers=st.booleans())
    def free(self, data: st.DataObject, peers: bool) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.full)), min_size=1, max_size=4, unique=True))
        if peers:
            assert self.pages.free_peers(ids(*some)) == sum(self.full[page] > 0 for page in some)
            self.full |= dict.fromkeys(some, 0)
        else:
            self.pages.free_both(ids(*some))
            for page in some:
                del self.full[page]

    @precondition(lambda self: self.full)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.full)))
        peer = self.full[page]
        self.pages.detach(ids(page))
        self.full[page] = 0
        if peer:
            self.loose.add(peer)
        target = data.draw(st.sampled_from(sorted(self.full)))
        if self.loose:
            loose = data.draw(st.sampled_from(sorted(self.loose)))
            if self.full[target]:
                with pytest.raises(OwnershipError, match="already"):
                    self.pages.attach(ids(target), ids(loose))
            else:
                self.pages.attach(ids(target), ids(loose))
                self.full[target] = loose
                self.loose.discard(loose)

    @precondition(lambda self: self.loose)
    @rule()
    def free_loose(self) -> None:
        self.pages.free_swa_ids(ids(*self.loose))
        self.loose = set()

    @precondition(lambda self: self.taken)
    @rule(row=st.integers(1, 3), column=st.integers(0, 4), back=st.booleans())
    def end_taking(self, row: int, column: int, back: bool) -> None:
        page = self.taken.pop()
        if back:
            self.pages.give_back_c128(ids(page))
            return
        one = np.array([column * 16])
        changed = self.rows.write(self.pages, np.array([row]), one, one + 1, ids(page))
        assert (changed.rows.tolist(), changed.columns.tolist(), changed.pages.tolist()) == ([row], [column], [page])
        self.table[row, column] = page

    @precondition(lambda self: self.counts())
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.counts())), max_size=4))
        self.pages.retain_c128(ids(*some))
        self.tree.update(some)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = sorted(self.tree.elements())
        some = data.draw(st.lists(st.sampled_from(held), max_size=4)) if held else []
        if Counter(some) - self.tree or any(n > self.counts()[p] for p, n in Counter(some).items()):
            return
        self.pages.release_c128(ids(*some))
        self.tree -= Counter(some)

    @precondition(lambda self: self.counts())
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        some = st.lists(st.sampled_from(sorted(self.counts())), max_size=3)
        wanted = data.draw(st.dictionaries(st.integers(1, 3), some, max_size=3))
        if len(wanted) == 1:
            ((row, pages),) = wanted.items()
            self.rows.replace(self.pages, row, ids(*pages))
        else:
            lengths = np.array([len(pages) for pages in wanted.values()], np.int64)
            given = ids(*(page for pages in wanted.values() for page in pages))
            self.rows.replace_batch(self.pages, np.array(list(wanted), np.int64), lengths, given)
        for row, pages in wanted.items():
            self.table[row, : len(pages)] = pages

    @rule(row=st.integers(1, 3))
    def clear(self, row: int) -> None:
        self.rows.clear(self.pages, row)
        self.table[row] = 0

    def counts(self) -> Counter[int]:
        return Counter(self.table[self.table > 0].tolist()) + self.tree

    def swa_out(self) -> int:
        return sum(peer > 0 for peer in self.full.values()) + len(self.loose)

    @invariant()
    def agree(self) -> None:
        state = self.pages.state
        assert state.free(FULL) == 9 - len(self.full)
        assert state.free(SWA) == 7 - self.swa_out()
        assert state.free(C128) == 6 - len(self.counts()) - len(self.taken)
        assert {p: int(state.full_to_swa[p]) for p in self.full} == self.full
        assert {p: int(n) for p, n in enumerate(state.c128_count) if n} == dict(self.counts())
        assert (self.rows.table == self.table).all()
        filled = np.count_nonzero(self.table, axis=1) * 16
        assert self.rows.tail_entries == int((filled - self.rows.entries).sum())
        found = self.pages.census(np.concatenate([self.rows.held(), np.array(list(self.tree.elements()), np.int64)]))
        expected = min(len(self.loose), SHOWN) + min(len(self.taken), SHOWN)
        assert len(found) == expected, found


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_calls_follow_the_model(backend: str) -> None:
    machine = type("Machine", (Machine,), {"backend": backend}).TestCase
    machine.settings = settings(
        max_examples=15, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    machine().runTest()


@pytest.fixture
def pages() -> SlotPages:
    return SlotPages(128, 16, **SIZES)


def test_replacing_counts_the_new_before_it_drops_the_old(pages: SlotPages) -> None:
    """Case 19: row [a, b] of one holder each, new prefix [b, c]: b never passes through 0."""
    _, _, (a, b, c) = pages.take(0, 0, 3)
    rows = SidecarRows(3, 4, 16)
    rows.write(pages, np.array([1]), np.array([0]), np.array([32]), ids(a, b))
    pages.retain_c128(ids(c))
    rows.replace(pages, 1, ids(b, c))
    assert pages.state.c128_count[[a, b, c]].tolist() == [0, 1, 2]
    assert pages.state.free(C128) == 4


@pytest.mark.parametrize(
    ("call", "pages_of", "error"),
    [
        ("free_both", [1, 1], OwnershipError),
        ("free_both", [1, 9], OwnershipError),
        ("free_both", [0], InputError),
        ("free_full", [10], InputError),
        ("retain_c128", [0], InputError),
        ("retain_c128", [5], OwnershipError),
        ("release_c128", [1, 1], OwnershipError),
        ("release_c128", [5], OwnershipError),
        ("give_back_c128", [1], OwnershipError),
        ("free_swa_ids", [6], OwnershipError),
    ],
)
def test_a_wrong_call_changes_nothing(pages: SlotPages, call: str, pages_of: list[int], error: type) -> None:
    pages.take(3, 3, 1)
    pages.retain_c128(ids(1))
    before = {name: np.array(value) for name, value in pages.state.arrays().items()}
    with pytest.raises(error):
        getattr(pages, call)(ids(*pages_of))
    after = pages.state.arrays()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_the_census_names_what_is_wrong(pages: SlotPages) -> None:
    pages.take(2, 2, 0)
    state = pages.state
    state.page_state[FULL][1] = 0
    state.swa_full[2] = 0
    found = pages.census(np.zeros(0, np.int64))
    assert "FULL page 1: lost" in found
    assert "FULL page 1: freed, but its SWA page was not" in found
    assert "SWA page 2: held by no FULL page" in found


def test_a_page_that_was_freed_without_its_swa_page_is_not_given_out(pages: SlotPages) -> None:
    pages.take(1, 1, 0)
    pages.free_full(ids(1))
    with pytest.raises(OwnershipError, match="FULL page 1 was freed without its SWA page 1"):
        pages.take(1, 1, 0)
    assert pages.state.free(FULL) == 9


def test_resize_begins_anew(pages: SlotPages) -> None:
    pages.take(3, 3, 2)
    pages.resize(5, 4, 9)
    assert [pages.state.free(family) for family in (FULL, SWA, C128)] == [5, 4, 9]
    assert pages.take(5, 4, 9)[2].tolist() == list(range(1, 10))


def test_rows_refuse_what_does_not_fit(pages: SlotPages) -> None:
    rows = SidecarRows(3, 2, 16)
    one, zero = np.array([1]), np.array([0])
    with pytest.raises(InputError, match="1 C128 pages for 2 columns of 1 rows"):
        rows.write(pages, one, zero, np.array([32]), ids(1))
    with pytest.raises(CapacityError, match="3 C128 pages, the row has 2 columns"):
        rows.write(pages, one, zero, np.array([48]), pages.take(0, 0, 3)[2])
    with pytest.raises(InputError, match="row 0: 1 to 2 is allowed"):
        rows.replace(pages, 0, ids(1))
    with pytest.raises(OwnershipError, match="row 1: C128 column 0 is empty; 2 columns are needed"):
        rows.prefix(1, 0, 2)
