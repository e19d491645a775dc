"""What the sampling kernels share: a draw from a long row of weights by an inverse CDF.

The row is summed block by block; then the block that the coin falls into is found, and it alone is read a second time
to find the token. The order of additions is fixed: equal inputs give equal tokens.

On a GPU several programs share a row: each leaves the masses of its blocks in memory, and the one that arrives last
draws. Elsewhere one program does the whole row, because Ascend's cores do not see each other's writes within a launch.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsv4_npu.ops._launch import cdiv, next_power_of_2


@dataclass(frozen=True)
class Tiling:
    """How many weights a program takes at once, whether it asks for the next block early, and what a GPU gives it."""

    block: int
    ahead: bool
    warps: int = 4
    programs: int = 0  # per processor that share the rows; 0: one program per row


# A block and its double buffers, which Ascend's compiler adds by itself, have to fit into 192 KiB of unified memory.
TILING = Tiling(4096, ahead=False)


def programs_per_row(batch: int, blocks: int, tile: Tiling, device: torch.device) -> int:
    """How many programs share a row: enough to keep a GPU busy, elsewhere one."""
    if tile.programs == 0 or device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device.index).multi_processor_count
    most = max(1, min(blocks, tile.programs * processors // batch))
    return cdiv(blocks, cdiv(blocks, most))  # without programs that would get no block


@functools.lru_cache(maxsize=4096)
def plan(batch: int, vocab: int, device: torch.device, gpu: Tiling) -> tuple[int, dict[str, int]]:
    """How many programs share a row, and the constants of the launch; ``gpu`` is the tiling on a GPU."""
    tile = gpu if device.type == "cuda" else TILING
    blocks = cdiv(vocab, tile.block)
    parts = programs_per_row(batch, blocks, tile, device)
    constants = {
        "SHARED": parts > 1,
        "BLOCKS": next_power_of_2(blocks),
        "BLOCK": tile.block,
        "AHEAD": tile.ahead,
        "num_warps": tile.warps,
    }
    return parts, constants


SPREAD = tl.constexpr(
    8
)  # words from one counter to the next: in one sector of the cache they would wait for each other
POOL = 2**19
_pools: list[torch.Tensor] = []  # kept for ever: a captured graph holds addresses, not references
_taken = POOL
_by_stream: dict[tuple[int, int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}


def _zeros(count: int, device: torch.device) -> torch.Tensor:
    global _taken
    if not _pools or _pools[-1].device != device or _taken + count > POOL:
        if torch.cuda.is_current_stream_capturing() or count > POOL:
            return torch.zeros(count, dtype=torch.int32, device=device)
        _pools.append(torch.zeros(POOL, dtype=torch.int32, device=device))
        _taken = 0
    _taken += count
    return _pools[-1][_taken - count : _taken]


def meeting_place(batch: int, blocks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the programs of a row leave the masses of its ``blocks``, and a zero per request to count them with.

    The last program of a row leaves its counter at zero again. Calls on one stream follow each other and use the same
    memory; each call in a captured graph gets its own, for the graph may be replayed on any stream. The registry
    lets one thread launch at a time, so no two find the same place missing.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        words = batch * SPREAD.value
        counters = _zeros(words, device) if device.type == "cuda" else torch.zeros(words, dtype=torch.int32)
        return torch.empty(batch * blocks, dtype=torch.float32, device=device), counters
    room = next_power_of_2(batch)
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index), room, blocks)
    known = _by_stream.get(key)
    if known is None:
        masses = torch.empty(room * blocks, dtype=torch.float32, device=device)
        known = _by_stream[key] = masses, _zeros(room * SPREAD.value, device)
    return known


@triton.jit
def last_to_arrive(masses, counters, request, parts, mass, start, end, blocks, BLOCKS: tl.constexpr):
    """Leave the masses of blocks ``start`` to ``end`` for the program that finds all others of its row done.

    That program gets 1 and the masses of all blocks, read past any stale cache; the others get 0.
    """
    n = tl.arange(0, BLOCKS)
    tl.store(masses + request * BLOCKS + n, mass, mask=(n >= start) & (n < end))
    tl.debug_barrier()
    counter = counters + request * SPREAD
    before = tl.atomic_add(counter, 1, sem="acq_rel")
    last = tl.where(before == parts - 1, 1, 0)
    if last > 0:
        tl.store(counter, 0)
        tl.debug_barrier()
        mass = tl.load(masses + request * BLOCKS + n, mask=n < blocks, other=0.0, cache_modifier=".cg")
    return last, mass


@triton.jit
def positive(row):
    """Probabilities as weights: NaN and negative entries count as 0."""
    return tl.where(row > 0, row, 0.0)


@triton.jit
def pick_block(mass, coin, BLOCKS: tl.constexpr):
    """The block that ``coin`` falls into (-1: no mass) and what is left of the coin's mass there.

    A coin at or beyond the last step falls into the last block with mass.
    """
    i = tl.arange(0, BLOCKS)
    steps = tl.cumsum(mass, 0)
    target = coin * tl.max(steps, 0)
    first = tl.min(tl.where((steps > target) & (mass > 0), i, BLOCKS), 0)
    last = tl.max(tl.where(mass > 0, i, -1), 0)
    block = tl.where(first < BLOCKS, first, last)
    before = tl.max(tl.where((i < block) & (mass > 0), steps, 0.0), 0)
    return block, target - before


@triton.jit
def pick_token(weight, column, rest):
    """The first column whose cumulated weight exceeds ``rest``, else the last of positive weight, else -1."""
    steps = tl.cumsum(weight, 0)
    beyond = 2147483647
    first = tl.min(tl.where((steps > rest) & (weight > 0), column, beyond), 0)
    last = tl.max(tl.where(weight > 0, column, -1), 0)
    return tl.where(first < beyond, first, last)
