"""Which compressor rows are still in the rings, and so how far a request may go back.

A ring keeps one row per slot; a later save to the slot replaces it. :class:`RingLog` follows on the host which
positions of a request's history each ring still holds, from nothing but the batches that ran and the save rule.
Going back to a target needs every row that a window closing at or after the target reads before it: these are the
target's live rows. What is not in the log is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsv4_npu import addressing
from dsv4_npu.alloc.spec import AllocSpec
from dsv4_npu.errors import ConfigError, InputError

Bank = Literal["request", "swa_page"]


@dataclass(frozen=True)
class RingRule:
    """One ring: compression ratio, rows of a bank, and whether a bank belongs to the request or to each SWA page."""

    ratio: int
    ring: int
    bank: Bank

    @property
    def pad(self) -> int:
        """Write pad: rows that a batch may write past the committed end."""
        return addressing.write_pad(self.ring, self.ratio)

    def live(self, target: int) -> tuple[int, int]:
        """Positions ``[first, target)`` whose rows a request that continues at ``target`` reads."""
        first = (target // self.ratio - (addressing.OVERLAP[self.ratio] - 1)) * self.ratio
        return max(0, first), target


class Resident:
    """Positions of one history whose rows a ring holds: disjoint half-open spans, ascending."""

    def __init__(self, rule: RingRule, page: int) -> None:
        self.rule, self.page = rule, page
        self.spans: list[list[int]] = []

    def save(self, start: int, end: int) -> None:
        """Rows of ``[start, end)`` are saved in ascending order; whatever shared their slots is gone."""
        if start >= end:
            return
        spans, ring = self.spans, self.rule.ring
        if self.rule.bank == "request":
            start = max(start, end - ring)
            if len(spans) == 1 and spans[0][0] <= start <= spans[0][1] <= end:
                spans[0][0], spans[0][1] = max(spans[0][0], end - ring), end
                return
            self._replace(start, end, 0)
            return
        for first in range(addressing.floor_to(start, self.page), end, self.page):
            low, high = max(start, first), min(end, first + self.page)
            self._replace(max(low, high - ring), high, first)

    def cut(self, end: int) -> None:
        """Positions from ``end`` on are no history any more."""
        spans = self.spans
        while spans and spans[-1][0] >= end:
            spans.pop()
        if spans and spans[-1][1] > end:
            spans[-1][1] = end

    def forget(self, start: int) -> None:
        """Positions before ``start`` are of no interest any more (their SWA pages are gone)."""
        spans = self.spans
        while spans and spans[0][1] <= start:
            spans.pop(0)
        if spans and spans[0][0] < start:
            spans[0][0] = start

    def holds(self, start: int, end: int) -> bool:
        """Whether the rows of ``[start, end)`` are all there."""
        return start >= end or any(low <= start and end <= high for low, high in self.spans)

    def _replace(self, start: int, end: int, bank_start: int) -> None:
        """Save ``[start, end)`` (at most a ring): drop the positions that share a slot with it in the same bank."""
        ring, kept = self.rule.ring, []
        for low, high in self.spans:
            image = start - max(0, start - high + ring) // ring * ring
            while image + end - start > max(low, bank_start) and low < high:
                first, last = max(image, bank_start), image + end - start
                if last < high:
                    kept.append([last, high])
                high = min(high, first)
                image -= ring
            if low < high:
                kept.append([low, high])
        self.spans = kept
        self.cut(end)
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        self.spans.append([start, end])
        self.spans.sort()
        joined: list[list[int]] = []
        for low, high in self.spans:
            if joined and low <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], high)
            else:
                joined.append([low, high])
        self.spans = joined


class RingLog:
    """What the C4 and the C128 ring hold of one request's history.

    Decodes are noted as one run and worked in when somebody asks: a verify saves all of its rows (its width is at most
    the write pad), and each one begins where the history ended.
    """

    def __init__(self, rules: RollbackRules) -> None:
        self.rules = rules
        self._c4 = Resident(rules.c4, rules.page)
        self._c128 = Resident(rules.c128, rules.page)
        self._run: tuple[int, int, int] | None = None
        self._floor = 0

    @property
    def c4(self) -> Resident:
        """The C4 ring, up to date."""
        self._work_in()
        self._c4.forget(self._floor)
        return self._c4

    @property
    def c128(self) -> Resident:
        """The C128 ring, up to date."""
        self._work_in()
        return self._c128

    def ran(self, start: int, end: int) -> None:
        """A batch ``[start, end)`` ran and all of it is history: a prefill chunk."""
        for ring in (self.c4, self.c128):
            ring.cut(start)
            rule = ring.rule
            saved = addressing.save_start(start, end, rule.ratio, rule.pad)
            if rule.bank == "swa_page" and self.rules.saves_page_tails:
                for tail in range(addressing.ceil_to(start + 1, self.rules.page), end + 1, self.rules.page):
                    ring.save(max(start, rule.live(tail)[0]), min(tail, saved))
            ring.save(saved, end)

    def decoded(self, start: int, end: int, length: int) -> None:
        """A verify ``[start, end)`` ran from the end of the history; ``[start, length)`` is history now."""
        first, reached = (start, end) if self._run is None else self._run[:2]
        # A wide verify before a narrow one has written further than the narrow one.
        self._run = (first, max(reached, end), length)

    def overrun(self, start: int, end: int) -> None:
        """A batch whose outcome nobody wanted may have written rows anywhere in ``[start, end)``."""
        for ring in (self.c4, self.c128):
            ring.cut(start)
            ring.save(start, end)
            ring.cut(start)

    def cut(self, length: int) -> None:
        """The history is ``length`` positions long: what was saved behind it belongs to nobody."""
        self.c4.cut(length)
        self.c128.cut(length)
        self._floor = min(self._floor, length)

    def forget(self, start: int) -> None:
        """SWA pages before ``start`` are gone, and with them the banks that they own."""
        if self.rules.c4.bank == "swa_page":
            self._floor = start

    def adopt(self, length: int) -> None:
        """A shared prefix of ``length`` positions was attached: its overlap rows are there."""
        self.c4.save(*self.rules.c4.live(length))

    def overlap_kept(self, boundary: int) -> bool:
        """Whether the C4 rows that a request starting at ``boundary`` reads before it are there."""
        return not self.rules.compressed or self.c4.holds(*self.rules.c4.live(boundary))

    def resident(self, target: int) -> bool:
        """Whether every live row of ``target`` is in its ring."""
        return not self.rules.compressed or all(ring.holds(*ring.rule.live(target)) for ring in (self.c4, self.c128))

    def _work_in(self) -> None:
        if self._run is None:
            return
        start, end, length = self._run
        self._run = None
        for ring in (self._c4, self._c128):
            ring.cut(start)
            ring.save(max(start, self._floor if ring is self._c4 else 0), end)
            ring.cut(length)


@dataclass(frozen=True)
class RollbackRules:
    """The rings and the page that bound going back.

    ``saves_page_tails``: the compressor also saves the last rows of each SWA page that a long batch passes, so that
    every page boundary can be continued from, not only those near the end of a batch. The plain save rule does not.
    ``compressed`` is False for a pool without compressor (another model): any position can be continued from there.
    ``lookahead``: tokens behind a position that its rows depend on: 1 with an MTP stage, whose row at position i is
    made from token i + 1, else 0. A prefix is shared, and a history continued, only where these tokens are the same.
    """

    page: int
    c4: RingRule
    c128: RingRule
    saves_page_tails: bool = False
    compressed: bool = True
    lookahead: int = 0

    def __post_init__(self) -> None:
        if self.c4.ratio != addressing.C4_RATIO or self.c128.ratio != addressing.C128_RATIO:
            raise ConfigError(f"rings of ratio {self.c4.ratio} and {self.c128.ratio}: 4 and 128 are needed")
        if self.c128.bank != "request":
            raise ConfigError("the C128 ring belongs to the request on every platform")

    @classmethod
    def of(
        cls, spec: AllocSpec, speculative: bool, *, saves_page_tails: bool = False, lookahead: int = 0
    ) -> RollbackRules:
        """The rules of an allocator's sizes; refuses a verify width above the write pad."""
        c4 = RingRule(addressing.C4_RATIO, addressing.ring_size(addressing.C4_RATIO, speculative), spec.c4_state_owner)
        c128 = RingRule(addressing.C128_RATIO, addressing.ring_size(addressing.C128_RATIO, speculative), "request")
        for rule in (c4, c128):
            if spec.verify_width > max(1, rule.pad):
                raise ConfigError(
                    f"verify_width = {spec.verify_width}: at most {max(1, rule.pad)} is allowed by the ring of "
                    f"{rule.ring} rows of ratio {rule.ratio}"
                )
        return cls(spec.page_size, c4, c128, saves_page_tails, lookahead=lookahead)

    def log(self) -> RingLog:
        """The log of a new request: nothing has been saved."""
        return RingLog(self)

    def target(self, log: RingLog, wanted: int, low: int) -> int | None:
        """The largest multiple of the page in ``[low, wanted]`` whose live rows are all resident; None without one."""
        if low < 0 or wanted < 0:
            raise InputError(f"target {wanted}, lowest {low}: 0 or more is allowed")
        if not self.compressed:
            return wanted if wanted >= low else None
        for target in range(addressing.floor_to(wanted, self.page), low - 1, -self.page):
            if log.resident(target):
                return target
        return None

    def tail_saved(self, start: int, end: int, boundary: int) -> bool:
        """Whether a batch ``[start, end)`` saves the C4 rows that a later request starting at ``boundary`` reads."""
        first = max(start, self.c4.live(boundary)[0])
        if not self.compressed or (self.c4.bank == "swa_page" and self.saves_page_tails):
            return True
        return addressing.save_start(start, end, self.c4.ratio, self.c4.pad) <= first
