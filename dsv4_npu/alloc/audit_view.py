"""What the audit looks at: the rows' content as flat arrays, the holders' claims, and names for messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dsv4_npu.alloc.state import C128, FULL, HELD, I32, I64, ROW, SWA

if TYPE_CHECKING:
    from dsv4_npu.alloc.allocator import KVAllocator


class AuditView:
    """One moment of an allocator. ``rows, cols, pages`` list every non-empty block table entry of the open rows;
    ``side_rows, side_cols, side_pages`` those of the sidecar. Without ``deep`` the columns behind the longest row are
    not looked at."""

    def __init__(self, allocator: KVAllocator, deep: bool) -> None:
        self.state = state = allocator.state
        self.epochs = allocator.epochs
        self.allocator = allocator
        self.open_rows: I64 = np.flatnonzero(state.page_state[ROW] == HELD)
        self.named_rows: I64 = np.array(sorted(allocator.requests()), np.int64)
        self.rows, self.cols, self.pages = self._content(state.block_table, state.held_cols, deep)
        self.side_rows, self.side_cols, self.side_pages = self._content(state.c128_table, state.c128_cols, deep)
        self.claims = {name: holder.held_pages() for name, holder in allocator.holders.items()}
        mirror = allocator.mirrors.tables
        self.mirror: I32 | None = mirror.numpy() if mirror.device.type == "cpu" else None

    def _content(self, table: I32, lengths: I32, deep: bool) -> tuple[I64, I64, I64]:
        part = table[self.open_rows, : table.shape[1] if deep else int(lengths.max())]
        which, columns = np.nonzero(part)
        return self.open_rows[which], columns, part[which, columns].astype(np.int64)

    def count_outside(self, family: int) -> I64:
        """Entries of each page id in the claims of all holders (of SWA: by FULL page)."""
        which = {FULL: 0, SWA: 1, C128: 2}[family]
        size = self.state.total(C128 if family == C128 else FULL) + 1
        counts = np.zeros(size, np.int64)
        for claim in self.claims.values():
            counts += np.bincount(np.asarray(claim[which], np.int64), minlength=size)
        return counts

    def taken(self, family: int) -> I64:
        """Pages that open transactions hold."""
        none = np.zeros(0, np.int64)
        if family == ROW:
            return none
        return np.concatenate([none, *(tx.taken()[family].astype(np.int64) for tx in self.allocator.transactions)])

    def holders_of(self, family: int, page: int) -> str:
        """Who names a page, in words."""
        names: list[str] = []
        requests = self.allocator.requests()
        if family == ROW:
            return f"request {requests[page]!r}" if page in requests else "nobody"
        key, which = page, {FULL: 0, SWA: 0, C128: 2}[family]
        if family == SWA:
            key = int(self.state.swa_full[page]) if page < len(self.state.swa_full) else 0
            names.append(f"FULL page {key}" if key else "no FULL page")
        rows, cols, pages = (
            (self.side_rows, self.side_cols, self.side_pages) if family == C128 else (self.rows, self.cols, self.pages)
        )
        for index in np.flatnonzero(pages == key).tolist() if key else []:
            row = int(rows[index])
            names.append(f"row {row} (request {requests.get(row)!r}) column {cols[index]}")
        names += [f"holder {name!r}" for name, claim in self.claims.items() if key and key in list(claim[which])]
        names += ["a transaction" for tx in self.allocator.transactions if page in tx.taken()[family]] if page else []
        return ", ".join(names) or "nobody"

    def kind_of(self, family: int) -> str:
        """Answer to: KV page or compressor state?"""
        if self.state.spec.full_only:
            return "tables" if family == ROW else "KV page"
        by_page = self.state.spec.c4_state_owner == "swa_page"
        return {
            FULL: "KV page (the C4 and indexer pages of the same id)",
            SWA: "KV page, and the C4 compressor state in its bank" if by_page else "KV page",
            C128: "KV page (C128 entries; their ring rows are the request's)",
            ROW: "compressor state (C128 ring) and tables"
            if by_page
            else "compressor state (C4, C128 rings) and tables",
        }[family]

    def owner_of(self, family: int, page: int) -> str:
        """Answer to: owned by an SWA page or by the request?"""
        if family == SWA:
            return "the SWA page, through the FULL page that maps it"
        if family == FULL and page < len(self.state.full_owner) and self.state.full_owner[page]:
            return f"the request in row {self.state.full_owner[page]}"
        if family == FULL:
            return "a holder outside of the rows, or nobody"
        return "each request and cache node that counts in it" if family == C128 else "the request"

    def entry(self, index: int) -> tuple[int, int]:
        """Family and page (for tables of rows: ROW and the row) of an entry of the flat tables."""
        state = self.state
        if index < state.swa_base:
            return ROW, index // state.spec.columns
        if index < state.c128_base:
            return FULL, index - state.swa_base
        return ROW, (index - state.c128_base) // state.spec.sidecar_columns
