"""Page families in plain Python: free lists, quarantine, full-to-SWA mapping, C128 reference counts.

The oracle of the C++ core: the same calls leave the same :class:`~dsv4_npu.alloc.state.LedgerState`, bit for bit, and
raise the same errors. Every check comes before the first change.
"""

from __future__ import annotations

import numpy as np

from dsv4_npu import addressing
from dsv4_npu.alloc.spec import AllocSpec
from dsv4_npu.alloc.state import (
    C128,
    FAMILY_NAMES,
    FREE,
    FULL,
    HELD,
    I32,
    I64,
    N_DIRTY,
    N_FREE,
    N_SWA_LOG,
    OUTSIDE,
    PEAK,
    Q_HEAD,
    Q_LEN,
    QUARANTINED,
    ROW,
    STATE_NAMES,
    STEP,
    SWA,
    TAG,
    TAKEN,
    LedgerState,
)
from dsv4_npu.errors import CapacityError, InputError, OwnershipError


class PyPages:
    """Everything of the ledger that knows no request rows."""

    def __init__(self, state: LedgerState) -> None:
        self.state = state
        self.spec: AllocSpec = state.spec

    def _c128_columns(self, tokens: int) -> int:
        """Sidecar columns that ``tokens`` positions fill; none without a C128 family."""
        return 0 if self.spec.full_only else addressing.c128_columns(tokens, self.spec.c128_page_size)

    def bind(self) -> None:
        """Take up arrays that were replaced by a resize; nothing is cached here."""

    def take(self, full: int, swa: int, c128: int) -> tuple[I32, I32, I32]:
        """Take pages of the three families for a transaction, all or none."""
        self._check_room((full, swa, c128))
        self._step()
        return self._pop(FULL, full, TAKEN), self._pop(SWA, swa, TAKEN), self._pop(C128, c128, TAKEN)

    def untake(self, full: I32, swa: I32, c128: I32) -> None:
        """Give taken pages back; the free lists are as they were if nothing else touched them."""
        groups = (full, swa, c128)
        for family, pages in enumerate(groups):
            self._check_taken(family, pages)
        self._step()
        for family, pages in enumerate(groups):
            self._push(family, pages[::-1])

    def drain(self, horizon: int) -> None:
        """Move pages that waited for epochs below ``horizon`` to the free lists, oldest first."""
        self._step()
        for family in (FULL, SWA, C128, ROW):
            pages, tags = self.state.quarantine(family)
            count = int(np.searchsorted(tags, horizon, side="left"))
            if not count:
                continue
            counters = self.state.counters
            counters[Q_HEAD + family] = (counters[Q_HEAD + family] + count) % self.state.total(family)
            counters[Q_LEN + family] -= count
            self._push(family, pages[:count])

    def set_tag(self, epoch: int) -> None:
        """Pages freed from now on wait for ``epoch``; 0: they are free at once."""
        self.state.counters[TAG] = epoch

    def free_pages(self, pages: I64) -> None:
        """Free FULL pages held outside, with their SWA pages where still mapped."""
        seen: set[int] = set()
        for page in pages.tolist():
            self._check_outside(page)
            if self.state.full_readers[page]:
                raise OwnershipError(
                    f"FULL page {page} is read as a shared prefix by {self.state.full_readers[page]} rows: "
                    f"it can be freed only when no row reads it"
                )
            if page in seen:
                raise OwnershipError(f"FULL page {page} appears twice in one call: each page is freed once")
            seen.add(page)
        self._step()
        self._free_full(pages)

    def free_swa(self, pages: I64) -> None:
        """Free the SWA pages of FULL pages held outside; an unmapped page is left alone."""
        for page in pages.tolist():
            self._check_outside(page)
        self._step()
        self._unmap(np.array(list(dict.fromkeys(pages.tolist())), np.int64))

    def retain_c128(self, pages: I64) -> None:
        """Count one more holder for each entry of a multiset of held pages."""
        for page in pages.tolist():
            self._check_counted(page)
        self._step()
        for page in pages.tolist():
            self.state.c128_count[page] += 1

    def release_c128(self, pages: I64) -> None:
        """Take one holder off for each entry of a multiset; a page is freed exactly at count 0."""
        left: dict[int, int] = {}
        for page in pages.tolist():
            self._check_counted(page)
            left[page] = left.get(page, int(self.state.c128_count[page])) - 1
            if left[page] < 0:
                raise OwnershipError(
                    f"C128 page {page} has count {self.state.c128_count[page]} and is released more often in one call"
                )
        self._step()
        self._release(pages)

    def collect(self, index: I64, value: I64) -> int:
        """Write changed entries of ``tables`` into two staging arrays, forget them, and return how many."""
        state = self.state
        count = int(state.counters[N_DIRTY])
        where = state.dirty_list[:count]
        index[:count] = where
        value[:count] = state.tables[where]
        state.dirty[where] = 0
        state.counters[N_DIRTY] = 0
        return count

    def drain_swa_log(self) -> I32:
        """SWA pages freed since the last call, each once, in the order of their first release."""
        state = self.state
        pages = state.swa_log[: state.counters[N_SWA_LOG]].copy()
        state.swa_logged[pages] = 0
        state.counters[N_SWA_LOG] = 0
        return pages

    def _step(self) -> None:
        self.state.counters[STEP] += 1

    def _check_room(self, need: tuple[int, int, int]) -> None:
        for family, count in enumerate(need):
            if count > self.state.free(family):
                raise CapacityError(
                    f"{FAMILY_NAMES[family]} pages: need {count}, free {self.state.free(family)} "
                    f"of {self.state.total(family)}, waiting for an epoch {self.state.waiting(family)}"
                )

    def _check_taken(self, family: int, pages: I32) -> None:
        for page in pages.tolist():
            if not 1 <= page <= self.state.total(family) or self.state.page_state[family][page] != TAKEN:
                raise OwnershipError(f"{FAMILY_NAMES[family]} page {page} is not taken by a transaction")

    def _check_outside(self, page: int) -> None:
        total = self.state.total(FULL)
        if not 1 <= page <= total:
            raise InputError(f"FULL page {page}: 1 to {total} is allowed")
        found = self.state.page_state[FULL][page]
        if found != OUTSIDE:
            raise OwnershipError(f"FULL page {page} is {STATE_NAMES[found]}: it must be held outside of the rows")

    def _check_counted(self, page: int) -> None:
        total = self.state.total(C128)
        if not 1 <= page <= total:
            raise InputError(f"C128 page {page}: 1 to {total} is allowed")
        if self.state.c128_count[page] < 1:
            found = self.state.page_state[C128][page]
            raise OwnershipError(f"C128 page {page} has count 0 and is {STATE_NAMES[found]}: nobody holds it")

    def _pop(self, family: int, count: int, new_state: int) -> I32:
        state = self.state
        top = state.free(family)
        pages = state.free_list[family][top - count : top][::-1].copy()
        state.page_state[family][pages] = new_state
        state.counters[N_FREE + family] = top - count
        used = state.total(family) - (top - count)
        state.counters[PEAK + family] = max(int(state.counters[PEAK + family]), used)
        return pages

    def _push(self, family: int, pages: I32) -> None:
        state = self.state
        top = state.free(family)
        state.free_list[family][top : top + len(pages)] = pages
        state.page_state[family][pages] = FREE
        state.counters[N_FREE + family] = top + len(pages)

    def _put(self, family: int, pages: I32) -> None:
        """Free pages: at once, or after the epoch that may still read them."""
        state = self.state
        tag = int(state.counters[TAG])
        if not tag:
            self._push(family, pages)
            return
        size, count = state.total(family), state.waiting(family)
        where = (int(state.counters[Q_HEAD + family]) + count + np.arange(len(pages))) % size
        state.q_page[family][where] = pages
        state.q_tag[family][where] = tag
        state.page_state[family][pages] = QUARANTINED
        state.counters[Q_LEN + family] = count + len(pages)

    def _mark(self, index: I64) -> None:
        """Note changed entries of ``tables``; an entry is listed once however often it changes."""
        state = self.state
        fresh = index[state.dirty[index] == 0]
        count = int(state.counters[N_DIRTY])
        state.dirty_list[count : count + len(fresh)] = fresh
        state.dirty[fresh] = 1
        state.counters[N_DIRTY] = count + len(fresh)

    def _map(self, full: I32, swa: I32) -> None:
        state = self.state
        state.full_to_swa[full] = swa
        state.swa_full[swa] = full
        state.page_state[SWA][swa] = HELD
        self._mark(state.swa_base + full.astype(np.int64))

    def _unmap(self, full: I64) -> I32:
        """Free the SWA pages that FULL pages (each listed once) still map."""
        state = self.state
        full = full[state.full_to_swa[full] > 0]
        swa = state.full_to_swa[full]
        state.full_to_swa[full] = 0
        state.swa_full[swa] = 0
        self._mark(state.swa_base + full)
        fresh = swa[state.swa_logged[swa] == 0]
        count = int(state.counters[N_SWA_LOG])
        state.swa_log[count : count + len(fresh)] = fresh
        state.swa_logged[fresh] = 1
        state.counters[N_SWA_LOG] = count + len(fresh)
        self._put(SWA, swa)
        return swa

    def _free_full(self, pages: I64) -> I32:
        swa = self._unmap(pages)
        self.state.full_owner[pages] = 0
        self._put(FULL, pages.astype(np.int32))
        return swa

    def _release(self, pages: I32 | I64) -> None:
        for page in pages.tolist():
            self.state.c128_count[page] -= 1
            if self.state.c128_count[page] == 0:
                self._put(C128, np.array([page], np.int32))
