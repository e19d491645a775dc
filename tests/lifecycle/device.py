"""A device that stores history tags instead of numbers: every read is checked against the reader's own history.

The tag of position p is a hash of the tokens up to p, so a row of another request, of a rejected draft, of a freed
page or of another position never has the right one. Addresses, the save rule and the window are written down again
here from the facts, with plain arithmetic on the mirrors; nothing of ``addressing`` is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsv4_npu.alloc import AllocSpec, Cleanup, KVAllocator

EMPTY, GARBAGE = 0, -1
MODULUS = (1 << 61) - 1
VOCABULARY = 23


def chain(tag: int, token: int) -> int:
    return (tag * 1_000_003 + token + 17) % MODULUS


def next_token(tag: int) -> int:
    """The target model: greedy, and a function of the whole history."""
    return tag % VOCABULARY


@dataclass
class Ring:
    """State rows of one ratio: its pad by the facts' table, its memory."""

    ratio: int
    coff: int
    size: int
    memory: np.ndarray

    @property
    def pad(self) -> int:
        return {(4, 16): 10, (4, 8): 0, (128, 256): 130, (128, 128): 0}[self.ratio, self.size]


class WrongReadError(AssertionError):
    """A read found a row that is not the reader's history."""


class TagDevice:
    """Payload of FULL-derived C4, SWA, C128 and both rings, as tags."""

    def __init__(self, alloc: KVAllocator, speculative: bool) -> None:
        spec: AllocSpec = alloc.spec
        self.alloc, self.spec, self.page = alloc, spec, spec.page_size
        self.by_page = spec.c4_state_owner == "swa_page"

        def memory(rows: int) -> np.ndarray:
            return np.full(rows, GARBAGE, np.int64)

        self.swa = memory((spec.swa_pages + 1) * spec.page_size)
        self.c4 = memory((spec.full_pages + 1) * spec.page_size // 4)
        self.c128 = memory((spec.c128_pages + 1) * spec.c128_page_size)
        banks = spec.swa_pages if self.by_page else spec.request_rows
        size4, size128 = (16, 256) if speculative else (8, 128)
        self.ring4 = Ring(4, 2, size4, np.full((banks + 1) * size4, EMPTY, np.int64))
        self.ring128 = Ring(128, 1, size128, np.full((spec.request_rows + 1) * size128, EMPTY, np.int64))

    # -- addresses -----------------------------------------------------------------------------------------------

    def full_slot(self, row: int, p: np.ndarray) -> np.ndarray:
        table = self.alloc.mirrors.block_table.numpy()
        return table[row, p // self.page].astype(np.int64) * self.page + p % self.page

    def swa_slot(self, row: int, p: np.ndarray) -> np.ndarray:
        full = self.full_slot(row, p)
        return self.alloc.mirrors.full_to_swa.numpy()[full // self.page].astype(np.int64) * self.page + p % self.page

    def c128_slot(self, row: int, entries: np.ndarray) -> np.ndarray:
        per = self.spec.c128_page_size
        return self.alloc.mirrors.c128_table.numpy()[row, entries // per].astype(np.int64) * per + entries % per

    def state_row(self, ring: Ring, row: int, p: np.ndarray) -> np.ndarray:
        if ring.ratio == 4 and self.by_page:
            return self.swa_slot(row, p) // self.page * ring.size + p % ring.size
        return row * ring.size + p % ring.size

    # -- forwards ------------------------------------------------------------------------------------------------

    def forward(self, row: int, tags: np.ndarray, start: int, end: int, valid: int, who: str) -> None:
        """Compute positions ``[start, end)``; ``tags`` of ``[0, end)``; reads are checked for positions < valid."""
        new = np.arange(start, end)
        slots = self.swa_slot(row, new)
        if (slots < self.page).any():
            raise WrongReadError(f"{who}: a new position of [{start}, {end}) has no SWA slot")
        before = np.arange(max(0, start - self.spec.window + 1), start)
        self._check(self.swa[self.swa_slot(row, before)], tags[before], before, f"{who}: SWA window")
        for ring in (self.ring4, self.ring128):
            self._compress(ring, row, tags, start, end, valid, who)
        self.swa[slots] = tags[new]
        for ratio, memory, find in ((4, self.c4, self._c4_slot), (128, self.c128, self.c128_slot)):
            entries = np.arange(valid // ratio)
            self._check(
                memory[find(row, entries)], tags[entries * ratio + ratio - 1], entries, f"{who}: C{ratio} entry"
            )

    def _c4_slot(self, row: int, entries: np.ndarray) -> np.ndarray:
        return self.full_slot(row, entries * 4 + 3) // 4

    def _compress(self, ring: Ring, row: int, tags: np.ndarray, start: int, end: int, valid: int, who: str) -> None:
        r = ring.ratio
        entries = np.arange(start // r, end // r)
        if len(entries):
            first = max(0, (int(entries[0]) - (ring.coff - 1)) * r)
            old = np.arange(first, start)
            if (int(entries[0]) + 1) * r <= valid:
                self._check(ring.memory[self.state_row(ring, row, old)], tags[old], old, f"{who}: C{r} ring")
            memory, find = (self.c4, self._c4_slot) if r == 4 else (self.c128, self.c128_slot)
            found = find(row, entries)
            if (found < (self.page // 4 if r == 4 else self.spec.c128_page_size)).any():
                raise WrongReadError(f"{who}: a C{r} entry of [{start}, {end}) has no slot")
            memory[found] = tags[entries * r + r - 1]
        saved = max(start, min(end // r * r - (ring.coff - 1) * r, end - ring.pad), end - ring.size)
        rows = np.arange(saved, end)
        ring.memory[self.state_row(ring, row, rows)] = tags[rows]

    def clear_rejected(self, row: int, start: int, accepted: int, width: int) -> None:
        """The C128 rows of rejected drafts become empty."""
        rows = np.arange(start + accepted, start + width)
        self.ring128.memory[self.state_row(self.ring128, row, rows)] = EMPTY

    def _check(self, found: np.ndarray, wanted: np.ndarray, where: np.ndarray, what: str) -> None:
        wrong = np.flatnonzero(found != wanted)
        if len(wrong):
            raise WrongReadError(f"{what} at {where[wrong[:8]].tolist()} is not the history's")

    # -- state that moves or is cleared --------------------------------------------------------------------------

    def clear(self, cleanup: Cleanup) -> None:
        size = self.ring128.size
        self.ring128.memory[cleanup.row * size : (cleanup.row + 1) * size] = EMPTY
        if cleanup.c4_request_bank:
            size = self.ring4.size
            self.ring4.memory[cleanup.row * size : (cleanup.row + 1) * size] = EMPTY

    def clear_swa_banks(self, pages: Sequence[int] | np.ndarray) -> None:
        """Freed SWA pages: their C4 banks become empty, and what they held is garbage now."""
        for page in np.asarray(pages).tolist():
            self.swa[page * self.page : (page + 1) * self.page] = GARBAGE
            if self.by_page:
                self.ring4.memory[page * self.ring4.size : (page + 1) * self.ring4.size] = EMPTY

    def capture(self, row: int, end: int) -> np.ndarray:
        """C4 rows before ``end`` from the request's bank."""
        return self.ring4.memory[self.state_row(self.ring4, row, np.arange(end - 4, end))].copy()

    def restore(self, row: int, end: int, rows: object) -> None:
        assert isinstance(rows, np.ndarray)
        self.ring4.memory[self.state_row(self.ring4, row, np.arange(end - 4, end))] = rows
