"""A radix cache of prefixes in granules of complete C128 pages: match, lock, insert, evict.

A granule is ``lcm(page, 128 · c128_page_size)`` tokens. The cache holds the FULL pages of its nodes with the SWA pages
of the sliding window before each node's end, and counts as one holder of their C128 pages. Partial tails stay with
the request. A match may end only where a new request can go on: the window before the end has its SWA pages, and the
C4 rows before it are kept (in the bank of the last SWA page, or captured where the bank belongs to the request).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsv4_npu.alloc.allocator import KVAllocator
from dsv4_npu.alloc.prefix_store import PrefixStore, pages_of
from dsv4_npu.alloc.prefix_tree import Node
from dsv4_npu.alloc.state import I32
from dsv4_npu.errors import InputError, OwnershipError

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


class PrefixCache(PrefixStore):
    """A prefix cache over one allocator; registered there as the holder ``name``.

    Args:
        alloc: the owner of the pages.
        capture: how C4 rows leave a request's bank (platforms with ``c4_state_owner = "request"``); without it no
            prefix can be shared there.
        lookahead: tokens behind a granule that belong to its key, because its rows depend on them
            (:class:`~dsv4_npu.alloc.rollback.RollbackRules`).
    """

    def __init__(
        self, alloc: KVAllocator, *, capture: Capture | None = None, name: str = "prefix cache", lookahead: int = 0
    ) -> None:
        super().__init__(alloc, name)
        self._capture = capture
        self.lookahead = lookahead

    # -- looking up ----------------------------------------------------------------------------------------------

    def match(self, tokens: npt.NDArray[np.int32]) -> Match:
        """The longest usable prefix of ``tokens`` (int32), which end with the look-ahead.

        Nothing is held by it: lock before anything else happens.
        """
        node = self.root
        for start in range(0, len(tokens) - self.lookahead - self.granule + 1, self.granule):
            child = node.children.get(self._key(tokens, start))
            if child is None:
                break
            node = child
        while node.parent is not None and not self.usable(node):
            node = node.parent
        self._touch(node)
        return Match(node.end, *pages_of(list(node.path())[::-1]), node, node.captured)

    # -- taking over ---------------------------------------------------------------------------------------------

    def insert(self, tokens: npt.NDArray[np.int32], row: int, resident: Resident) -> int:
        """Take over the complete granules of a locked row's history, each exactly once; returns the shared length.

        ``tokens`` are those of the row's committed positions and of the look-ahead, as far as they are known. The row
        goes on reading what it gave away. Where the cache has a granule already, the row shares the cached pages and
        its own ones are freed; a cached granule that nobody reads and nobody could start from is replaced by the row's.
        SWA pages that no window needs any more are freed. Call it after a commit and before the window eviction of the
        row.
        """
        if row not in self._readers:
            raise OwnershipError(f"row {row} is not locked: lock it to a match (or to the root) first")
        committed = self.alloc.committed(row)
        if len(tokens) > committed + self.lookahead:
            raise InputError(f"row {row}: {len(tokens)} tokens to insert, {committed} are committed")
        node = start = self._readers[row]
        last = len(tokens) - self.lookahead
        if start.end + self.granule > last or not (self._by_page or self._capture):
            return start.end
        shared: Node | None = None
        for end in range(start.end + self.granule, last + 1, self.granule):
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

    # -- inside --------------------------------------------------------------------------------------------------

    def _key(self, tokens: npt.NDArray[np.int32], start: int) -> bytes:
        return tokens[start : start + self.granule + self.lookahead].tobytes()

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
            self.alloc.attach_prefix(row, *pages_of(path), node.end)

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
