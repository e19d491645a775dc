"""Host memory for snapshots: bounded, least recently used first, and nothing is dropped without a word."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from dsv4_npu.errors import CapacityError, ConfigError, OwnershipError
from dsv4_npu.movement.snapshot import Snapshot


class HostStore:
    """Snapshots by key, up to ``budget_bytes`` of rows.

    Every key that was put comes out exactly once: with its snapshot, or as evicted (``take`` returns None, and the
    request is recomputed).
    """

    def __init__(self, budget_bytes: int) -> None:
        if type(budget_bytes) is not int or budget_bytes < 1:
            raise ConfigError(f"budget_bytes = {budget_bytes!r}: an integer >= 1 is needed")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._held: OrderedDict[Hashable, Snapshot] = OrderedDict()
        self._evicted: set[Hashable] = set()

    def put(self, key: Hashable, snapshot: Snapshot) -> list[Hashable]:
        """Keep a snapshot; returns the keys whose snapshots were evicted for it, oldest use first.

        Raises CapacityError for one that is larger than the budget, OwnershipError for a key that is held already.
        """
        if key in self._held or key in self._evicted:
            raise OwnershipError(f"snapshot {key!r} is there already: take or drop it first")
        if snapshot.nbytes > self.budget_bytes:
            raise CapacityError(
                f"snapshot {key!r} of {snapshot.nbytes} bytes: the host budget is {self.budget_bytes} bytes"
            )
        evicted = []
        while self.used_bytes + snapshot.nbytes > self.budget_bytes:
            oldest, old = self._held.popitem(last=False)
            self.used_bytes -= old.nbytes
            evicted.append(oldest)
        self._evicted.update(evicted)
        self._held[key] = snapshot
        self.used_bytes += snapshot.nbytes
        return evicted

    def get(self, key: Hashable) -> Snapshot | None:
        """A snapshot that stays, marked as used now; None when it was evicted."""
        self._expect(key)
        if key in self._evicted:
            return None
        self._held.move_to_end(key)
        return self._held[key]

    def touch(self, key: Hashable) -> bool:
        """Mark a snapshot as used now; False when it was evicted."""
        return self.get(key) is not None

    def take(self, key: Hashable) -> Snapshot | None:
        """Hand a snapshot out and forget it; None when it was evicted: its request must be recomputed."""
        self._expect(key)
        if key in self._evicted:
            self._evicted.remove(key)
            return None
        snapshot = self._held.pop(key)
        self.used_bytes -= snapshot.nbytes
        return snapshot

    def drop(self, key: Hashable) -> None:
        """Forget a snapshot whose request ended."""
        self.take(key)

    def keys(self) -> list[Hashable]:
        """Keys of the snapshots held, least recently used first."""
        return list(self._held)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def _expect(self, key: Hashable) -> None:
        if key not in self._held and key not in self._evicted:
            raise OwnershipError(f"snapshot {key!r} was never put, or was taken already")
