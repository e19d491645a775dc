"""A radix cache of prefixes in granules of complete C128 pages: match, lock, insert, evict.

A granule is ``lcm(page, 128 · c128_page_size)`` tokens. The cache holds the FULL pages of its nodes with the SWA pages
of the sliding window before each node's end, and counts as one holder of their C128 pages. Partial tails stay with
the request. A match may end only where a new request can go on: the window before the end has its SWA pages, and the
C4 rows before it are kept (in the bank of the last SWA page, or captured where the bank belongs to the request).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsv4_npu.alloc.allocator import KVAllocator
from dsv4_npu.alloc.prefix_tree import Idle, Node
from dsv4_npu.alloc.spec import FamilyCounts
from dsv4_npu.alloc.state import I32
from dsv4_npu.errors import ConfigError, InputError, OwnershipError

#: ``(row, end) -> rows``: copy the C4 rows before position ``end`` out of the request's bank; any object but None.
Capture = Callable[[int, int], object]
#: ``(end) -> bool``: whether the C4 rows before position ``end`` of the row to insert are in their ring now.
Resident = Callable[[int], bool]


@dataclass(frozen=True, eq=False)
class Match:
    """The longest prefix that a new request can share. ``captured``: C4 rows to restore into the request's bank."""

    length: int
    full_pages: I32
    c128_pages: I32
    node: Node
    captured: object | None


