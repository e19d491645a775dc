"""Our allocator behind the same calls as :class:`_sglang_side.SglangSide`."""

from __future__ import annotations

import numpy as np
import torch
from _sglang_side import C128_PAGE, PAGE, c128_pages

from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.alloc.ledger import Backend


class OurSide:
    """``batch`` requests that grow in step, over our ledger; tables and mirrors included."""

    name = "dsv4_npu"

    def __init__(self, batch: int, context: int, pages: int, backend: Backend = "auto") -> None:
        rows = 2 * batch
        spec = AllocSpec(
            page_size=PAGE,
            c128_page_size=C128_PAGE,
            full_pages=pages,
            swa_pages=pages,
            c128_pages=c128_pages(pages, rows),
            request_rows=rows,
            row_width=context,
        )
        self.alloc = KVAllocator(spec, backend=backend)
        self.batch = batch
        self._flip = False
        self._opened = 0

    def open(self) -> None:
        self.rows = np.array([self.alloc.open(self._opened + i) for i in range(self.batch)], np.int64)
        self.row_list = self.rows.tolist()
        self._opened += self.batch
        self.lens = np.zeros(self.batch, np.int64)

    def allocate(self, tokens: int) -> None:
        """Slots of ``tokens`` more positions per request, written to the host tables."""
        new = self.lens + tokens
        with self.alloc.transaction() as plan:
            for row, length in zip(self.row_list, new.tolist(), strict=True):
                plan.extend(row, length)
            self.out = plan.commit()
        self.alloc.commit_batch(self.rows, new)
        self.lens = new

    def write_tables(self) -> None:
        """Send the changed entries to the mirrors."""
        self.alloc.flush()

    def between(self) -> None:
        """A forward runs: the staging buffer of the last copy can be used again."""
        self.alloc.done(self.alloc.launch())

    def decode(self) -> None:
        """The slot of the next position of each request, written to the tables and sent to their mirrors."""
        self.out = self.alloc.decode_step(self.rows, 1, 1)
        self.lens = self.lens + 1
        self.alloc.commit_batch(self.rows, self.lens)
        self.write_tables()

    def finish(self) -> None:
        """Release every page of every request and its row; the clears that follow are returned."""
        self.cleanups = [self.alloc.close(row) for row in self.row_list]
        self.alloc.drain_freed_swa()
        self.write_tables()

    def shrink(self, length: int) -> None:
        """Undo: give back everything behind ``length``."""
        for row in self.row_list:
            self.alloc.trim(row, length)
        self.write_tables()
        self.lens = np.full(self.batch, length, np.int64)

    def prepare_prefixes(self) -> None:
        """Two sets of two shared C128 pages per request, each held by a cache."""
        mine = self.alloc.state.c128_table[self.rows, :2].copy()
        self.alloc.retain_c128(mine.ravel())
        donors = [self.alloc.open(f"donor {i}") for i in range(self.batch)]
        with self.alloc.transaction() as plan:
            for row in donors:
                plan.extend(row, 2 * 128 * C128_PAGE)
            plan.commit(slots=False)
        other = self.alloc.state.c128_table[donors, :2].copy()
        self.alloc.retain_c128(other.ravel())
        for row in donors:
            self.alloc.close(row)
        self.alloc.flush()
        self.prefixes = (list(mine), list(other))

    def replace(self) -> None:
        """Give every request the other one of its two prefixes."""
        self._flip = not self._flip
        for row, pages in zip(self.row_list, self.prefixes[self._flip], strict=True):
            self.alloc.replace_c128_prefix(row, pages)
        self.write_tables()

    def used(self) -> tuple[int, int, int]:
        """Pages of FULL, SWA and C128 out of the free lists."""
        usage = self.alloc.usage()
        return usage["FULL"][0], usage["SWA"][0], usage["C128"][0]

    def slots(self) -> tuple[torch.Tensor, ...]:
        """The last step's slots of the four families, as page-relative offsets."""
        return tuple(
            torch.from_numpy(np.ascontiguousarray(one % size))
            for one, size in zip(self.out, (PAGE, PAGE, PAGE // 4, C128_PAGE), strict=True)
        )
