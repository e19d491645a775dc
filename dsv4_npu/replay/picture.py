"""What the report draws, taken from a live allocator: owners over time, page maps, reference counts.

Only the host's arrays are read; nothing here changes the allocator.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dsv4_npu.alloc import KVAllocator
from dsv4_npu.alloc.state import C128, FULL, HELD, OUTSIDE, QUARANTINED, SWA, TAKEN

#: Owners of a page. ``shared`` is a page of a cache (or another holder outside of the rows) that request rows read.
KINDS: Final = ("free", "request", "cache", "shared", "transaction", "quarantine", "dummy")
#: Their letters in a run-length encoded map.
LETTERS: Final = "frcstqd"
FREE_, REQUEST, CACHE, SHARED, TRANSACTION, QUARANTINE, DUMMY = range(len(KINDS))
FAMILIES: Final = ((FULL, "FULL"), (SWA, "SWA"), (C128, "C128"))

Kinds = npt.NDArray[np.uint8]


def owner_kinds(allocator: KVAllocator) -> dict[str, Kinds]:
    """The owner of every page, as an index into KINDS: uint8 ``[total + 1]`` per family, page 0 included."""
    state = allocator.state
    out: dict[str, Kinds] = {}
    for family, name in FAMILIES:
        kinds = np.zeros(state.total(family) + 1, np.uint8)
        kinds[state.page_state[family] == HELD] = REQUEST
        kinds[state.page_state[family] == TAKEN] = TRANSACTION
        kinds[state.page_state[family] == QUARANTINED] = QUARANTINE
        out[name] = kinds
    full = out["FULL"]
    outside = state.page_state[FULL] == OUTSIDE
    full[outside] = np.where(state.full_readers[outside] > 0, SHARED, CACHE)
    mapped = np.flatnonzero(out["SWA"] == REQUEST)
    out["SWA"][mapped] = full[state.swa_full[mapped]]
    rows = np.bincount(state.c128_table.ravel(), minlength=len(out["C128"]))
    held = np.flatnonzero(out["C128"] == REQUEST)
    kinds_held = np.where(rows[held] == 0, CACHE, np.where(state.c128_count[held] > rows[held], SHARED, REQUEST))
    out["C128"][held] = kinds_held
    for kinds in out.values():
        kinds[0] = DUMMY
    return out


def run_lengths(kinds: Kinds) -> str:
    """Run-length encoding of owner kinds in page order, a letter and a number per run: ``d1r12f3``."""
    edges = np.flatnonzero(np.diff(kinds)) + 1
    starts = np.concatenate([[0], edges])
    lengths = np.diff(np.concatenate([starts, [len(kinds)]]))
    return "".join(
        f"{LETTERS[kind]}{length}" for kind, length in zip(kinds[starts].tolist(), lengths.tolist(), strict=True)
    )


def snapshot(allocator: KVAllocator, time: float, label: str = "") -> dict[str, Any]:
    """A page map of every family and the histogram of C128 reference counts, as the report wants them."""
    counts = np.bincount(allocator.state.c128_count)
    return {
        "time": time,
        "label": label,
        "maps": {name: run_lengths(kinds) for name, kinds in owner_kinds(allocator).items()},
        "c128_refcounts": {str(count): int(pages) for count, pages in enumerate(counts) if count and pages},
    }


class FamilySeries:
    """Pages of each family by owner, sampled over time."""

    def __init__(self, allocator: KVAllocator, unit: str = "step") -> None:
        self._allocator, self._unit = allocator, unit
        self.times: list[float] = []
        self._counts: dict[str, list[npt.NDArray[np.int64]]] = {name: [] for _, name in FAMILIES}

    def sample(self, time: float) -> None:
        """Count the pages of every family by owner now."""
        self.times.append(time)
        for name, kinds in owner_kinds(self._allocator).items():
            self._counts[name].append(np.bincount(kinds, minlength=len(KINDS)))

    def thin(self) -> None:
        """Drop every second sample."""
        self.times = self.times[::2]
        self._counts = {name: counts[::2] for name, counts in self._counts.items()}

    def mean(self, name: str, *kinds: str) -> float:
        """Mean number of pages of a family with one of the owner ``kinds``, over the samples."""
        if not self.times:
            return 0.0
        counts = np.array(self._counts[name])[:, [KINDS.index(kind) for kind in kinds]]
        return float(counts.sum(axis=1).mean())

    def as_data(self) -> dict[str, Any]:
        """The keys ``time`` and ``families`` of the report."""
        families = []
        for family, name in FAMILIES:
            counts = np.array(self._counts[name]).reshape(-1, len(KINDS))
            total = self._allocator.state.total(family)
            kinds = {KINDS[kind]: counts[:, kind].tolist() for kind in range(REQUEST, DUMMY) if counts[:, kind].any()}
            families.append({"name": name, "total": total, "used": (total - counts[:, FREE_]).tolist(), "kinds": kinds})
        return {"time": {"unit": self._unit, "values": self.times}, "families": families}
