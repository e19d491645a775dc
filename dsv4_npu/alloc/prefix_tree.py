"""The tree of cached prefixes: one node per granule of tokens, its pages, its readers, and who is evicted next."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from dsv4_npu.alloc.spec import FamilyCounts
from dsv4_npu.alloc.state import I32


@dataclass(eq=False)
class Node:
    """A granule of tokens that follows its parent's. All counts are of this granule only.

    ``end``: position behind the granule. ``swa``: how many of ``full_pages`` have an SWA page. ``rows_kept``: on
    platforms whose C4 state is owned by SWA pages, whether the C4 rows before ``end`` are in the bank of the last page.
    ``captured``: on the others, those rows as the engine captured them (any object), or None. ``locks``: readers whose
    prefix contains the granule.
    """

    parent: Node | None
    key: bytes
    end: int
    full_pages: I32
    c128_pages: I32
    swa: int = 0
    rows_kept: bool = False
    captured: object | None = None
    locks: int = 0
    used: int = 0
    alive: bool = True
    queued: set[str] = field(default_factory=set)
    children: dict[bytes, Node] = field(default_factory=dict)

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, the root excluded, deepest first."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def counts(self) -> FamilyCounts:
        """Pages that evicting this node gives back."""
        return FamilyCounts(len(self.full_pages), self.swa, len(self.c128_pages))


class Idle:
    """Nodes without readers, least recently used first, and how many pages they hold together.

    Two queues: leaves that can be evicted whole, and nodes whose SWA pages can go. They are heaps with lazy entries, at
    most one per node: an entry whose node was used since is renewed when it comes up, one that is no candidate any
    more is dropped.
    """

    def __init__(self) -> None:
        self.total = FamilyCounts(0, 0, 0)
        self._queues: dict[str, list[tuple[int, int, Node]]] = {"leaf": [], "window": []}
        self._limit = {"leaf": 64, "window": 64}
        self._serial = 0

    def add(self, node: Node) -> None:
        """The node lost its last reader, or is new without one."""
        self.change(node.counts(), 1)
        self.offer(node)

    def remove(self, node: Node) -> None:
        """The node has a reader again, or is gone."""
        self.change(node.counts(), -1)

    def change(self, counts: FamilyCounts, sign: int) -> None:
        """Pages of idle nodes became more or fewer."""
        full, swa, c128 = (a + sign * b for a, b in zip(self.total, counts, strict=True))
        self.total = FamilyCounts(full, swa, c128)

    def offer(self, node: Node) -> None:
        """The node may be a candidate now."""
        if _leaf(node):
            self._push("leaf", node)
        if _window(node):
            self._push("window", node)

    def next_leaf(self) -> Node | None:
        """Take the least recently used idle node without children; None when there is none."""
        return self._pop("leaf")

    def next_window(self) -> Node | None:
        """Take the least recently used idle node that holds SWA pages; None when there is none."""
        return self._pop("window")

    def _push(self, name: str, node: Node) -> None:
        if name in node.queued:
            return
        node.queued.add(name)
        queue = self._queues[name]
        if len(queue) >= self._limit[name]:
            queue[:] = [entry for entry in queue if entry[2].alive]
            heapq.heapify(queue)
            self._limit[name] = max(64, 2 * len(queue))
        self._serial += 1
        heapq.heappush(queue, (node.used, self._serial, node))

    def _pop(self, name: str) -> Node | None:
        queue, wanted = self._queues[name], _leaf if name == "leaf" else _window
        while queue:
            used, _, node = heapq.heappop(queue)
            node.queued.discard(name)
            if not wanted(node):
                continue
            if node.used == used:
                return node
            self._push(name, node)
        return None


def _leaf(node: Node) -> bool:
    return node.alive and not node.locks and not node.children


def _window(node: Node) -> bool:
    return node.alive and not node.locks and node.swa > 0
