"""Page lists that leave the process, to a peer or to a host snapshot: without holes, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from dsv4_npu import addressing
from dsv4_npu.alloc.state import I32
from dsv4_npu.errors import InputError, OwnershipError

if TYPE_CHECKING:
    from dsv4_npu.alloc.allocator import KVAllocator


class RowPages(NamedTuple):
    """Pages of the first tokens of a row (int32): ``full`` and ``c128`` from column 0; ``swa`` from column
    ``swa_column`` on, the pages of the last sliding window only."""

    full: I32
    swa: I32
    c128: I32
    swa_column: int


def require_whole(family: str, pages: Sequence[int] | npt.NDArray[np.integer]) -> None:
    """Raise OwnershipError when a list of page ids has a hole (an id below 1)."""
    holes = np.flatnonzero(np.asarray(pages) < 1)
    if len(holes):
        raise OwnershipError(
            f"{family} page list: entry {holes[0]} of {len(pages)} is {pages[int(holes[0])]}, a hole: "
            f"every entry must be a page id >= 1"
        )


def row_pages(allocator: KVAllocator, row: int, length: int) -> RowPages:
    """The pages that hold the first ``length`` committed tokens of a row, with the SWA pages of the window before it.

    C128 pages cover ``length // 128`` entries. Raises InputError beyond the committed length and OwnershipError for a
    hole: an evicted window, or an empty column.
    """
    spec, state = allocator.spec, allocator.state
    allocator.rid_of(row)
    if not 0 <= length <= allocator.committed(row):
        raise InputError(f"row {row}: {length} tokens: 0 to {allocator.committed(row)} (committed) is allowed")
    first = max(0, length - spec.window + 1) // spec.page_size
    full = state.block_table[row, : addressing.pages_for(length, spec.page_size)].copy()
    require_whole("FULL", full)
    swa = state.full_to_swa[full[first:]]
    require_whole("SWA", swa)
    c128 = state.c128_table[row, : addressing.c128_columns(length, spec.c128_page_size)].copy()
    require_whole("C128", c128)
    return RowPages(full, swa, c128, first)
