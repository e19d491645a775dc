"""The only place where a position becomes a slot, a page or a ring row.

Four objects are never the same: token id, logical position, verify row, physical slot. Everything here is a pure
function of integers; the same functions take Python ints, numpy arrays and torch tensors unless a docstring says
otherwise, and none of them reads a device tensor on the host.

Names: *page* is the number of tokens in a page of FULL and SWA; *ring* the number of state rows in one bank; *ratio*
the compression ratio (4 or 128). Page 0 of every family and request row 0 are dummies that nobody owns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from dsv4_npu.errors import InputError

C4_RATIO = 4
C128_RATIO = 128
#: Rows of a window that one entry reads, in units of the ratio: C4 windows overlap their predecessor, C128's do not.
OVERLAP = {C4_RATIO: 2, C128_RATIO: 1}

IntLike = TypeVar("IntLike", int, npt.NDArray[np.int64], torch.Tensor)


def ceil_to(value: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is not below ``value``."""
    return -(-value // unit) * unit


def floor_to(value: int, unit: int) -> int:
    """The largest multiple of ``unit`` that is not above ``value``."""
    return value // unit * unit


def pages_for(tokens: int, page: int) -> int:
    """Pages that hold ``tokens`` positions."""
    return -(-tokens // page)


def compressed_len(tokens: IntLike, ratio: int) -> IntLike:
    """Entries of compression ``ratio`` that exist once ``tokens`` positions are history: one per closed window."""
    return tokens // ratio


def c128_columns(tokens: int, c128_page: int) -> int:
    """Sidecar columns (C128 pages) that hold the entries of ``tokens`` positions."""
    return -(-compressed_len(tokens, C128_RATIO) // c128_page)


def sidecar_width(row_width: int, c128_page: int) -> int:
    """Columns of the C128 sidecar of a request row that is ``row_width`` tokens wide."""
    return -(-row_width // (C128_RATIO * c128_page))


def full_slots(block_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, page: int) -> torch.Tensor:
    """FULL slots of ``positions`` of request ``rows``.

    block_table: int32 ``[request rows, columns]`` of FULL page ids. rows: int64, broadcastable against ``positions``
    (int64, >= 0). Returns int64 slots of the broadcast shape: ``table[row, p // page] · page + p % page``.
    """
    pages = block_table[rows, positions // page].to(torch.int64)
    return pages * page + positions % page


def swa_slots(full: torch.Tensor, full_to_swa: torch.Tensor, page: int) -> torch.Tensor:
    """SWA slots of FULL slots; -1 for a slot < 0 and where the FULL page has no SWA page (``full_to_swa`` holds 0).

    full_to_swa: int32 ``[FULL pages + 1]`` of SWA page ids. Offsets inside a page agree in both families.
    """
    pages = full_to_swa[full.clamp_min(0) // page].to(torch.int64)
    return torch.where((pages > 0) & (full >= 0), pages * page + full % page, torch.full_like(full, -1))


def c4_slots(full: IntLike) -> IntLike:
    """C4 slot of the FULL slot whose position closes a C4 window (``full % 4 == 3``): C4 pages share FULL's ids."""
    return full // C4_RATIO


def c128_slots(sidecar: torch.Tensor, rows: torch.Tensor, entries: torch.Tensor, c128_page: int) -> torch.Tensor:
    """C128 slots of compressed ``entries`` of request ``rows``; -1 where the sidecar column is empty.

    sidecar: int32 ``[request rows, columns]`` of C128 page ids, 0 = empty. An empty column never yields a slot of the
    dummy page, so a hole cannot be read or sent by accident.
    """
    pages = sidecar[rows, entries // c128_page].to(torch.int64)
    return torch.where(pages > 0, pages * c128_page + entries % c128_page, torch.full_like(pages, -1))


def request_state_rows(rows: IntLike, positions: IntLike, ring: int) -> IntLike:
    """State rows in the bank of a request: ``row · ring + position % ring`` (C128 everywhere, C4 on A5)."""
    return rows * ring + positions % ring


def swa_state_rows(swa: torch.Tensor, page: int, ring: int, dummy: int) -> torch.Tensor:
    """C4 state rows in the bank of an SWA page (A2/A3): ``slot // page · ring + slot % ring``; dummy where slot < 0."""
    return torch.where(swa >= 0, swa // page * ring + swa % ring, torch.full_like(swa, dummy))


def state_pool_rows(banks: int, ring: int, ratio: int) -> int:
    """Rows of a state pool with ``banks`` usable banks, the dummy bank 0 and the dummy last row.

    ``banks · ring + ring + 1`` rounded up to ``lcm(ratio, ring)``.
    """
    return ceil_to(banks * ring + ring + 1, math.lcm(ratio, ring))


def ring_size(ratio: int, speculative: bool) -> int:
    """Rows of one ring: C4 8 or 16, C128 128 or 256 with speculation: one window set, or two of them."""
    return OVERLAP[ratio] * ratio * (2 if speculative else 1)


def write_pad(ring: int, ratio: int) -> int:
    """Rows that a batch may write past the committed end without hurting rows that are still needed.

    ``ring − overlap · ratio + 2`` for a ring that is longer than one window set, else 0. It is also the largest legal
    verify width (root included).
    """
    spare = ring - OVERLAP[ratio] * ratio
    return spare + 2 if spare > 0 else 0


def save_start(start: int, end: int, ratio: int, pad: int) -> int:
    """First position of the batch ``[start, end)`` whose state row must be saved to the ring.

    ``min(trunc(end, ratio) − (overlap − 1) · ratio, end − pad)``, clipped to the batch. The pad term keeps rows that
    are accepted although a later draft closed their window; without it accepted rows are lost when a verify window
    crosses a boundary.
    """
    needed = floor_to(end, ratio) - (OVERLAP[ratio] - 1) * ratio
    return max(start, min(needed, end - pad))


def verify_rows(batch: int, width: int) -> npt.NDArray[np.int64]:
    """Verify rows ``b · D + j`` as ``[batch, width]``."""
    return np.arange(batch * width, dtype=np.int64).reshape(batch, width)


def c128_slot_checked(columns: Sequence[int], entry: int, c128_page: int) -> int:
    """The C128 slot of one entry from a host list of page ids.

    Raises InputError for a negative entry, a missing column, or a hole (a page id < 1) in any column up to the entry's.
    """
    if entry < 0:
        raise InputError(f"entry = {entry}; an index of a compressed entry, 0 or more, is needed")
    column = entry // c128_page
    if column >= len(columns):
        raise InputError(f"entry {entry} lies in sidecar column {column}; there are only {len(columns)} columns")
    for at, held in enumerate(columns[: column + 1]):
        if held < 1:
            raise InputError(
                f"entry {entry} lies in sidecar column {column}, but column {at} holds {held}: "
                f"every column up to it must hold a C128 page id >= 1"
            )
    return columns[column] * c128_page + entry % c128_page
