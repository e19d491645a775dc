"""The audit: every invariant of the ledger, recomputed from its content. Callable at any moment.

free + held + held outside + taken + quarantined = total in each family; reference counts equal row entries plus holder
entries; no page in two states; every slot that a request can read is its own or its shared prefix's; committed <=
allocated <= row width; an SWA page belongs to exactly one FULL page; mirrors equal the host tables.

Each violation says which page, who holds it, at which step, and answers three questions: is it a KV page or compressor
state? who owns it, an SWA page or the request? does the cleanup prevent a stale read, or return a page?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dsv4_npu import addressing
from dsv4_npu.alloc.audit_view import AuditView
from dsv4_npu.alloc.state import (
    C128,
    FAMILY_NAMES,
    FREE,
    FULL,
    GAP,
    HELD,
    HOLES,
    I64,
    OUTSIDE,
    QUARANTINED,
    ROW,
    STATE_NAMES,
    STEP,
    SWA,
    TAKEN,
)
from dsv4_npu.errors import AuditError

if TYPE_CHECKING:
    from dsv4_npu.alloc.allocator import KVAllocator

#: Violations that one message spells out.
SHOWN = 5
RETURN, STALE = "returning a page", "preventing a stale read"
FREED_IN_USE = "preventing a stale read: the page may be given to another request while it is still read"


@dataclass(frozen=True)
class Violation:
    """One broken invariant; ``page`` is a page id, or a row for the family ROW.

    ``row``: the request row whose pages are meant where they are not mapped any more, so that no page can be named.
    """

    family: str
    page: int
    what: str
    holders: str
    step: int
    kind: str
    owner: str
    cleanup: str
    row: int = 0

    def __str__(self) -> str:
        name = f"{self.family} page {self.page}" if self.family != "ROW" else f"request row {self.page}"
        if self.row:
            name = f"{self.family} pages of request row {self.row}"
        return (
            f"{name}, step {self.step}: {self.what}; holders: {self.holders}. "
            f"KV page or compressor state: {self.kind}. Owned by: {self.owner}. Cleanup: {self.cleanup}."
        )


def audit(allocator: KVAllocator, deep: bool = True) -> None:
    """Raise AuditError naming the broken invariants; without ``deep`` only what is cheap at any size is checked."""
    found = find_violations(allocator, deep)
    if found:
        more = f"\n... and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise AuditError("\n".join(str(one) for one in found[:SHOWN]) + more)


def find_violations(allocator: KVAllocator, deep: bool = True) -> list[Violation]:
    """All broken invariants, as data."""
    check = _Check(AuditView(allocator, deep))
    check.rows()
    check.lengths()
    check.c128()
    check.full()
    if not allocator.spec.full_only:
        check.swa()
        check.windows()
    for family in (FULL, SWA, C128, ROW):
        check.states(family)
        if deep:
            check.lists(family)
    if deep:
        check.tables()
    return check.found


class _Check:
    def __init__(self, view: AuditView) -> None:
        self.view = view
        self.state = view.state
        self.spec = view.state.spec
        self.found: list[Violation] = []

    def report(self, family: int, pages: I64, what: str, cleanup: str) -> None:
        for page in pages.tolist():
            self.found.append(
                Violation(
                    FAMILY_NAMES[family],
                    page,
                    what,
                    self.view.holders_of(family, page),
                    int(self.state.counters[STEP]),
                    self.view.kind_of(family),
                    self.view.owner_of(family, page),
                    cleanup,
                )
            )

    def rows(self) -> None:
        state = self.state
        opened = np.flatnonzero(state.page_state[ROW] == HELD)
        differ = np.setxor1d(opened, self.view.named_rows)
        self.report(ROW, differ, "open without a request, or named but not open", RETURN)
        closed = state.page_state[ROW] != HELD
        left = (state.committed + state.allocated + state.held_cols + state.c128_cols + state.shared_cols) != 0
        left |= (state.evict_cursor + state.swa_start + state.flags) != 0
        self.report(ROW, np.flatnonzero(closed & left), "not open, but its lengths are not zero", STALE)

    def lengths(self) -> None:
        state, page, per = self.state, self.spec.page_size, self.spec.c128_page_size
        rows = self.view.open_rows
        committed, allocated = state.committed[rows], state.allocated[rows]
        bad = (committed < 0) | (committed > allocated) | (allocated > self.spec.row_width)
        self.report(ROW, rows[bad], "0 <= committed <= allocated <= row width does not hold", STALE)
        pages = -(-allocated // page)
        self.report(ROW, rows[state.held_cols[rows] != pages], "pages held are not ceil_page(allocated)", RETURN)
        self.report(ROW, rows[state.shared_cols[rows] > pages], "shared prefix is longer than the row", STALE)
        if self.spec.full_only:
            return
        ratio = addressing.C128_RATIO
        low, high = -(-(committed // ratio) // per), -(-(allocated // ratio) // per)
        held = state.c128_cols[rows]
        self.report(ROW, rows[held < low], "committed C128 entries have no page", STALE)
        self.report(ROW, rows[held > high], "C128 pages are held beyond the allocated entries", RETURN)

    def c128(self) -> None:
        state, view = self.state, self.view
        total = state.total(C128)
        counted = np.bincount(view.side_pages, minlength=total + 1) + view.count_outside(C128)
        wrong = np.flatnonzero(counted[1:] != state.c128_count[1:]) + 1
        self.report(C128, wrong, "the reference count is not row entries plus holder entries", RETURN)
        differ = np.flatnonzero((state.c128_count > 0) != (state.page_state[C128] == HELD))
        self.report(C128, differ, "count and state disagree", RETURN)
        rows = view.open_rows
        filled = np.bincount(view.side_rows, minlength=len(state.c128_cols))[rows]
        inside = view.side_cols < state.c128_cols[view.side_rows]
        bad = (filled != state.c128_cols[rows]) | np.isin(rows, view.side_rows[~inside])
        self.report(ROW, rows[bad], "the sidecar has a hole, or entries behind its end", STALE)

    def full(self) -> None:
        state, view = self.state, self.view
        rows, columns, pages = view.rows, view.cols, view.pages
        shared = columns < state.shared_cols[rows]
        own = pages[~shared]
        owner = (state.page_state[FULL][own] == HELD) & (state.full_owner[own] == rows[~shared])
        self.report(FULL, own[~owner], "named by a row that does not own it", FREED_IN_USE)
        once = np.bincount(own, minlength=state.total(FULL) + 1)
        self.report(FULL, np.flatnonzero(once > 1), "named twice as own page", FREED_IN_USE)
        held = state.page_state[FULL] == HELD
        self.report(FULL, np.flatnonzero(held & (once == 0)), "held by a row that does not name it", RETURN)
        self.report(FULL, np.flatnonzero(~held & (state.full_owner != 0)), "owned by a row, but not held", RETURN)
        lost = state.page_state[FULL][pages[shared]] != OUTSIDE
        self.report(FULL, pages[shared][lost], "read as shared prefix, but nobody outside holds it", FREED_IN_USE)
        readers = np.bincount(pages[shared], minlength=state.total(FULL) + 1)
        differ = np.flatnonzero(readers != state.full_readers)
        self.report(FULL, differ, "the number of reading rows is wrong", FREED_IN_USE)
        claims, outside = view.count_outside(FULL), state.page_state[FULL] == OUTSIDE
        self.report(FULL, np.flatnonzero(outside & (claims == 0)), "held outside, but no holder names it", RETURN)
        foreign = np.flatnonzero(~outside & (claims > 0))
        self.report(FULL, foreign, "named by a holder that does not own it", FREED_IN_USE)
        self.report(FULL, np.flatnonzero(claims > 1), "named twice by holders", RETURN)
        whole = state.flags[view.open_rows] & HOLES == 0
        filled = np.bincount(rows, minlength=len(state.held_cols))[view.open_rows]
        bad = (filled != state.held_cols[view.open_rows]) & whole
        bad |= np.isin(view.open_rows, rows[columns >= state.held_cols[rows]])
        self.report(ROW, view.open_rows[bad], "the block table has a hole, or entries behind its end", STALE)

    def swa(self) -> None:
        state, view = self.state, self.view
        held = np.flatnonzero(state.page_state[SWA] == HELD)
        back = state.full_to_swa[state.swa_full[held]] == held
        self.report(SWA, held[~back | (state.swa_full[held] == 0)], "held, but no FULL page maps it", RETURN)
        mapped = np.flatnonzero(state.full_to_swa)
        swa = state.full_to_swa[mapped].astype(np.int64)
        wrong = (state.page_state[SWA][swa] != HELD) | (state.swa_full[swa] != mapped)
        self.report(SWA, swa[wrong], "mapped by a FULL page that does not hold it", FREED_IN_USE)
        idle = ~np.isin(state.page_state[FULL][mapped], (HELD, OUTSIDE))
        self.report(SWA, swa[idle], "mapped by a FULL page that nobody holds", RETURN)
        loose = np.flatnonzero((state.page_state[SWA] != HELD) & (state.swa_full != 0))
        self.report(SWA, loose, "not held, but it names a FULL page", RETURN)
        kept = np.flatnonzero((state.page_state[FULL] == OUTSIDE) & (state.full_to_swa != 0))
        named = np.flatnonzero(view.count_outside(SWA))
        differ = np.setxor1d(kept, named)
        self.report(FULL, differ, "its holder and the mapping disagree about its SWA page", RETURN)

    def windows(self) -> None:
        state, view, page = self.state, self.view, self.spec.page_size
        rows, columns = view.rows, view.cols
        mapped = state.full_to_swa[view.pages] != 0
        shared = columns < state.shared_cols[rows]
        missing = ~shared & (columns >= state.swa_start[rows]) & ~mapped
        self.report(FULL, view.pages[missing], "in the resident window, but without an SWA page", STALE)
        kept = ~shared & (columns < state.evict_cursor[rows]) & mapped
        self.report(FULL, view.pages[kept], "before the eviction cursor, but it still has its SWA page", RETURN)
        first = np.maximum(0, state.committed - self.spec.window + 1)
        live = shared & (columns >= np.maximum(state.swa_start, first // page)[rows]) & ~mapped
        self.report(FULL, view.pages[live], "in the live window of a shared prefix, but without an SWA page", STALE)
        early = (state.swa_start * page > first) & (state.flags & GAP == 0)
        for row in np.flatnonzero(early).tolist():
            self.found.append(
                Violation(
                    FAMILY_NAMES[SWA],
                    0,
                    "SWA pages of the live window were freed",
                    view.holders_of(ROW, row),
                    int(state.counters[STEP]),
                    view.kind_of(SWA),
                    view.owner_of(SWA, 0),
                    FREED_IN_USE,
                    row,
                )
            )

    def states(self, family: int) -> None:
        state, view = self.state, self.view
        counts = np.bincount(state.page_state[family][1:], minlength=5)
        if state.page_state[family][0] != FREE:
            self.report(family, np.zeros(1, np.int64), "the dummy has an owner", STALE)
        taken = view.taken(family)
        expected = {FREE: state.free(family), QUARANTINED: state.waiting(family), TAKEN: len(taken)}
        for number, count in expected.items():
            if counts[number] != count:
                what = f"{counts[number]} pages of the family are {STATE_NAMES[number]}, {count} are listed so"
                example = np.flatnonzero(state.page_state[family][1:] == number)[:1] + 1
                self.report(family, example if len(example) else np.zeros(1, np.int64), what, RETURN)
        self.report(family, taken[state.page_state[family][taken] != TAKEN], "in a transaction, but not taken", RETURN)

    def lists(self, family: int) -> None:
        state = self.state
        free = state.free_list[family][: state.free(family)]
        waiting, tags = state.quarantine(family)
        for pages, number in ((free, FREE), (waiting, QUARANTINED)):
            inside = (pages >= 1) & (pages <= state.total(family))
            self.report(family, pages[~inside].astype(np.int64), "out of range in a free list", RETURN)
            listed = np.bincount(pages[inside], minlength=state.total(family) + 1)
            self.report(family, np.flatnonzero(listed > 1), f"listed twice as {STATE_NAMES[number]}", FREED_IN_USE)
            wrong = (listed > 0) & (state.page_state[family] != number)
            self.report(family, np.flatnonzero(wrong), f"listed as {STATE_NAMES[number]}, but it is not", FREED_IN_USE)
        epochs = self.view.epochs
        early = tags < epochs.horizon
        self.report(family, waiting[early].astype(np.int64), "still waits for an epoch that is done", RETURN)

    def tables(self) -> None:
        state, view = self.state, self.view
        for table, family in ((state.block_table, FULL), (state.c128_table, C128)):
            idle = np.flatnonzero(state.page_state[ROW] != HELD)
            left = idle[table[idle].any(axis=1)]
            self.report(ROW, left, f"not open, but its {FAMILY_NAMES[family]} columns are not zero", STALE)
        if view.mirror is not None:
            stale = (state.tables != view.mirror) & (state.dirty == 0)
            for index in np.flatnonzero(stale).tolist():
                family, page = view.entry(index)
                self.report(family, np.array([page]), "the mirror differs from the host table", STALE)
