"""Keep the likeliest tokens of a row, by number or by mass, and scale them to sum 1: one launch, one program per row.

Positive float32 numbers are ordered as their bits are. The weakest kept probability is searched between two bit
patterns, the lower of which keeps enough and the higher too little; each pass over the row, which stays in the cache,
tries three patterns between them, until what remains between holds nothing more to decide: about 5 passes by number, 4
to 14 by mass, and 17 at most, where many probabilities are equal. One pass more adds up the kept mass, and one writes.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_npu.ops._draw_triton import TILING, Tiling
from dsv4_npu.ops._launch import launch

GPU_TILING = Tiling(8192, ahead=True, warps=32)
SMALLEST = tl.constexpr(1.1754944e-38)
# Bit patterns of 2^-16, 2^-8 and 1, the first to be tried, and the one after infinity.
TINY = tl.constexpr(0x37800000)
SMALL = tl.constexpr(0x3B800000)
CERTAIN = tl.constexpr(0x3F800000)
AFTER_INFINITY = tl.constexpr(0x7F800001)


@triton.jit
def weakest_kept(row, vocab, goal, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """Bits such that the probabilities from there on are those that reach ``goal`` and no more; 0 if none do.

    "No more" but for equal ones: if the bits are those of a probability that several tokens have, some of them may be
    too many.
    """
    i = tl.arange(0, BLOCK)
    low = tl.full([], 0, tl.int32)
    high = low + AFTER_INFINITY
    one = low + TINY
    two = low + SMALL
    three = low + CERTAIN
    reached = low - 1
    more = low + 1
    while more > 0:
        if BY_MASS:
            at_one = tl.zeros([BLOCK], tl.float32)
            at_two = tl.zeros([BLOCK], tl.float32)
            at_three = tl.zeros([BLOCK], tl.float32)
            between = tl.zeros([BLOCK], tl.int32)
        else:
            at_one = tl.zeros([BLOCK], tl.int32)
            at_two = tl.zeros([BLOCK], tl.int32)
            at_three = tl.zeros([BLOCK], tl.int32)
        if AHEAD:
            following = tl.load(row + i, mask=i < vocab, other=0.0)
        for start in range(0, vocab, BLOCK):
            if AHEAD:
                weight = following
                following = tl.load(row + start + BLOCK + i, mask=i < vocab - start - BLOCK, other=0.0)
            else:
                weight = tl.load(row + start + i, mask=i < vocab - start, other=0.0)
            weight = tl.where(weight > 0, weight, 0.0)
            key = weight.to(tl.int32, bitcast=True)
            # What a token counts for: its mass, or 1.
            share = weight if BY_MASS else 1
            at_one += tl.where(key >= one, share, 0)
            at_two += tl.where(key >= two, share, 0)
            at_three += tl.where(key >= three, share, 0)
            if BY_MASS:
                between += tl.where((key >= low) & (key < high), 1, 0)
        first = tl.sum(at_one, 0)
        second = tl.sum(at_two, 0)
        third = tl.sum(at_three, 0)
        if BY_MASS:
            # One token alone between the two: it is the weakest kept one.
            decided = (low > 0) & (tl.sum(between, 0) == 1)
        else:
            reached = tl.where(first >= goal, first, reached)
            reached = tl.where(second >= goal, second, reached)
            reached = tl.where(third >= goal, third, reached)
            decided = reached == goal
        higher = tl.where(third >= goal, high, tl.where(second >= goal, three, tl.where(first >= goal, two, one)))
        lower = tl.where(third >= goal, three, tl.where(second >= goal, two, tl.where(first >= goal, one, low)))
        higher = tl.minimum(higher, high)
        if BY_MASS:
            low = tl.where(decided, low, lower)
            high = tl.where(decided, high, higher)
        else:
            low = lower
            high = higher
        step = (high - low + 3) // 4
        one = low + step
        two = one + step
        three = two + step
        more = tl.where(decided | (high - low <= 1), 0, 1)
    return low


@triton.jit(do_not_specialize=["batch"])
def renorm_kernel(probs, limits, out, batch, vocab, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    i = tl.arange(0, BLOCK)
    for request in range(tl.program_id(0), batch, tl.num_programs(0)):
        at = tl.full([], 0, tl.int64) + request
        row = probs + at * vocab
        out_row = out + at * vocab
        limit = tl.load(limits + request)
        if BY_MASS:
            limited = limit < 1
            goal = tl.maximum(limit, SMALLEST)
        else:
            limited = (limit > 0) & (limit < vocab)
            goal = tl.where(limited, limit, 0).to(tl.int32)
        bits = tl.full([], 0, tl.int32)
        if limited:
            bits = weakest_kept(row, vocab, goal, BY_MASS, BLOCK, AHEAD)

        above = tl.zeros([BLOCK], tl.float32)
        above_count = tl.zeros([BLOCK], tl.int32)
        equal_count = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab, BLOCK):
            weight = tl.load(row + start + i, mask=i < vocab - start, other=0.0)
            weight = tl.where(weight > 0, weight, 0.0)
            key = weight.to(tl.int32, bitcast=True)
            above += tl.where(key > bits, weight, 0.0)
            above_count += tl.where(key > bits, 1, 0)
            equal_count += tl.where(key == bits, 1, 0)
        mass = tl.sum(above, 0)
        equal = tl.sum(equal_count, 0)
        edge = bits.to(tl.float32, bitcast=True)
        # Of the tokens at the edge the first ones stay: those before which less than the goal has been reached.
        if bits > 0:
            if BY_MASS:
                room = tl.minimum(tl.maximum((goal - mass) / edge, 0.0), equal.to(tl.float32))
                whole = room.to(tl.int32)
                stay = tl.where(whole.to(tl.float32) < room, whole + 1, whole)
                stay = tl.maximum(stay, tl.where(mass > 0, 0, 1))
            else:
                stay = tl.minimum(goal - tl.sum(above_count, 0), equal)
            mass += stay.to(tl.float32) * edge
        else:
            stay = equal
        scale = tl.where(mass > 0, 1.0 / tl.where(mass > 0, mass, 1.0), 0.0)

        passed = 0
        for start in range(0, vocab, BLOCK):
            weight = tl.load(row + start + i, mask=i < vocab - start, other=0.0)
            weight = tl.where(weight > 0, weight, 0.0)
            key = weight.to(tl.int32, bitcast=True)
            kept = tl.where(key >= bits, weight, 0.0)
            if stay < equal:
                tie = tl.where(key == bits, 1, 0)
                rank = tl.cumsum(tie, 0) + passed
                kept = tl.where((tie > 0) & (rank > stay), 0.0, kept)
                passed += tl.sum(tie, 0)
            tl.store(out_row + start + i, kept * scale, mask=i < vocab - start)


def renorm(probs: torch.Tensor, limits: torch.Tensor, by_mass: bool) -> torch.Tensor:
    """``limits`` [bs]: the number of tokens to keep, or with ``by_mass`` the mass that the kept ones reach."""
    batch, vocab = probs.shape
    out = torch.empty_like(probs)
    tile = GPU_TILING if probs.device.type == "cuda" else TILING
    launch(
        renorm_kernel,
        batch,
        probs.device,
        probs,
        limits,
        out,
        batch,
        vocab,
        BY_MASS=by_mass,
        BLOCK=tile.block,
        AHEAD=tile.ahead,
        num_warps=tile.warps,
    )
    return out
