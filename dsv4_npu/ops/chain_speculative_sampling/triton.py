"""Two launches: judge the drafts and sum the final row by blocks, then draw from one block.

Every program of the first launch judges its request's drafts for itself (a few single elements, read at once), so it
knows which row to sum without waiting for another program. Programs own consecutive (request, block) pieces.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_npu.ops._draw_triton import BLOCK, WARPS, pick_block, pick_token, positive
from dsv4_npu.ops._launch import launch


@triton.jit(do_not_specialize=["pieces", "blocks", "residual_sums", "drafts", "width", "coins", "draft_rows", "judged"])
def chain_judge_kernel(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrieve_index,
    uniform_samples,
    target_probs,
    draft_probs,
    sums,
    pieces,
    blocks,
    residual_sums,
    drafts,
    width,
    coins,
    draft_rows,
    judged,
    vocab,
    JUDGED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    share = tl.cdiv(pieces, tl.num_programs(0))
    first_piece = tl.program_id(0) * share
    end_piece = tl.minimum(first_piece + share, pieces)
    for batch in range(first_piece // blocks, tl.cdiv(end_piece, blocks)):
        nodes = batch * drafts.to(tl.int64)
        draft_nodes = batch * draft_rows.to(tl.int64)
        step = tl.arange(0, JUDGED)
        token = tl.load(candidates + nodes + 1 + step, mask=step < judged, other=-1)
        is_draft = (token >= 0) & (token < vocab)
        element = tl.where(is_draft, step, 0).to(tl.int64) * vocab + tl.where(is_draft, token, 0)
        p = tl.load(target_probs + nodes * vocab + element, mask=is_draft, other=0.0)
        q = tl.load(draft_probs + draft_nodes * vocab + element, mask=is_draft, other=0.0)
        coin = tl.load(uniform_samples + batch * coins.to(tl.int64) + step, mask=step < judged, other=0.0)
        taken = is_draft & (q > 0) & (coin * q < p)
        accepted = tl.min(tl.where(taken, JUDGED, step), 0)
        rejected = tl.max(tl.where((step == accepted) & is_draft, 1, 0), 0)

        start = tl.maximum(first_piece - batch * blocks, 0)
        end = tl.minimum(end_piece - batch * blocks, blocks)
        if start == 0:
            place = tl.arange(0, WIDTH)
            row = tl.load(retrieve_index + nodes + place, mask=place <= judged, other=-1).to(tl.int32)
            row = tl.where(place <= accepted, row, -1)
            tl.store(accept_index + batch * width.to(tl.int64) + place, row, mask=place < width)
            tl.store(accept_token_num + batch, accepted)
            for k in range(accepted):
                at = tl.load(retrieve_index + nodes + k)
                tl.store(predicts + at, tl.load(candidates + nodes + 1 + k).to(tl.int32))

        target_row = target_probs + (nodes + accepted) * vocab
        draft_row = draft_probs + (draft_nodes + tl.where(rejected > 0, accepted, 0)) * vocab
        i = tl.arange(0, BLOCK)
        for block in range(start, end):
            left = vocab - block * BLOCK
            weight = positive(tl.load(target_row + block * BLOCK + i, mask=i < left, other=0.0))
            draft = positive(tl.load(draft_row + block * BLOCK + i, mask=i < left * rejected, other=0.0))
            residual = tl.sum(tl.where(weight > draft, weight - draft, 0.0), 0)
            # Without a rejection there is no residual; no mass in it makes the draw take the target row.
            tl.store(sums + batch * blocks + block, tl.where(rejected > 0, residual, 0.0))
            tl.store(sums + residual_sums + batch * blocks + block, tl.sum(weight, 0))


@triton.jit(do_not_specialize=["batch", "blocks", "residual_sums", "drafts", "width", "draft_rows"])
def chain_draw_kernel(
    predicts,
    accept_index,
    accept_token_num,
    final_samples,
    target_probs,
    draft_probs,
    sums,
    batch,
    blocks,
    residual_sums,
    drafts,
    width,
    draft_rows,
    vocab,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for request in range(tl.program_id(0), batch, tl.num_programs(0)):
        judge = tl.load(accept_token_num + request)
        row = tl.load(accept_index + request * width.to(tl.int64) + judge)
        coin = tl.load(final_samples + request)
        residual_mass, residual_block, residual_rest = pick_block(sums + request * blocks, blocks, coin, BLOCKS)
        _, target_block, target_rest = pick_block(sums + residual_sums + request * blocks, blocks, coin, BLOCKS)
        rejected = tl.where(residual_mass > 0, 1, 0)
        block = tl.maximum(tl.where(rejected > 0, residual_block, target_block), 0)
        rest = tl.where(rejected > 0, residual_rest, target_rest)

        i = tl.arange(0, BLOCK)
        left = vocab - block * BLOCK
        target_row = target_probs + (request * drafts.to(tl.int64) + judge) * vocab
        draft_row = draft_probs + (request * draft_rows.to(tl.int64) + tl.where(rejected > 0, judge, 0)) * vocab
        weight = positive(tl.load(target_row + block * BLOCK + i, mask=i < left, other=0.0))
        draft = positive(tl.load(draft_row + block * BLOCK + i, mask=i < left * rejected, other=0.0))
        weight = tl.where(weight > draft, weight - draft, 0.0)
        tl.store(predicts + row, pick_token(weight, block * BLOCK + i, rest))


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
    width = accept_index.shape[1]
    if batch == 0:
        return
    judged = min(drafts, width) - 1
    blocks = triton.cdiv(vocab, BLOCK)
    pieces = batch * blocks
    sums = torch.empty(2 * pieces, dtype=torch.float32, device=target_probs.device)
    draft_rows = draft_probs.shape[1]
    # With D = 1 there may be no draft row at all; nothing of it is used, but an address has to be valid.
    draft_probs = draft_probs if draft_rows else target_probs
    launch(
        chain_judge_kernel,
        pieces,
        target_probs.device,
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrieve_index,
        uniform_samples,
        target_probs,
        draft_probs,
        sums,
        pieces,
        blocks,
        pieces,
        drafts,
        width,
        uniform_samples.shape[1],
        draft_rows,
        judged,
        vocab,
        JUDGED=triton.next_power_of_2(judged + 1),
        WIDTH=triton.next_power_of_2(width),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    launch(
        chain_draw_kernel,
        batch,
        target_probs.device,
        predicts,
        accept_index,
        accept_token_num,
        uniform_samples_for_final_sampling,
        target_probs,
        draft_probs,
        sums,
        batch,
        blocks,
        pieces,
        drafts,
        width,
        draft_rows,
        vocab,
        BLOCKS=triton.next_power_of_2(blocks),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
