"""One launch: judge the drafts (single elements, read at once), sum the last row's blocks, draw.

The row of p, and of q after a rejection, is read once, and one block of it a second time.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_npu.ops._draw_triton import (
    Tiling,
    last_to_arrive,
    meeting_place,
    pick_block,
    pick_token,
    plan,
    positive,
)
from dsv4_npu.ops._launch import launch, next_power_of_2

GPU_TILING = Tiling(2048, ahead=True, warps=4, programs=4)


@triton.jit
def load_block(target_row, draft_row, start, vocab, rejected, BLOCK: tl.constexpr):
    """A block of p, and of q where a draft was rejected (else 0)."""
    i = tl.arange(0, BLOCK)
    left = vocab - start
    p = tl.load(target_row + start + i, mask=i < left, other=0.0)
    q = tl.load(draft_row + start + i, mask=i < left * rejected, other=0.0)
    return p, q


@triton.jit
def as_weight(p, q):
    """relu(p - q); without a rejection q is 0 and this is p."""
    p = positive(p)
    q = positive(q)
    return tl.where(p > q, p - q, 0.0)


@triton.jit
def block_masses(
    target_row,
    draft_row,
    start,
    end,
    vocab,
    rejected,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    n = tl.arange(0, BLOCKS)
    mass = tl.zeros([BLOCKS], tl.float32)
    if AHEAD:
        next_p, next_q = load_block(target_row, draft_row, start * BLOCK, vocab, rejected, BLOCK)
    for block in range(start, end):
        if AHEAD:
            p = next_p
            q = next_q
            # Beyond the last block nothing is read: the limit is the part's end.
            limit = tl.minimum(end * BLOCK, vocab)
            next_p, next_q = load_block(target_row, draft_row, (block + 1) * BLOCK, limit, rejected, BLOCK)
        else:
            p, q = load_block(target_row, draft_row, block * BLOCK, vocab, rejected, BLOCK)
        mass = tl.where(n == block, tl.sum(as_weight(p, q), 0), mass)
    return mass


@triton.jit
def finish(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrieve_index,
    target_row,
    draft_row,
    mass,
    last_coin,
    request,
    nodes,
    accepted,
    rejected,
    judged,
    width,
    vocab,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Draw from the row and write the outputs."""
    if (rejected > 0) & (tl.max(mass, 0) <= 0):
        # q covers all of p, or covers it but for rounding: the target's own row is sampled.
        rejected = 0
        mass = block_masses(target_row, draft_row, 0, tl.cdiv(vocab, BLOCK), vocab, rejected, BLOCKS, BLOCK, AHEAD)
    block, rest = pick_block(mass, last_coin, BLOCKS)
    start = tl.maximum(block, 0) * BLOCK
    p, q = load_block(target_row, draft_row, start, vocab, rejected, BLOCK)
    drawn = pick_token(as_weight(p, q), start + tl.arange(0, BLOCK), rest)

    place = tl.arange(0, WIDTH)
    row = tl.load(retrieve_index + nodes + place, mask=place < judged + 1, other=-1).to(tl.int32)
    row = tl.where(place <= accepted, row, -1)
    tl.store(accept_index + request * width.to(tl.int64) + place, row, mask=place < width)
    tl.store(accept_token_num + request, accepted)
    for k in range(accepted):
        at = tl.load(retrieve_index + nodes + k)
        tl.store(predicts + at, tl.load(candidates + nodes + 1 + k).to(tl.int32))
    tl.store(predicts + tl.load(retrieve_index + nodes + accepted), drawn)


@triton.jit(do_not_specialize=["pieces", "parts", "drafts", "width", "coins", "draft_rows", "judged"])
def chain_speculative_sampling_kernel(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrieve_index,
    uniform_samples,
    final_samples,
    target_probs,
    draft_probs,
    masses,
    counters,
    pieces,
    parts,
    drafts,
    width,
    coins,
    draft_rows,
    judged,
    vocab,
    JUDGED: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    blocks = tl.cdiv(vocab, BLOCK)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        request = piece // parts
        nodes = request * drafts.to(tl.int64)
        draft_nodes = request * draft_rows.to(tl.int64)
        last_coin = tl.load(final_samples + request)
        step = tl.arange(0, JUDGED)
        token = tl.load(candidates + nodes + 1 + step, mask=step < judged, other=-1)
        coin = tl.load(uniform_samples + request * coins.to(tl.int64) + step, mask=step < judged, other=0.0)
        is_draft = (token >= 0) & (token < vocab)
        element = tl.where(is_draft, step, 0).to(tl.int64) * vocab + tl.where(is_draft, token, 0)
        p = tl.load(target_probs + nodes * vocab + element, mask=is_draft, other=0.0)
        q = tl.load(draft_probs + draft_nodes * vocab + element, mask=is_draft, other=0.0)
        taken = is_draft & (q > 0) & (coin * q < p)
        accepted = tl.min(tl.where(taken, JUDGED, step), 0)
        rejected = tl.max(tl.where((step == accepted) & is_draft, 1, 0), 0)
        target_row = target_probs + (nodes + accepted) * vocab
        draft_row = draft_probs + (draft_nodes + tl.where(rejected > 0, accepted, 0)) * vocab

        start = (piece - request * parts) * tl.cdiv(blocks, parts)
        end = tl.minimum(start + tl.cdiv(blocks, parts), blocks)
        mass = block_masses(target_row, draft_row, start, end, vocab, rejected, BLOCKS, BLOCK, AHEAD)
        last = 1
        if SHARED:
            last, mass = last_to_arrive(masses, counters, request, parts, mass, start, end, blocks, BLOCKS)
        if last > 0:
            finish(
                predicts,
                accept_index,
                accept_token_num,
                candidates,
                retrieve_index,
                target_row,
                draft_row,
                mass,
                last_coin,
                request,
                nodes,
                accepted,
                rejected,
                judged,
                width,
                vocab,
                WIDTH,
                BLOCKS,
                BLOCK,
                AHEAD,
            )


def run(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
) -> None:
    batch, drafts, vocab = target_probs.shape
    if batch == 0:
        return
    width = accept_index.shape[1]
    judged = min(drafts, width) - 1
    draft_rows = draft_probs.shape[1]
    parts, constants = plan(batch, vocab, target_probs.device, GPU_TILING)
    # A program alone with its row leaves nothing for others: any address will do.
    masses = counters = accept_token_num
    if parts > 1:
        masses, counters = meeting_place(batch, constants["BLOCKS"], target_probs.device)
    pieces = batch * parts
    launch(
        chain_speculative_sampling_kernel,
        pieces,
        target_probs.device,
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrieve_index,
        uniform_samples,
        uniform_samples_for_final_sampling,
        target_probs,
        # With D = 1 there may be no draft row at all; nothing of it is used, but an address has to be valid.
        draft_probs if draft_rows else target_probs,
        masses,
        counters,
        pieces,
        parts,
        drafts,
        width,
        uniform_samples.shape[1],
        draft_rows,
        judged,
        vocab,
        JUDGED=max(next_power_of_2(judged + 1), 2),
        WIDTH=next_power_of_2(width),
        **constants,
    )
