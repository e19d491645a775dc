"""Lists of what a transfer engine copies: page and row indices of both sides, made from one description.

Units follow the buffers of :mod:`dsv4_npu.movement.buffers`: pages of FULL (C4 and indexer entries), SWA and C128,
single rows of C4 state (rings may differ between peers), and pages of 128 rows of C128 state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dsv4_npu import addressing
from dsv4_npu.alloc.allocator import KVAllocator
from dsv4_npu.alloc.export import require_whole
from dsv4_npu.config import CacheConfig
from dsv4_npu.errors import InputError
from dsv4_npu.movement.belongings import I64, describe, locate

#: Rows of a page of C128 state: a ring of 128 is one page, one of 256 two.
STATE_PAGE = addressing.C128_RATIO


class PayloadLists(NamedTuple):
    """int64 indices in the order of the positions; equal lengths on both sides of a transfer.

    ``full``: pages of C4 and indexer entries. ``swa``: pages of the window, pages behind the last position left out.
    ``c128``: C128 pages. ``c4_state``: rows of both C4 state slabs. ``c128_state``: pages of 128 state rows.
    """

    full: I64
    swa: I64
    c128: I64
    c4_state: I64
    c128_state: I64


def window_pages(swa_pages: Sequence[int] | npt.NDArray[np.integer], length: int, page: int, window: int) -> I64:
    """Of a row's SWA pages (from column 0 on), those that hold the window before position ``length``.

    What a row has beyond ``length`` is reserve that a later forward fills: stale rows, which are not sent. Raises
    OwnershipError for a hole among the pages that are.
    """
    first = max(0, length - window + 1) // page
    chosen = np.asarray(swa_pages, dtype=np.int64)[first : addressing.pages_for(length, page)]
    require_whole("SWA", chosen)
    return chosen


def c128_state_pages(rows: npt.NDArray[np.integer]) -> I64:
    """Pages of 128 state rows that hold the live ``rows`` of one open window: one page, or none."""
    return np.unique(np.asarray(rows, dtype=np.int64) // STATE_PAGE)


def payload_lists(alloc: KVAllocator, config: CacheConfig, row: int, length: int) -> PayloadLists:
    """What a transfer of request ``row`` at ``length`` copies from (a sender) or to (a receiver with these slots).

    Raises OwnershipError for a hole: a page list that leaves the process is whole, or does not leave.
    """
    found = locate(alloc, config, row, length)
    tables, page, group = alloc.state, config.page, config.c128_page_size
    spans = describe(config, length)
    full = tables.block_table[row, : addressing.pages_for(length, page)].astype(np.int64)
    require_whole("FULL", full)
    swa = window_pages(tables.full_to_swa[full], length, page, config.model.sliding_window)
    c128 = tables.c128_table[row, : addressing.pages_for(spans["c128"].stop, group)].astype(np.int64)
    require_whole("C128", c128)
    return PayloadLists(full, swa, c128, found["c4 state"], c128_state_pages(found["c128 state"]))


def check_paired(source: PayloadLists, target: PayloadLists) -> None:
    """Raise InputError when two sides do not list the same number of items: other pages, or another length."""
    for name, mine, theirs in zip(PayloadLists._fields, source, target, strict=True):
        if len(mine) != len(theirs):
            raise InputError(
                f"{name}: {len(mine)} items to send, {len(theirs)} to receive: both sides need the same length, page "
                "sizes and C4 owner; with other page sizes send a snapshot"
            )
