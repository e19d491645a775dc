"""Pages for a scheduler that keeps its own request tables and prefix tree, and speaks of slots.

The request-centric :class:`~dsv4_npu.alloc.allocator.KVAllocator` knows which row names a page; here somebody else
does, and hands whole pages from a request to a tree and back without a word. So every FULL page that is given out is
"held outside", an SWA page belongs to the FULL page that maps it (or to nobody yet: *loose*), and C128 pages count
their holders as everywhere. The free lists, states and counts are those of the common ledger state.
"""

from __future__ import annotations

import numpy as np

from dsv4_npu.alloc.ledger import Backend, make_ledger
from dsv4_npu.alloc.py_pages import PyPages
from dsv4_npu.alloc.spec import AllocSpec
from dsv4_npu.alloc.state import (
    C128,
    FAMILY_NAMES,
    FREE,
    FULL,
    HELD,
    I32,
    I64,
    OUTSIDE,
    STATE_NAMES,
    SWA,
    TAKEN,
)
from dsv4_npu.errors import InputError, OwnershipError

#: Violations that the census spells out per family.
SHOWN = 5


class SlotPages(PyPages):
    """Page families without request rows.

    Args:
        page_size, c128_page_size: tokens of a FULL or SWA page, entries of a C128 page.
        full_pages, swa_pages, c128_pages: usable pages; the dummy page 0 of each comes on top.
        backend: of the free lists: ``auto`` (compiled where it is there), ``cpp`` or ``python``.

    Ids are int32 or int64 arrays of page ids. Every call raises before it changes anything.
    """

    def __init__(
        self,
        page_size: int,
        c128_page_size: int,
        full_pages: int,
        swa_pages: int,
        c128_pages: int,
        *,
        backend: Backend = "auto",
    ) -> None:
        spec = AllocSpec(page_size, c128_page_size, full_pages, swa_pages, c128_pages, 1, page_size)
        self._core, state = make_ledger(spec, backend)
        super().__init__(state)

    def _mark(self, index: I64) -> None:
        """The scheduler keeps the device tables; nothing is mirrored from here."""

    def take(self, full: int, swa: int, c128: int) -> tuple[I32, I32, I32]:
        """Take pages of the three families, all or none (CapacityError).

        FULL pages are held outside and the last ``swa`` of them map the SWA pages, in order; SWA pages beyond them are
        loose. C128 pages stay taken until their first holder is counted or they are given back.
        """
        pages = self._core.take(full, swa, c128)
        taken, peers, _ = pages
        state = self.state
        if state.full_to_swa[taken].any():
            stale = taken[state.full_to_swa[taken] != 0]
            self._core.untake(*pages)
            raise OwnershipError(
                f"FULL page {stale[0]} was freed without its SWA page {state.full_to_swa[stale[0]]}: free both"
            )
        state.page_state[FULL][taken] = OUTSIDE
        state.page_state[SWA][peers] = HELD
        mapped = min(full, swa)
        if mapped:
            state.full_to_swa[taken[full - mapped :]] = peers[:mapped]
            state.swa_full[peers[:mapped]] = taken[full - mapped :]
        return pages

    def free_full(self, pages: I32 | I64) -> None:
        """Free FULL pages and leave their SWA pages to :meth:`free_peers`, which may come later."""
        self._check_held(FULL, pages, OUTSIDE)
        self._step()
        self._push(FULL, pages.astype(np.int32))

    def free_peers(self, full: I32 | I64) -> int:
        """Free the SWA pages of FULL pages; one without an SWA page is left alone. Returns how many went free."""
        before = self.state.free(SWA)
        if (self.state.page_state[FULL].take(full, mode="clip") == OUTSIDE).all():
            self._core.free_swa(full.astype(np.int64, copy=False))
        else:
            self._check_range(FULL, full)
            self._check_once(FULL, full)
            self._step()
            self._unmap(full.astype(np.int64))
        return self.state.free(SWA) - before

    def free_both(self, full: I32 | I64) -> int:
        """:meth:`free_full` with :meth:`free_peers`; nothing is freed if one of the pages is not held."""
        before = self.state.free(SWA)
        self._core.free_pages(full.astype(np.int64, copy=False))
        return self.state.free(SWA) - before

    def detach(self, full: I32 | I64) -> None:
        """Take the SWA pages away from FULL pages without freeing them: they are loose."""
        self._check_range(FULL, full)
        self._step()
        state = self.state
        state.swa_full[state.full_to_swa[full]] = 0
        state.full_to_swa[full] = 0

    def attach(self, full: I32 | I64, swa: I32 | I64) -> None:
        """Give loose SWA pages to FULL pages; a pair that belongs together already is left alone."""
        if len(full) != len(swa):
            raise InputError(f"{len(full)} FULL pages and {len(swa)} SWA pages: one for each is needed")
        state = self.state
        self._check_held(FULL, full, OUTSIDE)
        self._check_held(SWA, swa, HELD)
        fresh = state.full_to_swa[full] != swa
        full, swa = full[fresh], swa[fresh]
        for page, peer in ((full, state.full_to_swa[full]), (swa, state.swa_full[swa])):
            if peer.any():
                at = int(np.flatnonzero(peer)[0])
                name, other = ("FULL", "SWA") if page is full else ("SWA", "FULL")
                raise OwnershipError(f"{name} page {page[at]} belongs to {other} page {peer[at]} already")
        self._step()
        state.full_to_swa[full] = swa
        state.swa_full[swa] = full

    def free_swa_ids(self, swa: I32 | I64) -> None:
        """Free SWA pages by their own ids, loose or not."""
        self._check_held(SWA, swa, HELD)
        self._step()
        owners = self.state.swa_full[swa].astype(np.int64)
        self._unmap(owners[owners > 0])
        self._push(SWA, swa[owners == 0].astype(np.int32))

    def retain_c128(self, pages: I32 | I64) -> None:
        """Count one holder for each entry of a multiset of pages; the first holder of a taken page ends its taking."""
        if not len(pages):
            return
        self._check_range(C128, pages)
        state = self.state
        held = state.page_state[C128][pages]
        if (held == HELD).all():
            self._core.retain_c128(pages.astype(np.int64, copy=False))
            return
        if not (held == TAKEN).all():
            bad = (held != HELD) & (held != TAKEN)
            if bad.any():
                self._check_counted(int(pages[np.flatnonzero(bad)[0]]))
        self._step()
        np.add.at(state.c128_count, pages, 1)
        state.page_state[C128][pages] = HELD

    def release_c128(self, pages: I32 | I64) -> None:
        """Take one holder off for each entry of a multiset of pages; a page is free exactly at count 0."""
        if len(pages):
            self._core.release_c128(pages.astype(np.int64, copy=False))

    def give_back_c128(self, pages: I32 | I64) -> None:
        """Free taken C128 pages that never got a holder."""
        self._check_held(C128, pages, TAKEN)
        self._step()
        self._push(C128, pages.astype(np.int32))

    def resize(self, full_pages: int, swa_pages: int, c128_pages: int) -> None:
        """Begin anew with other sizes: every page is free afterwards."""
        spec = self.spec
        sizes = AllocSpec(spec.page_size, spec.c128_page_size, full_pages, swa_pages, c128_pages, 1, spec.page_size)
        self._core, self.state = make_ledger(sizes, self._core.backend)  # type: ignore[arg-type]
        self.spec = self.state.spec

    def census(self, c128_held: I64) -> list[str]:
        """What is wrong, in words: pages lost or listed twice, mappings without owner, counts that nobody explains.

        ``c128_held`` lists, as a multiset, the C128 pages that the holders name.
        """
        found: list[str] = []
        state = self.state
        for family in (FULL, SWA, C128):
            free = state.free_list[family][: state.free(family)]
            seen = np.bincount(free, minlength=state.total(family) + 1)
            self._say(found, family, np.flatnonzero(seen > 1), "listed as free twice")
            self._say(found, family, np.flatnonzero((seen > 0) != (state.page_state[family] == FREE))[1:], "lost")
        mapped = np.flatnonzero(state.full_to_swa)
        swa = state.full_to_swa[mapped]
        wrong = (state.swa_full[swa] != mapped) | (state.page_state[SWA][swa] != HELD)
        self._say(found, SWA, swa[wrong], "mapped by a FULL page that does not hold it")
        self._say(found, FULL, mapped[state.page_state[FULL][mapped] != OUTSIDE], "freed, but its SWA page was not")
        loose = np.flatnonzero((state.page_state[SWA] == HELD) & (state.swa_full == 0))
        self._say(found, SWA, loose, "held by no FULL page")
        waiting = np.flatnonzero(state.page_state[C128] == TAKEN)
        self._say(found, C128, waiting, "allocated, but written to no request row")
        named = np.bincount(c128_held, minlength=state.total(C128) + 1)
        for page in np.flatnonzero(named[1:] != state.c128_count[1:])[:SHOWN] + 1:
            found.append(f"C128 page {page}: count {state.c128_count[page]}, {named[page]} holders name it")
        return found

    def _say(self, found: list[str], family: int, pages: I32 | I64, what: str) -> None:
        found += [f"{FAMILY_NAMES[family]} page {page}: {what}" for page in pages[:SHOWN].tolist()]

    def _check_range(self, family: int, pages: I32 | I64) -> None:
        total = self.state.total(family)
        if len(pages) and (int(pages.min()) < 1 or int(pages.max()) > total):
            bad = pages[(pages < 1) | (pages > total)]
            raise InputError(f"{FAMILY_NAMES[family]} page {bad[0]}: 1 to {total} is allowed")

    def _check_once(self, family: int, pages: I32 | I64) -> None:
        if len(pages) < 2:
            return
        ordered = np.sort(pages)
        twice = np.flatnonzero(ordered[1:] == ordered[:-1])
        if len(twice):
            raise OwnershipError(
                f"{FAMILY_NAMES[family]} page {ordered[twice[0]]} appears twice in one call: each page is freed once"
            )

    def _check_held(self, family: int, pages: I32 | I64, wanted: int) -> None:
        self._check_range(family, pages)
        found = self.state.page_state[family][pages]
        wrong = found != wanted
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise OwnershipError(
                f"{FAMILY_NAMES[family]} page {pages[at]} is {STATE_NAMES[found[at]]}: it must be {STATE_NAMES[wanted]}"
            )
        self._check_once(family, pages)
