"""SGLang's request pools with the C128 sidecar as counted rows of our ledger."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.disaggregation.decode import DecodeReqToTokenPool
from sglang.srt.hardware_backend.npu.dsv4.dsv4_req_to_token_pool import (
    DSV4NPUDecodeReqToTokenPool,
    DSV4NPUReqToTokenPool,
)
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from dsv4_npu import addressing
from dsv4_npu.alloc.sidecar_rows import Changed, SidecarRows
from dsv4_npu.errors import InputError
from dsv4_npu.sglang.late_reads import host_ids, to_device
from dsv4_npu.sglang.verify import verify_applied

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class SidecarTables:
    """What both request pools add: ``req_to_c128_sidecar``, int32 ``[rows, columns]``, one C128 page id per column.

    ``sidecar`` is the truth, on the host; the device's table follows it (on a CPU they are one memory). A row is empty
    when it is given out, because freeing a request releases and zeroes what its row holds.
    """

    sidecar: SidecarRows
    req_to_c128_sidecar: torch.Tensor
    _dsv4_allocator: Any

    def _init_dsv4_tables(
        self, max_context_len: int, device: str, enable_memory_saver: bool, c128_page_size: int
    ) -> None:
        verify_applied()
        self._dsv4_allocator = None
        self.c128_page_size = c128_page_size
        columns = max(1, addressing.sidecar_width(max_context_len, c128_page_size))
        rows: int = self._alloc_size  # type: ignore[attr-defined]
        self.sidecar = SidecarRows(rows, columns, c128_page_size)
        self._at = torch.device(device)
        if self._at.type == "cpu":
            self.req_to_c128_sidecar = torch.from_numpy(self.sidecar.table)
        else:
            self.req_to_c128_sidecar = torch.zeros((rows, columns), dtype=torch.int32, device=device)

    def register_dsv4_allocator(self, allocator: Any) -> None:
        """The allocator whose C128 pages the rows hold."""
        self._dsv4_allocator = allocator
        allocator.register_request_pool(self)

    @property
    def pages(self) -> Any:
        """The page ledger of the registered allocator."""
        if self._dsv4_allocator is None:
            raise InputError("no allocator is registered: call register_dsv4_allocator first")
        return self._dsv4_allocator.pages

    def grow_rows(self, rows: I64, old_tokens: I64, new_tokens: I64, given: I32 | I64) -> None:
        """Store the C128 pages that an allocation gave to requests which grow from ``old`` to ``new`` tokens."""
        ratio = addressing.C128_RATIO
        self._send(self.sidecar.write(self.pages, rows, old_tokens // ratio, new_tokens // ratio, given))

    def replace_prefix(self, row: int, given: I32 | I64) -> None:
        """Replace the leading columns of one row."""
        self._send(self.sidecar.replace(self.pages, row, given))

    def replace_prefixes(self, prefixes: dict[int, I32 | I64]) -> None:
        """Replace the leading columns of many rows at once."""
        rows = np.fromiter(prefixes, np.int64, len(prefixes))
        counts = np.fromiter(map(len, prefixes.values()), np.int64, len(prefixes))
        given = np.concatenate(list(prefixes.values()))
        self._send(self.sidecar.replace_batch(self.pages, rows, counts, given))

    def clear_row(self, row: int) -> None:
        """Release what a row holds and zero it."""
        self._send(self.sidecar.clear(self.pages, row))

    def reset_rows(self) -> None:
        """Empty every row without releasing: the pages began anew."""
        self.sidecar.reset()
        if self._at.type != "cpu":
            self.req_to_c128_sidecar.zero_()

    def write_c128(self, indices: tuple[int, slice], values: torch.Tensor) -> None:
        """Store the pages of C128 slots ``values`` of the entries ``indices[1]`` of a row; reads the device."""
        row, entries = indices
        unit = self.c128_page_size
        first, last = -(-entries.start // unit), -(-entries.stop // unit)
        if first < last:
            at = torch.arange(first, last, device=values.device) * unit - entries.start
            pages = (values[at] // unit).cpu().numpy()
            one = np.array([row])
            self._send(self.sidecar.write(self.pages, one, np.array([entries.start]), np.array([entries.stop]), pages))

    def set_c128_prefix_pages(self, req: Any, page_ids: Any) -> None:
        """Give a request the pages of its matched prefix: now, or with its row."""
        if not req.kv.holds_kv:
            req.c128_prefix_page_ids = page_ids
        else:
            self._dsv4_allocator.replace_req_c128_prefix(int(req.kv.req_pool_idx), page_ids, self)

    def alloc(self, reqs: list[Any]) -> list[int] | None:
        """Rows of requests; those that have one keep it. Prefix pages that a request carries go into its row."""
        rows = self._take_rows(reqs)
        if rows is None:
            return None
        carried = {}
        for req, row in zip(reqs, rows, strict=True):
            pages = getattr(req, "c128_prefix_page_ids", None)
            if pages is not None:
                carried[row] = host_ids(pages)
                req.c128_prefix_page_ids = None
        if carried:
            self.replace_prefixes(carried)
        return rows

    def clear(self) -> None:
        """Every row is free and empty."""
        super().clear()  # type: ignore[misc]
        if self._dsv4_allocator is not None:
            for row in np.flatnonzero(self.sidecar.table.any(axis=1)).tolist():
                self.clear_row(row)

    def _take_rows(self, reqs: list[Any]) -> list[int] | None:
        raise NotImplementedError

    def _send(self, changed: Changed) -> None:
        if len(changed.rows) and self._at.type != "cpu":
            where = to_device(np.stack((changed.rows, changed.columns)), self._at)
            self.req_to_c128_sidecar.index_put_((where[0], where[1]), to_device(changed.pages, self._at))


class RequestPool(SidecarTables, DSV4NPUReqToTokenPool):  # type: ignore[misc]
    """SGLang's request table; arguments as there."""

    def free_rows(self, indices: list[int]) -> None:
        """Rows back to the pool, emptied: also those that leave without the end of a request (beams)."""
        for row in indices:
            if self.sidecar.table[row].any():
                self.clear_row(row)
        super().free_rows(indices)

    def _take_rows(self, reqs: list[Any]) -> list[int] | None:
        rows: list[int] | None = ReqToTokenPool.alloc(self, reqs)
        return rows


class DecodeRequestPool(SidecarTables, DSV4NPUDecodeReqToTokenPool):  # type: ignore[misc]
    """The request table of a decode node, with rows for requests that are still being transferred."""

    def _take_rows(self, reqs: list[Any]) -> list[int] | None:
        rows: list[int] | None = DecodeReqToTokenPool.alloc(self, reqs)
        return rows
