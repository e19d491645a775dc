"""Keep the likeliest tokens of a row, by number or by mass, and scale them to sum 1: one launch, one program per row.

Positive float32 numbers are ordered as their bits are, so the weakest kept probability is found bit by bit: 16 passes
of two bits each over a row that stays in the cache, then one pass for the kept mass and one that writes.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_npu.ops._draw_triton import TILING, positive
from dsv4_npu.ops._launch import launch

SMALLEST = tl.constexpr(1.1754944e-38)


@triton.jit
def portion(weight, kept, BY_MASS: tl.constexpr):
    """What the ``kept`` lanes count for: their mass, or 1 each."""
    return tl.where(kept, weight, 0.0) if BY_MASS else tl.where(kept, 1, 0)


@triton.jit
def weakest_kept(row, vocab, goal, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of the largest probability such that it and all larger ones reach ``goal``; 0 if none does."""
    i = tl.arange(0, BLOCK)
    bits = tl.full([], 0, tl.int32)
    for turn in range(16):
        step = 1 << tl.maximum(29 - 2 * turn, 0)
        if BY_MASS:
            one = tl.zeros([BLOCK], tl.float32)
            two = tl.zeros([BLOCK], tl.float32)
            three = tl.zeros([BLOCK], tl.float32)
        else:
            one = tl.zeros([BLOCK], tl.int32)
            two = tl.zeros([BLOCK], tl.int32)
            three = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab, BLOCK):
            weight = positive(tl.load(row + start + i, mask=i < vocab - start, other=0.0))
            key = weight.to(tl.int32, bitcast=True)
            one += portion(weight, key >= bits + step, BY_MASS)
            two += portion(weight, key >= bits + 2 * step, BY_MASS)
            three += portion(weight, key >= bits + 3 * step, BY_MASS)
        reached = tl.where(tl.sum(one, 0) >= goal, 1, 0)
        reached = tl.where(tl.sum(two, 0) >= goal, 2, reached)
        reached = tl.where(tl.sum(three, 0) >= goal, 3, reached)
        bits += reached * step
    return bits


@triton.jit(do_not_specialize=["batch"])
def renorm_kernel(probs, limits, out, batch, vocab, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
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
            bits = weakest_kept(row, vocab, goal, BY_MASS, BLOCK)

        above = tl.zeros([BLOCK], tl.float32)
        above_count = tl.zeros([BLOCK], tl.int32)
        equal_count = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab, BLOCK):
            weight = positive(tl.load(row + start + i, mask=i < vocab - start, other=0.0))
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
                room = (goal - mass) / edge
                whole = room.to(tl.int32)
                stay = tl.where(whole.to(tl.float32) < room, whole + 1, whole)
                stay = tl.maximum(tl.minimum(stay, equal), tl.where(mass > 0, 0, 1))
            else:
                stay = tl.minimum(goal - tl.sum(above_count, 0), equal)
            mass += stay.to(tl.float32) * edge
        else:
            stay = equal
        scale = tl.where(mass > 0, 1.0 / tl.where(mass > 0, mass, 1.0), 0.0)

        passed = 0
        for start in range(0, vocab, BLOCK):
            weight = positive(tl.load(row + start + i, mask=i < vocab - start, other=0.0))
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
        BLOCK=TILING.block,
        num_warps=8,
    )
    return out
