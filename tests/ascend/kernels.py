"""Small kernels for the tests of the proofs: one that is right, and one for each thing that a proof must notice."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = tl.arange(0, BLOCK)
        tl.store(y + start + i, 2 * tl.load(x + start + i, mask=i < n - start, other=0.0), mask=i < n - start)


@triton.jit
def wrong_store(x, y, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = tl.arange(0, BLOCK)
        tl.store(y + start + i, 2 * tl.load(x + start + i, mask=i < n - start, other=0.0), mask=i < n - start - 1)


@triton.jit
def write_beyond(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < n, other=0.0))


@triton.jit
def read_beyond(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i) + tl.load(x + n), mask=i < n)


@triton.jit
def last_program_wins(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.program_id(0) + 2 * tl.load(x + i, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def running_sum(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.cumsum(tl.load(x + i, mask=i < n, other=0.0), 0), mask=i < n)


@triton.jit
def running_sum_of_rows(x, y, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr):
    i = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(y + i, tl.cumsum(tl.load(x + i), AXIS))


@triton.jit
def to_bfloat16(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0).to(tl.bfloat16), mask=i < n)


@triton.jit
def sorted_block(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.sort(tl.load(x + i)), mask=i < n)


@triton.jit
def turn_rows(x, y, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i = tl.arange(0, ROWS)
    row = tl.load(y + i).to(tl.int32)
    place = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(x + place, tl.load(x + i[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]))


@triton.jit
def add(x, y, z, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(z + i, tl.load(x + i, mask=i < n, other=0.0) + tl.load(y + i, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def swap(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    for _ in range(tl.program_id(0), 1, tl.num_programs(0)):
        low = tl.load(x + i)
        high = tl.load(x + n + i)
        tl.store(y + n + i, low)
        tl.store(y + i, high)


@triton.jit
def swap_ordered(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    for _ in range(tl.program_id(0), 1, tl.num_programs(0)):
        low = tl.load(x + i)
        high = tl.load(x + n + i)
        tl.debug_barrier()
        tl.store(y + n + i, low)
        tl.store(y + i, high)


@triton.jit
def clear(x, unused, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.zeros([BLOCK], tl.float32), mask=i < n)
