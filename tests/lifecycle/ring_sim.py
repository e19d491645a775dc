"""A tiny ring machine of its own: what each slot holds after a history of batches, and which reads were right.

It shares no code with the package: the save rule, the slots and the reads are written down again from the facts.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RingSim:
    """One ring of ratio ``r``. ``banks`` maps a slot to ``(position, batch)``; ``truth[p]`` is the batch whose row p is
    the request's history. ``page`` set: one bank per page (renewed when its page is freed), else one per request.
    """

    r: int
    coff: int
    ring: int
    page: int | None = None
    tails: int | None = None
    banks: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)
    truth: list[int] = field(default_factory=list)
    renewed: dict[int, int] = field(default_factory=dict)
    batch: int = 0
    highest: int = 0

    @property
    def pad(self) -> int:
        spare = self.ring - self.coff * self.r
        return spare + 2 if spare > 0 else 0

    def slot(self, p: int) -> tuple[int, int, int]:
        bank = 0 if self.page is None else p // self.page
        return bank, self.renewed.get(bank, 0), p % self.ring

    def right(self, p: int) -> bool:
        """The slot of position p holds p's row of the present history."""
        return self.banks.get(self.slot(p)) == (p, self.truth[p])

    def run(self, start: int, end: int) -> list[int]:
        """Compute ``[start, end)``: returns the positions whose ring row was needed and wrong."""
        assert start <= len(self.truth)
        del self.truth[start:]
        needed: set[int] = set()
        for p in range(start, end):
            if p % self.r == self.r - 1:
                window = p - self.r + 1
                needed |= {q for q in range(window - (self.coff - 1) * self.r, start) if q >= 0}
        wrong = sorted(p for p in needed if not self.right(p))
        self.batch += 1
        self.highest = max(self.highest, end)
        self.truth += [self.batch] * (end - start)
        first = min(end // self.r * self.r - (self.coff - 1) * self.r, end - self.pad)
        for p in range(start, end):
            tail = self.tails is not None and p % self.tails >= self.tails - self.r
            if p >= first or tail:
                self.banks[self.slot(p)] = (p, self.batch)
        return wrong

    def commit(self, length: int) -> None:
        del self.truth[length:]

    def free_pages_from(self, position: int) -> None:
        """The pages behind ``position`` were freed: others get their banks, and new ones will come."""
        if self.page is not None:
            for bank in range(-(-position // self.page), self.highest // self.page + 1):
                self.renewed[bank] = self.renewed.get(bank, 0) + 1

    def resident(self, target: int) -> bool:
        """Every row before ``target`` that a window closing at or after it reads is right."""
        first = max(0, target // self.r * self.r - (self.coff - 1) * self.r)
        return all(self.right(p) for p in range(first, target))
