"""Invariants of a world, checked after each of its operations."""

from __future__ import annotations

import numpy as np

from dsv4_npu.alloc import KVAllocator
from dsv4_npu.alloc.prefix_cache import PrefixCache
from dsv4_npu.alloc.request import Request, State, Step
from dsv4_npu.alloc.state import C128, FREE, FULL, QUARANTINED, ROW, SWA


class Checks:
    """What must hold at any moment; nothing here is given out that a forward in flight may use."""

    alloc: KVAllocator
    cache: PrefixCache | None
    live: list[Request]
    steps: list[Step]
    in_flight: dict[int, tuple[set[int], set[int], set[int], set[int]]]
    previous: tuple[set[int], ...]

    def flush(self) -> None:
        self.alloc.flush()

    def _used(self) -> tuple[set[int], ...]:
        """Per family, pages (rows) that are neither free nor waiting."""
        state = self.alloc.state
        return tuple(
            set(np.flatnonzero((state.page_state[f] != FREE) & (state.page_state[f] != QUARANTINED)).tolist())
            for f in (FULL, SWA, C128, ROW)
        )

    def _tables(self) -> tuple[bytes, ...]:
        state = self.alloc.state
        return state.block_table.tobytes(), state.c128_table.tobytes(), state.full_to_swa.tobytes()

    def _reads(self, step: Step) -> tuple[set[int], set[int], set[int], set[int]]:
        """What a forward that starts now may touch."""
        state, rows = self.alloc.state, [int(row) for row in step.rows if row]
        full = set(state.block_table[rows].ravel().tolist())
        swa = set(state.full_to_swa[sorted(full)].tolist())
        return full - {0}, swa - {0}, set(state.c128_table[rows].ravel().tolist()) - {0}, set(rows)

    def check(self) -> None:
        now = self._used()
        for family in range(4):
            fresh = now[family] - self.previous[family]
            for number, reads in self.in_flight.items():
                step = next(s for s in self.steps if s.number == number)
                if family == 3 or not step.done:
                    both = fresh & reads[family]
                    assert not both, f"family {family}: {both} given out while step {number} may use them"
        self.previous = now
        self.alloc.audit()
        self.check_requests()
        if self.cache is not None:
            self.check_cache(self.cache)

    def check_requests(self) -> None:
        spec, state = self.alloc.spec, self.alloc.state
        for request in self.live:
            if not request.row:
                continue
            committed, allocated = self.alloc.committed(request.row), self.alloc.allocated(request.row)
            assert 0 <= committed <= allocated <= spec.row_width
            if request.state is State.DECODE:
                assert len(request) == committed + 1
            cursor = int(state.evict_cursor[request.row]) * spec.page_size
            assert cursor <= max(0, committed - max(spec.window, spec.verify_width)) // spec.page_size * spec.page_size
            assert self.alloc.shared(request.row) == (self.cache.shared_end(request.row) if self.cache else 0)

    def check_cache(self, cache: PrefixCache) -> None:
        nodes = cache.walk()
        assert len(nodes) == cache.nodes
        readers = [cache._readers[r.row] for r in self.live if r.row]
        assert len(readers) == len(cache._readers)
        totals = [0, 0, 0]
        for node in nodes:
            assert node.locks == sum(node in list(reader.path()) for reader in readers)
            assert node.swa == np.count_nonzero(self.alloc.state.full_to_swa[node.full_pages])
            if not node.locks:
                totals = [a + b for a, b in zip(totals, node.counts(), strict=True)]
        assert tuple(totals) == tuple(cache._idle.total)
