"""Retracted requests whose memory waits on the host: they come back without a recompute."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.request import Request
from dsv4_npu.errors import CapacityError
from dsv4_npu.movement import HostStore, restore_snapshot, take_snapshot
from dsv4_npu.movement.snapshot import digest_of
from dsv4_npu.pools import DSV4Pools


@dataclass
class ParkingCounts:
    """What became of retractions.

    Attributes:
        saved: snapshots that went to the host.
        restored: snapshots that came back; ``positions``: history that was not computed again for it.
        evicted: snapshots that gave way to later ones.
        refused: retractions without a snapshot: larger than the budget, rows not proved to be in their rings, or no
            token known behind the last position although a draft stage's row of it depends on one (a session whose
            turn ended inside an accepted run).
        empty: retractions of requests that had computed nothing yet.
        outdated: snapshots of a session whose history was cut.
        put_off: restores for which the pages were not there yet.
        peak_bytes: the most host memory that snapshots took at once.
    """

    saved: int = 0
    restored: int = 0
    positions: int = 0
    evicted: int = 0
    refused: int = 0
    empty: int = 0
    outdated: int = 0
    put_off: int = 0
    peak_bytes: int = 0


class Parking:
    """Snapshots of requests that wait, within a budget of host bytes.

    A snapshot that is evicted, refused or outdated is counted, and its request computes its history again.
    """

    def __init__(self, pools: DSV4Pools, life: Lifecycle, budget_bytes: int) -> None:
        self.pools, self.life = pools, life
        self.store = HostStore(budget_bytes)
        self.counts = ParkingCounts()
        self._history: dict[Hashable, str] = {}

    def save(self, request: Request) -> None:
        """Copy a request's memory before it is retracted; none of its forwards may be in flight."""
        length = min(self.life.alloc.committed(request.row), len(request))
        if not length:
            self.counts.empty += 1
            return
        if not request.log.resident(length) or length + self.life.rules.lookahead > len(request):
            self.counts.refused += 1
            return
        snapshot = take_snapshot(self.pools, self.life.alloc, request)
        if snapshot.nbytes > self.store.budget_bytes:
            self.counts.refused += 1
            return
        self.counts.evicted += len(self.store.put(request.rid, snapshot))
        self._history[request.rid] = self._digest(request, length)
        self.counts.saved += 1
        self.counts.peak_bytes = max(self.counts.peak_bytes, self.store.used_bytes)

    def bring_back(self, request: Request) -> None:
        """Restore the snapshot of a freshly admitted request, if there is one.

        Raises CapacityError when the pages are not there; the snapshot stays, and nothing of the request was changed.
        """
        if request.rid not in self._history:
            return
        snapshot = self.store.get(request.rid)
        if snapshot is None:
            self.forget(request)
            return
        if self._digest(request, snapshot.length) != self._history[request.rid] or snapshot.length >= len(request):
            self.counts.outdated += 1
            self.forget(request)
            return
        cached = request.cached
        try:
            position = restore_snapshot(self.pools, self.life, request, snapshot)
        except CapacityError:
            self.counts.put_off += 1
            raise
        self.counts.restored += 1
        self.counts.positions += position - cached
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that ended, or came back."""
        if self._history.pop(request.rid, None) is not None:
            self.store.drop(request.rid)

    def _digest(self, request: Request, length: int) -> str:
        """A name of everything that rows of the first ``length`` positions were made from, as far as it is known."""
        return digest_of(request, length + self.life.rules.lookahead)
