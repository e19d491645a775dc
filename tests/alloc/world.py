"""What can happen in the serving world: admission, prefill, verify, learning, finishing, caching, refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from dsv4_npu.alloc import AllocSpec
from dsv4_npu.alloc.state import C128, FULL, GAP, HELD, HOLES
from dsv4_npu.errors import CapacityError, Dsv4NpuError, OwnershipError

from .world_core import Node, Pending, Request, WorldCore, WorldError

__all__ = ["OPERATIONS", "SPECS", "World", "WorldError", "random_run"]


class World(WorldCore):
    """Operations take three integers each and map them to something legal."""

    def pick(self, a: int, ready: Callable[[Request], bool] = lambda _: True) -> Request | None:
        fitting = [request for request in self.live.values() if ready(request)]
        return fitting[a % len(fitting)] if fitting else None

    def decoding(self, request: Request) -> bool:
        ready = self.main.committed(request.row) >= request.prompt
        return ready and not self.main.state.flags[request.row] & HOLES

    def gap(self, request: Request) -> bool:
        return bool(self.main.state.flags[request.row] & GAP)

    def idle(self, request: Request) -> bool:
        return not request.pending

    def admit(self, a: int, b: int, c: int) -> None:
        limit = self.spec.row_width - 64
        kind = a // 3 % 3
        length = (1 + b % 300, min(limit, max(1, self.group - 100 + b % 600)), 1 + b % limit)[kind]
        own = min(length // 4, 200)
        tokens = [a % 3 * 7 + i for i in range(length - own)] + [c * 31 + i for i in range(own)]
        try:
            self.do("admit_check", length + 32)
            row = self.do("open", self.next_rid)
        except CapacityError:
            return
        request = Request(self.next_rid, row, length, tokens)
        request.refresh()
        self.live[self.next_rid] = request
        self.next_rid += 1
        pages, c128, hit = self.match(request, length - 1)
        if hit:
            self.do("attach_prefix", row, pages, c128, hit)
            self.events["prefix hit"] += 1

    def match(self, request: Request, limit: int) -> tuple[list[int], list[int], int]:
        pages: list[int] = []
        c128: list[int] = []
        best: tuple[list[int], list[int], int] = ([], [], 0)
        need = -(-(self.spec.window - 1) // self.spec.page_size)
        for end in range(self.group, limit + 1, self.group):
            node = self.cache.nodes.get(request.prints[end - 1])
            if node is None:
                break
            pages, c128 = pages + node.pages, c128 + node.c128
            if all(self.main.state.full_to_swa[page] for page in pages[-need:]):
                best = (pages, c128, end)
        return best

    def prefill(self, a: int, b: int, c: int) -> None:
        request = self.pick(a, lambda r: self.main.committed(r.row) < r.prompt and self.idle(r))
        if request is None or self.main.state.flags[request.row] & HOLES:
            return
        start = self.main.committed(request.row)
        stop = min(request.prompt, start + 1 + b % 1100)
        try:
            self.transact(lambda tx: tx.extend(request.row, stop), commit=True)
        except CapacityError:
            if not self.cache_evict(a, b, c):
                self.abort(request)
            return
        self.write(request.row, start, request.prints[start:stop])
        self.do("commit", request.row, stop)
        if request.rid % 2:
            self.evict(request)

    def evict(self, request: Request) -> None:
        self.events["eviction"] += self.do("evict_window", request.row) > 0

    def launch(self, a: int, b: int, c: int) -> None:
        width = self.spec.verify_width if b % 3 else 1 + b % self.spec.verify_width
        batch = [
            r
            for r in self.live.values()
            if self.decoding(r) and not self.gap(r) and len(r.pending) < 2 and (a % 3 == 0 or (a >> r.rid % 8) & 1)
        ]
        batch = [
            r for r in batch if self.main.committed(r.row) + 2 * width <= self.spec.row_width - self.spec.page_size
        ]
        batch = [r for r in batch if all(one.width == width for one in r.pending)]
        if not batch:
            return
        rows = np.array([r.row for r in batch] + [0] * (c % 3), np.int64)
        try:
            self.do("decode_step", rows, 2 * width, width)
        except CapacityError:
            self.abort(batch[a % len(batch)])
            return
        except OwnershipError:
            return
        self.do("flush")
        epoch = self.do("launch")
        state = self.main.state
        self.reading[epoch] = [
            np.unique(state.block_table[rows]),
            np.unique(state.full_to_swa[state.block_table[rows]]),
            np.unique(state.c128_table[rows]),
        ]
        self.reading[epoch] = [pages[pages > 0] for pages in self.reading[epoch]]
        for i, request in enumerate(batch):
            self.events["overlapped verify"] += bool(request.pending)
            accept = 1 + (c + 3 * i) % width
            start = self.main.committed(request.row) + sum(one.accept for one in request.pending)
            for j in range(accept):
                if start + j >= len(request.tokens):
                    request.grow(c + 17 * j)
            garbage = [-(epoch * 100 + j + 2) for j in range(width - accept)]
            self.write(request.row, start, request.prints[start : start + accept] + garbage)
            request.pending.append(Pending(epoch, accept, width))

    def done(self, a: int, b: int, c: int) -> None:
        if self.reading:
            epochs = sorted(self.reading)
            epoch = epochs[0 if b % 4 else a % len(epochs)]
            del self.reading[epoch]
            self.do("done", epoch)

    def learn(self, a: int, b: int, c: int) -> None:
        request = self.pick(a, lambda r: bool(r.pending) and r.pending[0].epoch not in self.reading)
        if request:
            one = request.pending.pop(0)
            row = np.array([request.row, 0])
            self.do("commit_batch", row, np.array([self.main.committed(request.row) + one.accept, 5]))

    def evict_window(self, a: int, b: int, c: int) -> None:
        request = self.pick(a, lambda r: r.rid % 2 == 1 or c % 8 == 0)
        if request:
            self.evict(request)

    def trim(self, a: int, b: int, c: int) -> None:
        request = self.pick(a, self.idle)
        if request:
            low, high = self.main.shared(request.row), self.main.allocated(request.row)
            boundary = low + b % (high - low + 1) if c % 5 == 0 else max(low, self.main.committed(request.row))
            self.do("trim", request.row, boundary)
            self.forget(request)

    def rewind(self, a: int, b: int, c: int) -> None:
        request = self.pick(a, self.idle)
        if request:
            try:
                self.do("rewind", request.row, max(0, self.main.committed(request.row) - b % 200))
            except OwnershipError:
                return
            self.forget(request)

    def forget(self, request: Request) -> None:
        """Tokens behind the committed end were taken back: what follows is another history."""
        length = self.main.committed(request.row)
        if length < len(request.tokens):
            del request.tokens[max(length, request.prompt) :]
            request.refresh()

    def finish(self, a: int, b: int, c: int) -> None:
        request = self.pick(a, self.decoding)
        if request is None:
            return
        state, row = self.main.state, request.row
        groups = self.main.committed(row) // self.group
        if not state.flags[row] & (GAP | HOLES) and groups:
            self.insert(request, groups)
        self.abort(request)

    def insert(self, request: Request, groups: int) -> None:
        row, page, side = request.row, self.spec.page_size, self.spec.group_tokens
        keys = [request.prints[(i + 1) * self.group - 1] for i in range(groups)]
        known = next((i for i, key in enumerate(keys) if key not in self.cache.nodes), groups)
        if known * self.group > self.main.shared(row):
            nodes = [self.cache.nodes[key] for key in keys[:known]]
            pages, c128 = [p for n in nodes for p in n.pages], [p for n in nodes for p in n.c128]
            try:
                self.do("attach_prefix", row, pages, c128, known * self.group)
            except OwnershipError:
                return
            self.events["prefix adopted"] += 1
        pages, c128 = (array.tolist() for array in self.do("take_over", row, groups * self.group // page))
        for i in range(known, groups):
            count, counted = self.group // page, self.group // side
            mine, pages = pages[:count], pages[count:]
            held, c128 = c128[:counted], c128[counted:]
            swa = {one for one in mine if self.main.state.full_to_swa[one]}
            self.events["take over"] += 1
            self.cache.nodes[keys[i]] = Node(keys[i - 1] if i else 0, mine, held, swa)
        if pages or c128:
            raise WorldError("take_over returned more than the groups hold")

    def abort(self, request: Request) -> None:
        self.events["freed in flight"] += bool(self.reading)
        self.do("close", request.row, request.rid)
        del self.live[request.rid]
        try:
            self.do("close", request.row)
        except OwnershipError:
            return
        raise WorldError("a row was closed twice")

    def abort_any(self, a: int, b: int, c: int) -> None:
        request = self.pick(a)
        if request:
            self.abort(request)

    def cache_evict(self, a: int, b: int, c: int) -> bool:
        parents = {node.parent for node in self.cache.nodes.values()}
        readers = self.main.state.full_readers
        leaves = [
            key for key, n in self.cache.nodes.items() if key not in parents and not any(readers[p] for p in n.pages)
        ]
        if leaves:
            node = self.cache.nodes.pop(leaves[a % len(leaves)])
            if b % 2:
                self.do("free_pages", node.pages)
            else:
                self.do("free_slots", [page * self.spec.page_size + c % self.spec.page_size for page in node.pages])
            self.do("release_c128", node.c128)
        return bool(leaves)

    def cache_evict_swa(self, a: int, b: int, c: int) -> None:
        nodes = [n for n in self.cache.nodes.values() if not any(self.main.state.full_readers[p] for p in n.pages)]
        if nodes:
            node = nodes[a % len(nodes)]
            self.do("free_swa", node.pages)
            node.swa.clear()

    def retain(self, a: int, b: int, c: int) -> None:
        held = np.flatnonzero(self.main.state.c128_count > 0).tolist()
        if held:
            pages = [held[a % len(held)], held[b % len(held)]]
            self.do("retain_c128", pages)
            self.cache.extra += pages

    def release(self, a: int, b: int, c: int) -> None:
        count = a % (len(self.cache.extra) + 1)
        pages, self.cache.extra = self.cache.extra[:count], self.cache.extra[count:]
        self.do("release_c128", pages)

    def replace_c128(self, a: int, b: int, c: int) -> None:
        """The pages that a row has already, and may be the only holder of, as when each chunk sets its prefix again."""
        request = self.pick(a)
        if request:
            held = int(self.main.state.c128_cols[request.row])
            self.do(
                "replace_c128_prefix", request.row, self.main.state.c128_table[request.row, : b % (held + 1)].tolist()
            )

    def rollback(self, a: int, b: int, c: int) -> None:
        rows = [r for r in self.live.values() if (a >> r.rid % 8) & 1 and not self.main.state.flags[r.row] & HOLES]

        def plan(tx: Any) -> None:
            for i, r in enumerate(rows):
                end = min(self.main.allocated(r.row) + (b >> i) % 600, self.spec.row_width)
                tx.extend(r.row, end, (None, 0, 128, 300)[(c + i) % 4])

        before = [alloc.state.arrays() for alloc in self.allocs]
        before = [{name: array.copy() for name, array in one.items()} for one in before]
        with contextlib.suppress(CapacityError):
            self.transact(plan, commit=False)
        for alloc, arrays in zip(self.allocs, before, strict=True):
            for name, array in alloc.state.arrays().items():
                if name != "counters" and not np.array_equal(array, arrays[name]):
                    raise WorldError(f"rollback changed {name}")

    def prealloc(self, a: int, b: int, c: int) -> None:
        """A request whose pages exist before its content: SWA only for the tail, then committed at once."""
        length = 1 + b % (self.spec.row_width - 64)
        try:
            row = self.do("open", self.next_rid)
        except CapacityError:
            return
        request = Request(self.next_rid, row, length, [c + i for i in range(length)])
        request.refresh()
        self.live[self.next_rid] = request
        self.next_rid += 1
        tail = (None, 0, 128, 256)[c % 4]
        try:
            self.transact(lambda tx: tx.extend(row, length, tail), commit=True)
        except CapacityError:
            self.abort(request)
            return
        if a % 3 == 0:
            self.abort(request)
            return
        self.write(row, 0, request.prints)
        self.do("commit", row, length)

    def free_own_slots(self, a: int, b: int, c: int) -> None:
        request = self.pick(a, self.idle)
        if request:
            own = self.main.state.block_table[request.row, self.main.shared(request.row) // self.spec.page_size :]
            own = own[own > 0]
            if len(own):
                slot = int(own[b % len(own)]) * self.spec.page_size + c % self.spec.page_size
                self.do("free_swa_slots" if c % 2 else "free_slots", [slot, slot])

    def drain_log(self, a: int, b: int, c: int) -> None:
        self.do("drain_freed_swa")

    def resize(self, a: int, b: int, c: int) -> None:
        try:
            self.do("resize_c128", max(1, self.main.state.total(C128) + b % 9 - 4))
        except OwnershipError:
            return

    def nonsense(self, a: int, b: int, c: int) -> None:
        """Calls that are mostly refused; a refusal changes nothing but is the same everywhere."""
        row, page = a % (self.spec.request_rows + 3) - 1, b % (self.spec.full_pages + 3) - 1
        side = b % (self.main.state.total(C128) + 3) - 1
        state = self.main.state
        own = row > 0 and row <= self.spec.request_rows and state.page_state[3][row] == HELD
        calls: list[tuple[Any, ...]] = [
            ("commit", row or -1, -1 - b),
            ("commit", row or -1, self.spec.row_width + 1),
            ("rewind", row, -1),
            ("trim", row, self.spec.row_width + 1),
            ("take_over", row, self.spec.columns + 1),
            ("attach_prefix", row, [page, page], [side], self.group),
            ("attach_prefix", row, [], [], 100),
            ("attach_prefix", row, [page] * (self.group // self.spec.page_size), [0], self.group),
            ("free_pages", [0]),
            ("retain_c128", [0]),
            ("retain_c128", [self.main.state.total(C128) + 1]),
            ("slots", row, 0, self.spec.row_width + 1),
            ("slots", row, 5, 4),
            ("decode_step", np.array([row, 1, 1]), 4, 5),
            ("replace_c128_prefix", row, [side] * (self.spec.sidecar_columns + 1)),
            ("free_slots", [5]),
            ("free_slots", [(self.spec.full_pages + 1) * self.spec.page_size]),
        ]
        if page >= 0 and page <= self.spec.full_pages and state.page_state[FULL][page] != 2:
            calls += [("free_pages", [page]), ("free_swa", [page])]
        if 0 <= side <= self.main.state.total(C128):
            calls.append(("release_c128", [side] * (int(state.c128_count[side]) + 1)))
        if not own:
            calls.append(("close", row))
        call = calls[c % len(calls)]
        before = {name: array.copy() for name, array in state.arrays().items()}
        try:
            self.do(*call)
        except Dsv4NpuError:
            for name, array in state.arrays().items():
                if not np.array_equal(array, before[name]):
                    raise WorldError(f"refused {call} changed {name}") from None
        else:
            raise WorldError(f"{call} was not refused")

    def drain(self) -> None:
        """Everything ends: every family is back at its initial count."""
        for epoch in sorted(self.reading):
            self.do("done", epoch)
        self.reading.clear()
        for request in list(self.live.values()):
            self.abort(request)
        for key in list(self.cache.nodes):
            node = self.cache.nodes.pop(key)
            self.do("free_pages", node.pages)
            self.do("release_c128", node.c128)
        self.do("release_c128", self.cache.extra)
        self.cache.extra = []
        self.do("flush")
        self.check()
        for name, (used, _, _) in self.main.usage().items():
            if used:
                raise WorldError(f"{used} {name} pages are lost")
        if self.main.state.tables.any():
            raise WorldError("tables are not zero at the end")


OPERATIONS: dict[str, int] = {
    "admit": 12,
    "prefill": 30,
    "launch": 30,
    "done": 20,
    "learn": 40,
    "evict_window": 8,
    "trim": 2,
    "rewind": 1,
    "finish": 8,
    "abort_any": 1,
    "cache_evict": 2,
    "cache_evict_swa": 1,
    "retain": 1,
    "release": 1,
    "replace_c128": 2,
    "rollback": 3,
    "prealloc": 3,
    "free_own_slots": 1,
    "drain_log": 1,
    "resize": 1,
    "nonsense": 4,
}


#: Geometries that exercise different relations of page, C128 page and group, each small enough to run dry often.
SPECS = {
    "group of 16 pages": AllocSpec(128, 16, 96, 80, 14, 5, 4352, verify_width=6),
    "group of 2 pages": AllocSpec(128, 2, 40, 30, 30, 5, 1536, verify_width=6),
    "page of 2 groups": AllocSpec(256, 1, 30, 20, 60, 5, 1536, verify_width=10),
    "wide page, wide group": AllocSpec(256, 16, 48, 40, 14, 4, 4352, verify_width=4, c4_state_owner="request"),
}


def random_run(world: World, seed: int, steps: int) -> None:
    """``steps`` operations drawn by weight, each followed by every check, then the end of everything."""
    rng = np.random.default_rng(seed)
    names = list(OPERATIONS)
    weights = np.array([OPERATIONS[name] for name in names], np.float64)
    chosen = rng.choice(len(names), size=steps, p=weights / weights.sum())
    numbers = rng.integers(0, 1 << 16, size=(steps, 3))
    for which, (a, b, c) in zip(chosen.tolist(), numbers.tolist(), strict=True):
        getattr(world, names[which])(a, b, c)
        world.check()
    world.drain()
