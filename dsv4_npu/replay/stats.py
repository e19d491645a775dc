"""What a replay counts, and what it samples over time."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from dsv4_npu.alloc import KVAllocator
from dsv4_npu.replay.picture import FamilySeries, snapshot


@dataclass
class Counters:
    """Events of a replay. Lengths count tokens; the same seed gives the same numbers."""

    served: int = 0
    refused: int = 0
    admitted: int = 0
    readmitted: int = 0
    resumed: int = 0
    retracted: int = 0
    sessions_given_up: int = 0
    rounds: int = 0
    prefill_steps: int = 0
    prefill_chunks: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    session_tokens: int = 0
    prefilled_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    verified_rows: int = 0
    cleared_rows: int = 0
    cleared_swa_pages: int = 0
    table_entries: int = 0
    audits: int = 0
    accept_histogram: dict[int, int] = field(default_factory=dict)

    @property
    def operations(self) -> int:
        """Calls on one request: admissions, prefill chunks, decode plans and their commits, and ends."""
        entered = self.admitted + self.readmitted + self.resumed
        ended = self.served + self.retracted + self.sessions_given_up
        return entered + 2 * (self.prefill_chunks + self.decode_rows) + ended

    def accepted(self, lens: list[int]) -> None:
        """Count the accepted lengths of one decode step."""
        self.output_tokens += sum(lens)
        for length, count in Counter(lens).items():
            self.accept_histogram[length] = self.accept_histogram.get(length, 0) + count

    def as_dict(self) -> dict[str, Any]:
        """All counters by name."""
        return {**asdict(self), "accept_histogram": dict(sorted(self.accept_histogram.items()))}


class Samples:
    """Pages by owner, queue lengths and page maps over the rounds of a replay.

    At most ``most`` samples and ``most_maps`` page maps are kept: when there are more, every second one is dropped and
    the interval doubles, so that they stay evenly spread whatever the length of the run.
    """

    def __init__(self, allocator: KVAllocator, most: int = 500, most_maps: int = 32) -> None:
        self.families = FamilySeries(allocator, unit="round")
        self.lines: dict[str, list[float]] = {}
        self.maps: list[dict[str, Any]] = []
        self._allocator, self._most, self._most_maps = allocator, most, most_maps
        self._every = self._maps_every = 1

    def take(self, time: int, lines: dict[str, float]) -> None:
        """Sample the state of round ``time`` if it is its turn."""
        if time % self._every == 0:
            self.families.sample(time)
            for name, value in lines.items():
                self.lines.setdefault(name, []).append(value)
            if len(self.families.times) > self._most:
                self._every *= 2
                self.families.thin()
                self.lines = {name: values[::2] for name, values in self.lines.items()}
        if time % self._maps_every == 0:
            self.maps.append(snapshot(self._allocator, time))
            if len(self.maps) > self._most_maps:
                self._maps_every *= 2
                self.maps = self.maps[::2]

    def last(self, time: int, label: str) -> None:
        """One more page map, whoever's turn it is."""
        self.maps.append(snapshot(self._allocator, time, label))

    def as_data(self) -> dict[str, Any]:
        """The keys ``time``, ``families``, ``series`` and ``snapshots`` of the report."""
        if self.maps:
            fullest = min(self.maps, key=lambda one: sum(map(int, re.findall("f([0-9]+)", one["maps"]["FULL"]))))
            fullest["label"] = fullest["label"] or "peak FULL of the maps"
        return {
            **self.families.as_data(),
            "series": [{"name": name, "values": values} for name, values in self.lines.items()],
            "snapshots": self.maps,
        }
