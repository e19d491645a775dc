"""Two launches: walk the tree and sum the final row by blocks, then draw from one block.

Every program of the first launch walks its request's tree for itself (a few single elements), so it knows which row to
sum without waiting for another program. Programs own consecutive (request, block) pieces. Only the target's row of the
last accepted node is read whole, once; the mass of that node's rejected children is left out on the way.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_npu.ops._draw_triton import BLOCK, WARPS, pick_block, pick_token, positive
from dsv4_npu.ops._launch import launch
from dsv4_npu.ops.tree_speculative_sampling_target_only.ref import MIN_THRESHOLD_ACC


@triton.jit
def without_children(weight, column, candidates, next_token, next_sibling, parent, drafts, vocab):
    """``weight`` with the tokens of ``parent``'s children set to 0. The pointers are those of one request."""
    node = tl.load(next_token + parent)
    seen = 0
    while (node >= 0) & (node < drafts) & (seen < drafts):
        token = tl.load(candidates + node)
        token = tl.where((token >= 0) & (token < vocab), token, -1).to(tl.int32)
        weight = tl.where(column == token, 0.0, weight)
        node = tl.load(next_sibling + node)
        seen += 1
    return weight


@triton.jit(do_not_specialize=["pieces", "blocks", "residual_sums", "drafts", "width", "coins"])
def tree_judge_kernel(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    uniform_samples,
    target_probs,
    last_nodes,
    sums,
    threshold_single,
    threshold_acc,
    pieces,
    blocks,
    residual_sums,
    drafts,
    width,
    coins,
    vocab,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    share = tl.cdiv(pieces, tl.num_programs(0))
    first_piece = tl.program_id(0) * share
    end_piece = tl.minimum(first_piece + share, pieces)
    for batch in range(first_piece // blocks, tl.cdiv(end_piece, blocks)):
        nodes = batch * drafts.to(tl.int64)
        start = tl.maximum(first_piece - batch * blocks, 0)
        end = tl.minimum(end_piece - batch * blocks, blocks)

        lane = tl.arange(0, NODES)
        tokens = tl.load(candidates + nodes + lane, mask=lane < drafts, other=-1)
        tokens = tl.where((tokens >= 0) & (tokens < vocab), tokens, -1).to(tl.int32)
        tried = tl.zeros([NODES], tl.int32)
        place = tl.arange(0, WIDTH)
        row = tl.load(retrieve_index + nodes).to(tl.int32)
        path = tl.where(place == 0, row, -1)
        parent = nodes - nodes
        node = tl.load(retrieve_next_token + nodes)
        reached = 0.0
        rejected = 0
        accepted = 0
        seen = 0
        while (node >= 0) & (node < drafts) & (accepted + 1 < width) & (seen < drafts):
            child = tl.load(retrieve_next_token + nodes + node)
            sibling = tl.load(retrieve_next_sibling + nodes + node)
            child_row = tl.load(retrieve_index + nodes + node).to(tl.int32)
            coin = tl.load(uniform_samples + batch * coins.to(tl.int64) + parent)
            token = tl.load(candidates + nodes + node)
            is_draft = (token >= 0) & (token < vocab)
            p = tl.load(target_probs + (nodes + parent) * vocab + tl.where(is_draft, token, 0))
            # A token that an earlier sibling had counts once: its mass is already reached, and removed.
            again = tl.max(tl.where((tokens == token.to(tl.int32)) & (tried > 0), 1, 0), 0)
            p = tl.where(is_draft & (again == 0), positive(p), 0.0)
            reached += p
            # coin < reached / threshold, without a division whose rounding differs between devices
            take = (p > 0) & ((coin * threshold_acc < reached) | (p >= threshold_single))
            if take & (start == 0):
                tl.store(predicts + row, token.to(tl.int32))
            tried = tl.where(take, 0, tl.where(lane == node, 1, tried))
            accepted += tl.where(take, 1, 0)
            path = tl.where(place == tl.where(take, accepted, -1), child_row, path)
            row = tl.where(take, child_row, row)
            parent = tl.where(take, node, parent)
            node = tl.where(take, child, sibling)
            reached = tl.where(take, 0.0, reached)
            rejected = tl.where(take, 0, 1)
            seen += 1

        if start == 0:
            tl.store(accept_index + batch * width.to(tl.int64) + place, path, mask=place < width)
            tl.store(accept_token_num + batch, accepted)
            tl.store(last_nodes + batch, parent.to(tl.int32))

        target_row = target_probs + (nodes + parent) * vocab
        i = tl.arange(0, BLOCK)
        for block in range(start, end):
            column = block * BLOCK + i
            weight = positive(tl.load(target_row + block * BLOCK + i, mask=i < vocab - block * BLOCK, other=0.0))
            tl.store(sums + residual_sums + batch * blocks + block, tl.sum(weight, 0))
            mass = 0.0
            # Without a rejection there is no residual; no mass in it makes the draw take the target row.
            if rejected > 0:
                left = without_children(
                    weight,
                    column,
                    candidates + nodes,
                    retrieve_next_token + nodes,
                    retrieve_next_sibling + nodes,
                    parent,
                    drafts,
                    vocab,
                )
                mass = tl.sum(left, 0)
            tl.store(sums + batch * blocks + block, mass)


@triton.jit(do_not_specialize=["batch", "blocks", "residual_sums", "drafts", "width"])
def tree_draw_kernel(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrieve_next_token,
    retrieve_next_sibling,
    final_samples,
    target_probs,
    last_nodes,
    sums,
    batch,
    blocks,
    residual_sums,
    drafts,
    width,
    vocab,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for request in range(tl.program_id(0), batch, tl.num_programs(0)):
        nodes = request * drafts.to(tl.int64)
        row = tl.load(accept_index + request * width.to(tl.int64) + tl.load(accept_token_num + request))
        parent = tl.load(last_nodes + request)
        coin = tl.load(final_samples + request)
        residual_mass, residual_block, residual_rest = pick_block(sums + request * blocks, blocks, coin, BLOCKS)
        _, target_block, target_rest = pick_block(sums + residual_sums + request * blocks, blocks, coin, BLOCKS)
        block = tl.maximum(tl.where(residual_mass > 0, residual_block, target_block), 0)
        rest = tl.where(residual_mass > 0, residual_rest, target_rest)

        i = tl.arange(0, BLOCK)
        column = block * BLOCK + i
        target_row = target_probs + (nodes + parent) * vocab
        weight = positive(tl.load(target_row + block * BLOCK + i, mask=i < vocab - block * BLOCK, other=0.0))
        if residual_mass > 0:
            weight = without_children(
                weight,
                column,
                candidates + nodes,
                retrieve_next_token + nodes,
                retrieve_next_sibling + nodes,
                parent,
                drafts,
                vocab,
            )
        tl.store(predicts + row, pick_token(weight, column, rest))


def run(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> None:
    batch, drafts, vocab = target_probs.shape
    width = accept_index.shape[1]
    if batch == 0:
        return
    blocks = triton.cdiv(vocab, BLOCK)
    pieces = batch * blocks
    sums = torch.empty(2 * pieces, dtype=torch.float32, device=target_probs.device)
    last_nodes = torch.empty(batch, dtype=torch.int32, device=target_probs.device)
    launch(
        tree_judge_kernel,
        pieces,
        target_probs.device,
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrieve_index,
        retrieve_next_token,
        retrieve_next_sibling,
        uniform_samples,
        target_probs,
        last_nodes,
        sums,
        float(threshold_single),
        max(float(threshold_acc), MIN_THRESHOLD_ACC),
        pieces,
        blocks,
        pieces,
        drafts,
        width,
        uniform_samples.shape[1],
        vocab,
        NODES=triton.next_power_of_2(drafts),
        WIDTH=triton.next_power_of_2(width),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    launch(
        tree_draw_kernel,
        batch,
        target_probs.device,
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrieve_next_token,
        retrieve_next_sibling,
        uniform_samples_for_final_sampling,
        target_probs,
        last_nodes,
        sums,
        batch,
        blocks,
        pieces,
        drafts,
        width,
        vocab,
        BLOCKS=triton.next_power_of_2(blocks),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
