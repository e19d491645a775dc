"""What the sampling kernels share: a draw from a long row of weights by an inverse CDF in two launches.

The first launch sums the weights block by block, the second finds the block that the coin falls into and scans that
block alone, so a row is read once and a small part of it twice. The sums are added in a fixed order: equal inputs give
equal tokens. Without mass in the residual a draw falls back to the target row, so both rows' sums are kept.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 4096  # weights per block: 16 KiB of float32, a few of which fit in any unified buffer
WARPS = 8


@triton.jit
def positive(row):
    """Probabilities as weights: NaN and negative entries count as 0."""
    return tl.where(row > 0, row, 0.0)


@triton.jit
def pick_block(sums, blocks, coin, BLOCKS: tl.constexpr):
    """The total of a row, the block that ``coin`` falls into (-1: no mass) and what is left of the coin's mass there.

    A coin at or beyond the last step falls into the last block with mass.
    """
    i = tl.arange(0, BLOCKS)
    mass = tl.load(sums + i, mask=i < blocks, other=0.0)
    steps = tl.cumsum(mass, 0)
    total = tl.max(steps, 0)
    target = coin * total
    first = tl.min(tl.where((steps > target) & (mass > 0), i, BLOCKS), 0)
    last = tl.max(tl.where(mass > 0, i, -1), 0)
    block = tl.where(first < BLOCKS, first, last)
    before = tl.max(tl.where((i < block) & (mass > 0), steps, 0.0), 0)
    return total, block, target - before


@triton.jit
def pick_token(weights, column, rest):
    """The first column whose cumulated weight exceeds ``rest``, else the last of positive weight, else -1."""
    steps = tl.cumsum(weights, 0)
    beyond = 2147483647
    first = tl.min(tl.where((steps > rest) & (weights > 0), column, beyond), 0)
    last = tl.max(tl.where(weights > 0, column, -1), 0)
    return tl.where(first < beyond, first, last)
