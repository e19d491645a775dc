"""Forwards in flight: which epochs have been launched and which are done."""

from __future__ import annotations

from dsv4_npu.errors import InputError


class Epochs:
    """Epochs are numbered from 1 in launch order; they may finish in any order.

    A page freed now may be read by every epoch launched so far, so it waits until all of these are done.
    """

    def __init__(self) -> None:
        self.launched = 0
        self._in_flight: set[int] = set()

    @property
    def in_flight(self) -> int:
        """Number of epochs launched and not done."""
        return len(self._in_flight)

    @property
    def tag(self) -> int:
        """The epoch that a page freed now waits for; 0 when nothing is in flight."""
        return self.launched if self._in_flight else 0

    @property
    def horizon(self) -> int:
        """The smallest epoch that is not done: whatever waits for an epoch below it is free."""
        return min(self._in_flight, default=self.launched + 1)

    def launch(self) -> int:
        """Begin an epoch."""
        self.launched += 1
        self._in_flight.add(self.launched)
        return self.launched

    def done(self, epoch: int) -> None:
        """End an epoch; raises InputError when it is not in flight."""
        if epoch not in self._in_flight:
            raise InputError(f"epoch {epoch} is not in flight: {sorted(self._in_flight)} are")
        self._in_flight.remove(epoch)
