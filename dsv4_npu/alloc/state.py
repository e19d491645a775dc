"""The ledger's whole state as numpy arrays: the C++ core and its Python twin are functions on this object.

Everything is on the host. The three tables that devices need are views of one flat array, so that one copy and one
scatter bring a mirror up to date; ``dirty`` and ``dirty_list`` name the entries that changed since the last one.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dsv4_npu.alloc.spec import AllocSpec

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

#: Families of the free lists; request rows are handled like pages.
FULL: Final = 0
SWA: Final = 1
C128: Final = 2
ROW: Final = 3
FAMILY_NAMES: Final = ("FULL", "SWA", "C128", "ROW")

#: States of a page. FULL knows all five; SWA and C128 pages and rows are FREE, HELD, TAKEN or QUARANTINED.
FREE: Final = 0
HELD: Final = 1  # FULL: by a request row; SWA: by a FULL page; C128: by counted holders; ROW: by an open request
OUTSIDE: Final = 2  # FULL: by a holder outside of the rows, such as a cache node
TAKEN: Final = 3  # reserved by a transaction
QUARANTINED: Final = 4  # freed while a forward that may read it is in flight
STATE_NAMES: Final = ("free", "held", "held outside", "taken by a transaction", "quarantined")

#: Flags of a request row.
GAP: Final = 1  # the SWA window before the committed end is known to be absent: no decode may read it
HOLES: Final = 2  # pages were freed by slot: the row is being dismantled

#: Positions in ``counters``.
N_FREE: Final = 0  # [4] pages in the free list
Q_HEAD: Final = 4  # [4] first entry of the quarantine ring
Q_LEN: Final = 8  # [4] entries of the quarantine ring
PEAK: Final = 12  # [4] most pages ever out of the free list at once
TAG: Final = 16  # epoch that a freed page must wait for; 0 while nothing is in flight
STEP: Final = 17  # calls that changed something
N_DIRTY: Final = 18  # entries of dirty_list
N_SWA_LOG: Final = 19  # entries of swa_log
N_COUNTERS: Final = 20


class LedgerState:
    """All arrays of one ledger. ``n`` below is the family's usable count; entry 0 of each family is the dummy.

    tables: int32, flat: ``block_table`` ``[rows + 1, columns]``, ``full_to_swa`` ``[full + 1]`` and ``c128_table``
    ``[rows + 1, sidecar columns]`` are views of it; 0 means empty.
    page_state[f]: uint8 ``[n + 1]``. free_list[f]: int32 ``[n]``, a stack whose top is at ``counters[N_FREE + f] - 1``.
    q_page[f], q_tag[f]: ring of freed pages waiting for an epoch.
    full_owner: int32, the row that holds a HELD page. full_readers: int32, rows that see a page as shared prefix.
    swa_full: int32, the FULL page that maps an SWA page. c128_count: int32 reference counts.
    committed, allocated: int64 lengths per row. held_cols, c128_cols: int32 columns that the row has filled, whatever
    its lengths say. shared_cols: leading columns that belong to a holder outside. evict_cursor: columns below it were
    evicted. swa_start: every column from it on has its SWA page. flags: GAP, HOLES.
    swa_log: SWA pages freed since they were last asked for (their C4 state must be cleared), each once.
    """

    def __init__(self, spec: AllocSpec) -> None:
        self.spec = spec
        rows, columns, side = spec.request_rows + 1, spec.columns, spec.sidecar_columns
        totals = (spec.full_pages, spec.swa_pages, spec.c128_pages, spec.request_rows)
        self.tables: I32 = np.zeros(spec.table_entries, np.int32)
        self.swa_base = rows * columns
        self.c128_base = self.swa_base + spec.full_pages + 1
        self.block_table: I32 = self.tables[: self.swa_base].reshape(rows, columns)
        self.full_to_swa: I32 = self.tables[self.swa_base : self.c128_base]
        self.c128_table: I32 = self.tables[self.c128_base :].reshape(rows, side)
        self.dirty: U8 = np.zeros(spec.table_entries, np.uint8)
        self.dirty_list: I64 = np.empty(spec.table_entries, np.int64)
        self.counters: I64 = np.zeros(N_COUNTERS, np.int64)
        self.page_state: list[U8] = [np.zeros(n + 1, np.uint8) for n in totals]
        self.free_list: list[I32] = [np.arange(n, 0, -1, dtype=np.int32) for n in totals]
        self.q_page: list[I32] = [np.zeros(n, np.int32) for n in totals]
        self.q_tag: list[I64] = [np.zeros(n, np.int64) for n in totals]
        self.counters[N_FREE : N_FREE + 4] = totals
        self.full_owner: I32 = np.zeros(totals[FULL] + 1, np.int32)
        self.full_readers: I32 = np.zeros(totals[FULL] + 1, np.int32)
        self.swa_full: I32 = np.zeros(totals[SWA] + 1, np.int32)
        self.swa_log: I32 = np.zeros(totals[SWA], np.int32)
        self.swa_logged: U8 = np.zeros(totals[SWA] + 1, np.uint8)
        self.c128_count: I32 = np.zeros(totals[C128] + 1, np.int32)
        self.committed: I64 = np.zeros(rows, np.int64)
        self.allocated: I64 = np.zeros(rows, np.int64)
        self.held_cols: I32 = np.zeros(rows, np.int32)
        self.c128_cols: I32 = np.zeros(rows, np.int32)
        self.shared_cols: I32 = np.zeros(rows, np.int32)
        self.evict_cursor: I32 = np.zeros(rows, np.int32)
        self.swa_start: I32 = np.zeros(rows, np.int32)
        self.flags: U8 = np.zeros(rows, np.uint8)

    def total(self, family: int) -> int:
        """Usable pages (rows) of a family."""
        return len(self.free_list[family])

    def free(self, family: int) -> int:
        """Pages of a family that can be taken at once."""
        return int(self.counters[N_FREE + family])

    def waiting(self, family: int) -> int:
        """Freed pages of a family that wait for an epoch."""
        return int(self.counters[Q_LEN + family])

    def quarantine(self, family: int) -> tuple[I32, I64]:
        """Waiting pages of a family and the epochs that they wait for, oldest first."""
        head, count, size = self.counters[Q_HEAD + family], self.waiting(family), self.total(family)
        where = (head + np.arange(count)) % size
        return self.q_page[family][where], self.q_tag[family][where]

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Every array that defines the state, by name, without entries that have no meaning; for comparisons."""
        out: dict[str, npt.NDArray[np.generic]] = {
            name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)
        }
        out["dirty_list"] = np.sort(self.dirty_list[: self.counters[N_DIRTY]])
        out["swa_log"] = self.swa_log[: self.counters[N_SWA_LOG]]
        for family, name in enumerate(FAMILY_NAMES):
            out[f"page_state/{name}"] = self.page_state[family]
            out[f"free_list/{name}"] = self.free_list[family][: self.free(family)]
            out[f"quarantine/{name}"], out[f"quarantine tag/{name}"] = self.quarantine(family)
        out["counters"] = np.delete(self.counters, np.arange(Q_HEAD, Q_HEAD + 4))
        return out

    def resize_c128(self, pages: int) -> None:
        """Give the C128 family ``pages`` usable pages; a compiled ledger must bind the arrays again afterwards.

        New pages are given out last. The caller has checked that no page above ``pages`` is in use.
        """
        old = self.total(C128)
        listed = self.free_list[C128][: self.free(C128)]
        listed = np.concatenate([np.arange(pages, old, -1, dtype=np.int32), listed[listed <= pages]])
        waiting, tags = self.quarantine(C128)
        self.free_list[C128] = _resized(listed, pages)
        self.q_page[C128], self.q_tag[C128] = _resized(waiting, pages), _resized(tags, pages)
        self.page_state[C128] = _resized(self.page_state[C128], pages + 1)
        self.c128_count = _resized(self.c128_count, pages + 1)
        self.counters[Q_HEAD + C128] = 0
        self.counters[N_FREE + C128] = len(listed)


def _resized(array: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """A copy cut or filled with zeros to ``length``."""
    out = np.zeros(length, array.dtype)
    out[: len(array)] = array[:length]
    return out
