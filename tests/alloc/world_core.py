"""A small serving world around the allocator: requests, a prefix cache, forwards in flight, and memory with content.

It drives one or more allocators with identical calls and compares everything that they return, raise and hold. Memory
is simulated by token: every slot that the allocator hands out is written with a fingerprint of the history up to its
position, and whatever a request can read must carry the fingerprint of its own history. That check knows nothing of
pages, reference counts or states, so it is independent of the ledger and of its audit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dsv4_npu.alloc import AllocSpec, Cleanup, KVAllocator
from dsv4_npu.alloc.state import FREE, GAP, HOLES
from dsv4_npu.errors import CapacityError, Dsv4NpuError, OwnershipError

MASK = (1 << 61) - 1


class WorldError(AssertionError):
    """The world found something that must not happen."""


@dataclass
class Pending:
    """A verify that was launched and whose accept length the host has not learned."""

    epoch: int
    accept: int
    width: int


@dataclass
class Request:
    rid: int
    row: int
    prompt: int
    tokens: list[int]
    prints: list[int] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)

    def grow(self, token: int) -> None:
        self.tokens.append(token)
        self.refresh()

    def refresh(self) -> None:
        del self.prints[len(self.tokens) :]
        last = self.prints[-1] if self.prints else 7
        for token in self.tokens[len(self.prints) :]:
            last = (last * 1_000_003 + token + 1) & MASK
            self.prints.append(last)


@dataclass
class Node:
    """A group of tokens in the world's cache."""

    parent: int
    pages: list[int]
    c128: list[int]
    swa: set[int]


class Cache:
    """Holder outside of the rows: nodes by the fingerprint at the end of their group."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self.extra: list[int] = []

    def held_pages(self) -> tuple[list[int], list[int], list[int]]:
        nodes = self.nodes.values()
        full = [page for node in nodes for page in node.pages]
        swa = [page for node in nodes for page in node.swa]
        return full, swa, [page for node in nodes for page in node.c128] + self.extra


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "value", call()
    except Dsv4NpuError as error:
        return type(error).__name__, str(error)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Cleanup):
        return isinstance(b, Cleanup) and equal(tuple(vars(a).values()), tuple(vars(b).values()))
    return bool(a == b)


class WorldCore:
    def __init__(self, spec: AllocSpec, backends: tuple[str, ...] = ("python",), audit_every: int = 1) -> None:
        self.spec = spec
        self.allocs = [KVAllocator(spec, backend=backend) for backend in backends]  # type: ignore[arg-type]
        self.main = self.allocs[0]
        self.cache = Cache()
        for alloc in self.allocs:
            alloc.register_holder("world cache", self.cache)
        self.group = math.lcm(spec.page_size, spec.group_tokens)
        page = spec.page_size
        self.mem = [
            np.full((spec.full_pages + 1) * page, -1, np.int64),
            np.full((spec.swa_pages + 1) * page, -1, np.int64),
            np.full((spec.full_pages + 1) * page // 4, -1, np.int64),
            np.full(4096 * spec.c128_page_size, -1, np.int64),
        ]
        self.live: dict[int, Request] = {}
        self.reading: dict[int, list[np.ndarray]] = {}
        self.next_rid = 0
        self.operations = 0
        self.audit_every = audit_every
        self.refused: dict[str, int] = {}
        self.events: Counter[str] = Counter()

    def do(self, name: str, *args: Any) -> Any:
        """One call on every allocator; the results must agree. Raises what they raise."""
        results = [outcome(lambda alloc=alloc: getattr(alloc, name)(*args)) for alloc in self.allocs]  # type: ignore[misc]
        return self.agree(name, args, results)

    def agree(self, name: str, args: Any, results: list[tuple[str, Any]]) -> Any:
        kind, value = results[0]
        for other in results[1:]:
            if other[0] != kind or not equal(value, other[1]):
                raise WorldError(f"{name}{args}: {results}")
        if kind != "value":
            self.refused[kind] = self.refused.get(kind, 0) + 1
            raise {"CapacityError": CapacityError, "OwnershipError": OwnershipError}.get(kind, Dsv4NpuError)(value)
        return value

    def transact(self, plan: Callable[[Any], None], commit: bool) -> Any:
        def run(alloc: KVAllocator) -> Any:
            with alloc.transaction() as tx:
                plan(tx)
                need, fits = tx.need, tx.fits()
                try:
                    tx.reserve()
                except CapacityError:
                    if fits:
                        raise WorldError("fits() said yes and reserve() refused") from None
                    raise
                if not fits:
                    raise WorldError("fits() said no and reserve() went through")
                alloc.audit()
                return (need, tx.commit()) if commit else (need, None)

        return self.agree("transaction", (), [outcome(lambda alloc=alloc: run(alloc)) for alloc in self.allocs])  # type: ignore[misc]

    def compare(self) -> None:
        want = self.main.state.arrays()
        for other in self.allocs[1:]:
            for name, array in other.state.arrays().items():
                if not np.array_equal(want[name], array):
                    raise WorldError(f"{name} differs: {want[name]} and {array}")

    def check(self) -> None:
        self.operations += 1
        self.compare()
        if self.operations % self.audit_every == 0:
            self.main.audit()
        for epoch, pages in self.reading.items():
            for family, read in enumerate(pages):
                free = read[self.main.state.page_state[family][read] == FREE]
                if len(free):
                    raise WorldError(f"family {family} pages {free} are free while epoch {epoch} reads them")
        for request in self.live.values():
            self.check_reads(request)

    def check_reads(self, request: Request) -> None:
        state, row = self.main.state, request.row
        if state.flags[row] & HOLES:
            return
        length = self.main.committed(row)
        want = np.array(request.prints[:length], np.int64)
        slots = self.main.slots(row, 0, length)
        window = max(0, length - self.spec.window + 1)
        pairs = [
            ("FULL", self.mem[0][slots.out_full], want),
            ("C4", self.mem[2][slots.out_c4], want[3::4]),
            ("C128", self.mem[3][slots.out_c128], want[127::128]),
        ]
        if not state.flags[row] & GAP:
            pairs.append(("SWA", self.mem[1][slots.out_swa[window:]], want[window:]))
        for name, got, expected in pairs:
            if not np.array_equal(got, expected):
                at = np.flatnonzero(got != expected)[:3]
                raise WorldError(f"row {row} reads foreign {name} content at {at} of {length}")

    def write(self, row: int, start: int, prints: list[int]) -> None:
        """What a forward does to memory at positions [start, start + len(prints))."""
        slots = self.main.slots(row, start, start + len(prints))
        values = np.array(prints, np.int64)
        positions = np.arange(start, start + len(prints))
        mapped = slots.out_swa > 0
        self.mem[0][slots.out_full] = values
        self.mem[1][slots.out_swa[mapped]] = values[mapped]
        self.mem[2][slots.out_c4] = values[positions % 4 == 3]
        self.mem[3][slots.out_c128] = values[positions % 128 == 127]
