"""Rows of any dtype as integer words, and the tile of rows and words that a program of a copying kernel holds."""

from __future__ import annotations

import torch

TILE_WORDS = 4096  # 16 KiB, several times over with double buffering: far from the smallest unified buffer
WIDEST_BLOCK = 512
NARROWEST_BLOCK = 8  # 32 bytes, the shortest burst that memory moves
MOST_ROWS = TILE_WORDS // NARROWEST_BLOCK


def as_row_words(rows: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor viewed as the widest integers that divide its last dimension's bytes."""
    start, row_bytes = rows.storage_offset() * rows.element_size(), rows.shape[-1] * rows.element_size()
    for dtype in (torch.int32, torch.int16):
        if row_bytes % dtype.itemsize == 0 and start % dtype.itemsize == 0:
            return rows.view(dtype)
    return rows.view(torch.int8)


def block_width(row_words: int, rows: int) -> int:
    """Words per program of a tile of ``rows`` (a power of two) rows.

    A power of two that divides the row: a block never reaches into the next row, so columns need no mask.
    """
    return min(row_words & -row_words, WIDEST_BLOCK, max(TILE_WORDS // rows, 1))
