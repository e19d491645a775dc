"""What a prefix cache holds: nodes with their pages, who reads them, and how they are given back."""

from __future__ import annotations

import math

import numpy as np

from dsv4_npu.alloc.allocator import KVAllocator
from dsv4_npu.alloc.prefix_tree import Idle, Node
from dsv4_npu.alloc.spec import FamilyCounts
from dsv4_npu.alloc.state import I32
from dsv4_npu.errors import ConfigError, OwnershipError


class PrefixStore:
    """The tree of cached granules over one allocator; registered there as the holder ``name``.

    A row *reads* the prefix that it is locked to. A node is *idle* when nobody reads it, *usable* when a new request
    may start at its end: the window before it has its SWA pages and the C4 rows before it are kept or captured.
    """

    def __init__(self, alloc: KVAllocator, name: str) -> None:
        spec = alloc.spec
        if spec.full_only:
            raise ConfigError("a prefix cache over an allocator of FULL pages alone: its granules are C128 pages")
        self.alloc, self.spec = alloc, spec
        self.granule = math.lcm(spec.page_size, spec.group_tokens)
        if spec.window > self.granule:
            raise ConfigError(f"window = {spec.window}: at most the prefix granule of {self.granule} tokens is allowed")
        self._by_page = spec.c4_state_owner == "swa_page"
        none = np.zeros(0, np.int32)
        self.root = Node(None, b"", 0, none, none)
        self.nodes = 0
        self._idle = Idle()
        self._readers: dict[int, Node] = {}
        self._clock = 0
        alloc.register_holder(name, self)

    # -- readers -------------------------------------------------------------------------------------------------

    def usable(self, node: Node) -> bool:
        """Whether a new request may start at the end of a node."""
        kept = node.rows_kept if self._by_page else node.captured is not None
        return kept and self._window_resident(node)

    def lock(self, row: int, node: Node) -> None:
        """A row reads the prefix that ends at ``node``: none of it is evicted until :meth:`unlock`."""
        if row in self._readers:
            raise OwnershipError(f"row {row} reads the prefix that ends at {self._readers[row].end} already")
        if not node.alive:
            raise OwnershipError(f"the prefix that ends at {node.end} was evicted since it was matched")
        self._readers[row] = node
        self._add_reader(node)

    def unlock(self, row: int) -> None:
        """The row was closed. Call it after the allocator's ``close``, so that no page is evicted while it is read.

        Nodes behind which nobody could start, and which nothing continues, are evicted at once.
        """
        if row not in self._readers:
            raise OwnershipError(f"row {row} reads no cached prefix")
        node = self._readers.pop(row)
        self._drop_reader(node)
        if node is not self.root and not node.locks and not node.children and not self.usable(node):
            self._evict_node(node)

    def shared_end(self, row: int) -> int:
        """Tokens of the row's prefix that the cache owns."""
        return self._readers[row].end if row in self._readers else 0

    # -- evicting ------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> FamilyCounts:
        """Pages of nodes without readers: what evicting them would give back, without any search."""
        return self._idle.total

    @property
    def evictable(self) -> FamilyCounts:
        """All pages that can be given back: the idle ones, and windows that all readers of a node have passed."""
        full, swa, c128 = self._idle.total
        return FamilyCounts(full, swa + sum(node.swa for node in self._passed()), c128)

    def evict(self, need: FamilyCounts) -> bool:
        """Give back at least ``need`` pages, least recently used first; False, and nothing done, if it cannot be.

        Pages may first have to wait for forwards in flight. When only SWA pages are asked for, nodes that others
        continue keep their FULL and C128 pages; the last resort are windows that all readers have passed.
        """
        full, swa, c128 = need
        idle = self._idle.total
        passed = self._passed() if swa > idle.swa and full <= idle.full and c128 <= idle.c128 else []
        if full > idle.full or c128 > idle.c128 or swa > idle.swa + sum(node.swa for node in passed):
            return False
        while full > 0 or c128 > 0:
            given = self._evict_node(self._taken(self._idle.next_leaf()))
            full, swa, c128 = full - given.full, swa - given.swa, c128 - given.c128
        while swa > 0 and self._idle.total.swa:
            node = self._taken(self._idle.next_window())
            swa -= self._free_swa(node, node.full_pages) if node.children else self._evict_node(node).swa
        for node in passed:
            if swa > 0:
                swa -= self._free_swa(node, node.full_pages)
        return True

    def clear(self) -> FamilyCounts:
        """Evict everything that nobody reads; returns the pages given back."""
        total = self._idle.total
        while (node := self._idle.next_leaf()) is not None:
            self._evict_node(node)
        return total

    # -- audit ---------------------------------------------------------------------------------------------------

    def held_pages(self) -> tuple[I32, I32, I32]:
        """FULL pages held; those whose SWA page is held too; the multiset of C128 pages."""
        full, c128 = pages_of(self.walk())
        return full, full[self.alloc.state.full_to_swa[full] > 0], c128

    def walk(self) -> list[Node]:
        """Every node, parents before their children."""
        found, waiting = [], list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            found.append(node)
            waiting.extend(node.children.values())
        return found

    # -- inside --------------------------------------------------------------------------------------------------

    def _touch(self, node: Node) -> None:
        self._clock += 1
        for one in node.path():
            one.used = self._clock

    def _add_reader(self, node: Node) -> None:
        for one in node.path():
            if not one.locks:
                self._idle.remove(one)
            one.locks += 1

    def _drop_reader(self, node: Node) -> None:
        for one in node.path():
            one.locks -= 1
            if not one.locks:
                self._idle.add(one)

    def _window_columns(self, end: int) -> int:
        """First column of the window before ``end``, counted from there: 0 or negative."""
        page = self.spec.page_size
        return max(0, end - self.spec.window + 1) // page - end // page

    def _window_resident(self, node: Node) -> bool:
        first = len(node.full_pages) + self._window_columns(node.end)
        mapped = self.alloc.state.full_to_swa[node.full_pages[first:]]
        return bool(mapped.all())

    def _free_swa(self, node: Node, pages: I32) -> int:
        given = int(np.count_nonzero(self.alloc.state.full_to_swa[pages]))
        if given:
            self.alloc.free_swa(pages)
            node.swa -= given
            if not node.locks:
                self._idle.change(FamilyCounts(0, given, 0), -1)
        return given

    def _passed(self) -> list[Node]:
        """Read nodes with SWA pages that lie before the window of every reader, least recently used first."""
        needed: set[Node] = set()
        read: set[Node] = set()
        for row, end in self._readers.items():
            first = int(self.alloc.state.swa_start[row]) * self.spec.page_size
            for node in end.path():
                (read if node.end <= first else needed).add(node)
        return sorted((node for node in read - needed if node.swa), key=lambda node: (node.used, node.end))

    def _taken(self, node: Node | None) -> Node:
        assert node is not None, "the counts of idle nodes do not match the queue of them"
        return node

    def _evict_node(self, node: Node) -> FamilyCounts:
        """Evict a leaf, and its ancestors that nothing continues and nobody could start from any more."""
        full = swa = c128 = 0
        while True:
            counts = node.counts()
            full, swa, c128 = full + counts.full, swa + counts.swa, c128 + counts.c128
            self._idle.remove(node)
            self.alloc.free_pages(node.full_pages)
            self.alloc.release_c128(node.c128_pages)
            parent = node.parent
            assert parent is not None
            node.alive = False
            del parent.children[node.key]
            self.nodes -= 1
            if parent is self.root or parent.children or parent.locks:
                break
            if self.usable(parent):
                self._idle.offer(parent)
                break
            node = parent
        return FamilyCounts(full, swa, c128)


def pages_of(nodes: list[Node]) -> tuple[I32, I32]:
    """FULL and C128 pages of nodes, joined."""
    none = np.zeros(0, np.int32)
    full = np.concatenate([none, *(node.full_pages for node in nodes)])
    return full, np.concatenate([none, *(node.c128_pages for node in nodes)])
