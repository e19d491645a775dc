"""Today's public kernels, written anew from their description, to measure against.

The clear runs once per layer over a (request, draft, block) grid. Chain and tree sampling run a kernel that accepts
(one program per request), one that sums the last row block by block, and one that samples; the tree also clears a
[bs, D, V] scratch in which it marks the probabilities of rejected tokens.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

CLEAR_BLOCK = 256
SAMPLE_BLOCK = 4096


@triton.jit
def clear_layer_kernel(state, requests, lengths, accepted, RING: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    request, offset, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if offset >= tl.load(accepted + request):
        position = tl.load(lengths + request).to(tl.int64) + offset
        row = state + (tl.load(requests + request).to(tl.int64) * RING + position % RING) * 2 * HALF
        column = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(row + column, 0.0, mask=column < HALF)
        tl.store(row + HALF + column, float("-inf"), mask=column < HALF)


def clear(state, requests, lengths, accepted, ring, drafts) -> None:
    half = state.shape[2] // 2
    grid = (len(requests), drafts, triton.cdiv(half, CLEAR_BLOCK))
    for layer in state.unbind(0):
        clear_layer_kernel[grid](layer, requests, lengths, accepted, RING=ring, HALF=half, BLOCK=CLEAR_BLOCK)


@triton.jit
def accept_chain_kernel(predicts, index, number, rejections, candidates, coins, p, q, D, Q, C, V):
    b = tl.program_id(0).to(tl.int64)
    accepted, rejected = 0, 0
    tl.store(index + b * D, (b * D).to(tl.int32))
    while (accepted + 1 < D) & (rejected == 0):
        token = tl.load(candidates + b * D + accepted + 1)
        goal = tl.load(coins + b * C + accepted) * tl.load(q + (b * Q + accepted) * V + token)
        if goal < tl.load(p + (b * D + accepted) * V + token):
            tl.store(predicts + b * D + accepted, token.to(tl.int32))
            accepted += 1
            tl.store(index + b * D + accepted, (b * D + accepted).to(tl.int32))
        else:
            rejected = 1
    tl.store(number + b, accepted)
    tl.store(rejections + b, rejected)


@triton.jit
def accept_tree_kernel(
    predicts, index, number, rejections, last, candidates, children, siblings, coins, p, scratch, single, total, D, C, V
):
    b = tl.program_id(0).to(tl.int64)
    tl.store(index + b * D, (b * D).to(tl.int32))
    node = tl.load(children + b * D)
    parent = node - node
    accepted, rejected = 0, 0
    reached = 0.0
    while node >= 0:
        token = tl.load(candidates + b * D + node)
        chance = tl.load(p + (b * D + parent) * V + token)
        reached += chance
        if (tl.load(coins + b * C + parent) < reached / total) | (chance >= single):
            tl.store(predicts + b * D + parent, token.to(tl.int32))
            accepted += 1
            tl.store(index + b * D + accepted, (b * D + node).to(tl.int32))
            parent = node
            node = tl.load(children + b * D + node)
            rejected = 0
            reached = 0.0
        else:
            tl.store(scratch + (b * D + parent) * V + token, chance)
            rejected = 1
            node = tl.load(siblings + b * D + node)
    tl.store(number + b, accepted)
    tl.store(rejections + b, rejected)
    tl.store(last + b, parent.to(tl.int32))


@triton.jit
def sum_blocks_kernel(sums, rejections, last, p, q, D, Q, V, blocks, BLOCK: tl.constexpr):
    b, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(last + b)
    i = block * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(p + (b * D + row) * V + i, mask=i < V, other=0.0)
    if tl.load(rejections + b) > 0:
        weight = tl.maximum(weight - tl.load(q + (b * Q + row) * V + i, mask=i < V, other=0.0), 0.0)
    tl.store(sums + b * blocks + block, tl.sum(weight, 0))


@triton.jit
def sample_kernel(
    predicts, sums, rejections, last, final, p, q, D, Q, V, blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(last + b)
    n = tl.arange(0, BLOCKS)
    steps = tl.cumsum(tl.load(sums + b * blocks + n, mask=n < blocks, other=0.0), 0)
    goal = tl.load(final + b) * tl.max(steps, 0)
    block = tl.minimum(tl.min(tl.where(steps > goal, n, BLOCKS), 0), blocks - 1)
    before = tl.max(tl.where(n < block, steps, 0.0), 0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(p + (b * D + row) * V + i, mask=i < V, other=0.0)
    if tl.load(rejections + b) > 0:
        weight = tl.maximum(weight - tl.load(q + (b * Q + row) * V + i, mask=i < V, other=0.0), 0.0)
    beyond = tl.cumsum(weight, 0) + before > goal
    token = tl.min(tl.where(beyond, i, V), 0)
    # Rounding can leave the block's sum short of the goal: its last token of positive weight then.
    token = tl.where(token < V, token, tl.max(tl.where(weight > 0, i, 0), 0))
    tl.store(predicts + b * D + row, token.to(tl.int32))


def _draw(predicts, rejections, last, final, p, q) -> None:
    bs, drafts, vocab = p.shape
    blocks = triton.cdiv(vocab, SAMPLE_BLOCK)
    sums = torch.empty(bs, blocks, device=p.device)
    sizes = (drafts, q.shape[1], vocab, blocks)
    sum_blocks_kernel[(bs, blocks)](sums, rejections, last, p, q, *sizes, BLOCK=SAMPLE_BLOCK)
    width = triton.next_power_of_2(blocks)
    sample_kernel[(bs,)](predicts, sums, rejections, last, final, p, q, *sizes, BLOCKS=width, BLOCK=SAMPLE_BLOCK)


def chain(predicts, index, number, candidates, rows, coins, final, p, q) -> None:
    bs, drafts, vocab = p.shape
    rejections = torch.empty(bs, dtype=torch.int32, device=p.device)
    sizes = (drafts, q.shape[1], coins.shape[1], vocab)
    accept_chain_kernel[(bs,)](predicts, index, number, rejections, candidates, coins, p, q, *sizes)
    _draw(predicts, rejections, number, final, p, q)


def tree(predicts, index, number, candidates, rows, children, siblings, coins, final, p, single, total) -> None:
    bs, drafts, vocab = p.shape
    scratch = torch.zeros_like(p)
    rejections, last = torch.empty(2, bs, dtype=torch.int32, device=p.device).unbind()
    accept_tree_kernel[(bs,)](
        predicts, index, number, rejections, last, candidates, children, siblings, coins, p, scratch, single, total,
        drafts, coins.shape[1], vocab,
    )  # fmt: skip
    _draw(predicts, rejections, last, final, p, scratch)