class PrefixCache:
    """A prefix cache over one allocator; registered there as the holder ``name``.

    Args:
        alloc: the owner of the pages.
        capture: how C4 rows leave a request's bank (platforms with ``c4_state_owner = "request"``); without it no
            prefix can be shared there.

    Not more than one cache may hold pages of one allocator under one name.
    """

    def __init__(self, alloc: KVAllocator, *, capture: Capture | None = None, name: str = "prefix cache") -> None:
        spec = alloc.spec
        self.alloc, self.spec = alloc, spec
        self.granule = math.lcm(spec.page_size, spec.group_tokens)
        if spec.window > self.granule:
            raise ConfigError(f"window = {spec.window}: at most the prefix granule of {self.granule} tokens is allowed")
        self._capture = capture
        self._by_page = spec.c4_state_owner == "swa_page"
        none = np.zeros(0, np.int32)
        self.root = Node(None, b"", 0, none, none)
        self.nodes = 0
        self._idle = Idle()
        self._readers: dict[int, Node] = {}
        self._clock = 0
        alloc.register_holder(name, self)

    # -- looking up ----------------------------------------------------------------------------------------------

    def match(self, tokens: npt.NDArray[np.int32]) -> Match:
        """The longest usable prefix of ``tokens`` (int32). Nothing is held by it: lock before anything else happens."""
        node = self.root
        for start in range(0, len(tokens) - self.granule + 1, self.granule):
            child = node.children.get(self._key(tokens, start))
            if child is None:
                break
            node = child
        while node.parent is not None and not self.usable(node):
            node = node.parent
        self._touch(node)
        return Match(node.end, *_pages(list(node.path())[::-1]), node, node.captured)

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

    # -- taking over ---------------------------------------------------------------------------------------------

    def insert(self, tokens: npt.NDArray[np.int32], row: int, resident: Resident) -> int:
        """Take over the complete granules of a locked row's history, each exactly once; returns the shared length.

        ``tokens`` are those of the row's committed positions. The row goes on reading what it gave away. Where the
        cache has a granule already, the row shares the cached pages and its own ones are freed; a cached granule that
        nobody reads and nobody could start from is replaced by the row's. SWA pages that no window needs any more
        are freed. Call it after a commit and before the window eviction of the row.
        """
        if row not in self._readers:
            raise OwnershipError(f"row {row} is not locked: lock it to a match (or to the root) first")
        committed = self.alloc.committed(row)
        if len(tokens) > committed:
            raise InputError(f"row {row}: {len(tokens)} tokens to insert, {committed} are committed")
        node = start = self._readers[row]
        if start.end + self.granule > len(tokens) or not (self._by_page or self._capture):
            return start.end
        shared: Node | None = None
        for end in range(start.end + self.granule, len(tokens) + 1, self.granule):
            key = self._key(tokens, end - self.granule)
            child = node.children.get(key)
            if child is None:
                self._share(row, shared)
                shared, child = None, self._new_node(row, node, key, end, resident)
            elif self._prefer_cached(row, child, committed, resident):
                shared = child
            elif not child.locks:
                self._share(row, shared)
                shared = None
                self._replace(row, child, resident)
            else:
                break
            node = child
        self._share(row, shared)
        if node is not start:
            self._readers[row] = node
            self._add_reader(node)
            self._drop_reader(start)
            self._touch(node)
            self._free_old_windows(row, start, node)
        return node.end

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
        full, c128 = _pages(list(self.walk()))
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

    def _key(self, tokens: npt.NDArray[np.int32], start: int) -> bytes:
        return tokens[start : start + self.granule].tobytes()

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
        """First column, counted from the end of the node, of the window before ``end``; negative."""
        page = self.spec.page_size
        return max(0, end - self.spec.window + 1) // page - end // page

    def _window_resident(self, node: Node) -> bool:
        mapped = self.alloc.state.full_to_swa[node.full_pages[self._window_columns(node.end) :]]
        return bool(mapped.all())

    def _own_window_resident(self, row: int, end: int) -> bool:
        column = end // self.spec.page_size
        pages = self.alloc.state.block_table[row, column + self._window_columns(end) : column]
        return bool(self.alloc.state.full_to_swa[pages].all())

    def _prefer_cached(self, row: int, child: Node, committed: int, resident: Resident) -> bool:
        """Whether the row shall read the cached granule instead of its own: it must find its window and C4 rows."""
        end = child.end
        first = max(0, committed - self.spec.window + 1)
        needs_window = first < end
        usable = self._window_resident(child) and (child.rows_kept or not self._by_page)
        if needs_window and not usable:
            return False
        return self.usable(child) or bool(child.locks) or not (resident(end) and self._own_window_resident(row, end))

    def _share(self, row: int, node: Node | None) -> None:
        """Make the row read the cached pages up to ``node``; its own ones of these columns are freed."""
        if node is not None:
            path = list(node.path())[::-1]
            self.alloc.attach_prefix(row, *_pages(path), node.end)

    def _new_node(self, row: int, parent: Node, key: bytes, end: int, resident: Resident) -> Node:
        node = Node(parent, key, end, *self.alloc.take_over(row, end // self.spec.page_size))
        parent.children[key] = node
        self.nodes += 1
        self._describe(row, node, resident)
        self._idle.add(node)
        return node

    def _replace(self, row: int, node: Node, resident: Resident) -> None:
        """Put the row's pages in the place of a node's that nobody reads."""
        self._idle.remove(node)
        old_full, old_c128 = node.full_pages, node.c128_pages
        node.full_pages, node.c128_pages = self.alloc.take_over(row, node.end // self.spec.page_size)
        self.alloc.free_pages(old_full)
        self.alloc.release_c128(old_c128)
        self._describe(row, node, resident)
        self._idle.add(node)

    def _describe(self, row: int, node: Node, resident: Resident) -> None:
        node.swa = int(np.count_nonzero(self.alloc.state.full_to_swa[node.full_pages]))
        there = resident(node.end)
        node.rows_kept = self._by_page and there
        node.captured = None
        if there and not self._by_page and self._capture is not None:
            node.captured = self._capture(row, node.end)

    def _free_old_windows(self, row: int, above: Node, node: Node) -> None:
        """Free the SWA pages behind the row's window that no request can ever start behind."""
        self.alloc.evict_window(row)
        cursor, page = int(self.alloc.state.evict_cursor[row]), self.spec.page_size
        for one in node.path():
            if one.end < above.end:
                break
            if one.locks > 1:
                continue
            first = one.end // page - len(one.full_pages)
            keep = self._window_columns(one.end) if self.usable(one) else 0
            old = one.full_pages[: max(0, min(cursor - first, len(one.full_pages) + keep))]
            self._free_swa(one, old)

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


def _pages(nodes: list[Node]) -> tuple[I32, I32]:
    none = np.zeros(0, np.int32)
    full = np.concatenate([none, *(node.full_pages for node in nodes)])
    return full, np.concatenate([none, *(node.c128_pages for node in nodes)])
