"""One launch: walk the tree (single elements), sum the blocks of the last accepted node's row, draw.

That row is read once, and one block of it a second time, without the mass of the node's rejected children.
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
from dsv4_npu.ops.tree_speculative_sampling_target_only.ref import MIN_THRESHOLD_ACC

GPU_TILING = Tiling(512, ahead=True, warps=1, programs=16)


@triton.jit
def load_block(row, start, vocab, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    return tl.load(row + start + i, mask=i < vocab - start, other=0.0)


@triton.jit
def as_weight(p, column, candidates, next_sibling, removed_token, removed_node, drafts, vocab):
    """``p`` as weights, without ``removed_token`` and the tokens of ``removed_node`` and its later siblings."""
    weight = tl.where(column == removed_token, 0.0, positive(p))
    node = removed_node
    seen = 0
    while (node >= 0) & (node < drafts) & (seen < drafts):
        token = tl.load(candidates + node)
        token = tl.where((token >= 0) & (token < vocab), token, -1).to(tl.int32)
        weight = tl.where(column == token, 0.0, weight)
        node = tl.load(next_sibling + node)
        seen += 1
    return weight


@triton.jit
def block_masses(
    row,
    candidates,
    next_sibling,
    removed_token,
    removed_node,
    drafts,
    start,
    end,
    vocab,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    n = tl.arange(0, BLOCKS)
    i = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCKS], tl.float32)
    # Beyond the part's last block nothing is read.
    limit = tl.minimum(end * BLOCK, vocab)
    if AHEAD:
        following = load_block(row, start * BLOCK, limit, BLOCK)
    for block in range(start, end):
        if AHEAD:
            p = following
            following = load_block(row, (block + 1) * BLOCK, limit, BLOCK)
        else:
            p = load_block(row, block * BLOCK, vocab, BLOCK)
        weight = as_weight(p, block * BLOCK + i, candidates, next_sibling, removed_token, removed_node, drafts, vocab)
        mass = tl.where(n == block, tl.sum(weight, 0), mass)
    return mass


@triton.jit
def draw_child(row, candidates, next_sibling, first_child, drafts, vocab, goal):
    """A draw among the tokens of ``first_child`` and its later siblings, in token order; -1 if none has mass."""
    drawn = tl.full([], -1, tl.int64)
    reached = 0.0
    more = 1
    while more > 0:
        following = vocab + drawn - drawn
        mass = 0.0
        node = first_child
        seen = 0
        while (node >= 0) & (node < drafts) & (seen < drafts):
            token = tl.load(candidates + node)
            is_draft = (token >= 0) & (token < vocab)
            p = positive(tl.load(row + tl.where(is_draft, token, 0)))
            nearer = is_draft & (p > 0) & (token > drawn) & (token < following)
            following = tl.where(nearer, token, following)
            mass = tl.where(nearer, p, mass)
            node = tl.load(next_sibling + node)
            seen += 1
        more = tl.where((following < vocab) & (reached <= goal), 1, 0)
        drawn = tl.where(more > 0, following, drawn)
        reached += mass
    return drawn.to(tl.int32)


@triton.jit
def finish(
    predicts,
    candidates,
    next_sibling,
    target_row,
    mass,
    last_coin,
    row,
    rejected,
    first_child,
    removed_token,
    removed_node,
    reached,
    drafts,
    vocab,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw from the row."""
    block, rest = pick_block(mass, last_coin, BLOCKS)
    start = tl.maximum(block, 0) * BLOCK
    column = start + tl.arange(0, BLOCK)
    p = load_block(target_row, start, vocab, BLOCK)
    weight = as_weight(p, column, candidates, next_sibling, removed_token, removed_node, drafts, vocab)
    drawn = pick_token(weight, column, rest)
    if (drawn < 0) & (rejected > 0):
        # The rejected children hold all mass: the target's own row is sampled, which is theirs.
        goal = last_coin * reached
        drawn = draw_child(target_row, candidates, next_sibling, first_child, drafts, vocab, goal)
    tl.store(predicts + row, drawn)


@triton.jit(do_not_specialize=["pieces", "parts", "drafts", "width", "coins"])
def tree_speculative_sampling_kernel(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    uniform_samples,
    final_samples,
    target_probs,
    masses,
    counters,
    threshold_single,
    threshold_acc,
    pieces,
    parts,
    drafts,
    width,
    coins,
    vocab,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    lane = tl.arange(0, NODES)
    place = tl.arange(0, WIDTH)
    blocks = tl.cdiv(vocab, BLOCK)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        request = piece // parts
        part = piece - request * parts
        nodes = request * drafts.to(tl.int64)
        coin_row = uniform_samples + request * coins.to(tl.int64)
        last_coin = tl.load(final_samples + request)
        tokens = tl.load(candidates + nodes + lane, mask=lane < drafts, other=-1)
        tokens = tl.where((tokens >= 0) & (tokens < vocab), tokens, -1).to(tl.int32)
        if AHEAD:
            # In a chain each node's parent is the node before it: all such probabilities are asked for at once.
            likely = (lane > 0) & (tokens >= 0)
            element = tl.where(likely, lane - 1, 0).to(tl.int64) * vocab + tl.where(likely, tokens, 0)
            ahead = positive(tl.load(target_probs + nodes * vocab + element, mask=likely, other=0.0))
        tried = tl.zeros([NODES], tl.int32)
        row = tl.load(retrieve_index + nodes).to(tl.int32)
        path = tl.where(place == 0, row, -1)
        parent = nodes
        coin = tl.load(coin_row)
        first_child = tl.load(retrieve_next_token + nodes)
        node = first_child
        reached = 0.0
        rejected = 0
        accepted = 0
        seen = 0
        while (node >= 0) & (node < drafts) & (accepted + 1 < width) & (seen < drafts):
            child = tl.load(retrieve_next_token + nodes + node)
            sibling = tl.load(retrieve_next_sibling + nodes + node)
            next_row = tl.load(retrieve_index + nodes + node).to(tl.int32)
            next_coin = tl.load(coin_row + node)
            token = tl.load(candidates + nodes + node)
            is_draft = (token >= 0) & (token < vocab)
            if AHEAD:
                if nodes + node == parent + 1:
                    p = tl.sum(tl.where(lane == node, ahead, 0.0), 0)
                else:
                    p = positive(tl.load(target_probs + parent * vocab + tl.where(is_draft, token, 0)))
            else:
                p = positive(tl.load(target_probs + parent * vocab + tl.where(is_draft, token, 0)))
            p = tl.where(is_draft, p, 0.0)
            token = token.to(tl.int32)
            if rejected > 0:
                # A token that an earlier sibling had counts once: its mass is already reached, and removed.
                again = tl.max(tl.where((tokens == token) & (tried > 0), 1, 0), 0)
                p = tl.where(again > 0, 0.0, p)
            reached += p
            # coin < reached / threshold, without a division whose rounding differs between devices
            take = tl.where((p > 0) & ((coin * threshold_acc < reached) | (p >= threshold_single)), 1, 0)
            if (take > 0) & (part == 0):
                tl.store(predicts + row, token)
            # Vectors are kept out of the branch: Ascend's compiler does not take branches that yield them.
            tried = tl.where(take > 0, 0, tl.where(lane == node, 1, tried))
            accepted += take
            path = tl.where(place == tl.where(take > 0, accepted, -1), next_row, path)
            row = tl.where(take > 0, next_row, row)
            parent = tl.where(take > 0, nodes + node, parent)
            coin = tl.where(take > 0, next_coin, coin)
            first_child = tl.where(take > 0, child, first_child)
            node = tl.where(take > 0, child, sibling)
            reached = tl.where(take > 0, 0.0, reached)
            rejected = 1 - take
            seen += 1

        if part == 0:
            tl.store(accept_index + request * width.to(tl.int64) + place, path, mask=place < width)
            tl.store(accept_token_num + request, accepted)

        target_row = target_probs + parent * vocab
        tokens_at = candidates + nodes
        siblings_at = retrieve_next_sibling + nodes
        # The first rejected child is taken off by itself: in a chain there is no other.
        child = tl.where(rejected > 0, first_child, 0)
        removed_token = tl.load(tokens_at + child)
        removed_token = tl.where((rejected > 0) & (removed_token < vocab), removed_token, -1).to(tl.int32)
        removed_node = tl.where(rejected > 0, tl.load(siblings_at + child), -1)
        start = part * tl.cdiv(blocks, parts)
        end = tl.minimum(start + tl.cdiv(blocks, parts), blocks)
        mass = block_masses(
            target_row,
            tokens_at,
            siblings_at,
            removed_token,
            removed_node,
            drafts,
            start,
            end,
            vocab,
            BLOCKS,
            BLOCK,
            AHEAD,
        )
        last = 1
        if SHARED:
            last, mass = last_to_arrive(masses, counters, request, parts, mass, start, end, blocks, BLOCKS)
        if last > 0:
            finish(
                predicts,
                tokens_at,
                siblings_at,
                target_row,
                mass,
                last_coin,
                row,
                rejected,
                first_child,
                removed_token,
                removed_node,
                reached,
                drafts,
                vocab,
                BLOCKS,
                BLOCK,
            )


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
    if batch == 0:
        return
    width = accept_index.shape[1]
    parts, constants = plan(batch, vocab, target_probs.device, GPU_TILING)
    # A program alone with its row leaves nothing for others: any address will do.
    masses = counters = accept_token_num
    if parts > 1:
        masses, counters = meeting_place(batch, constants["BLOCKS"], target_probs.device)
    pieces = batch * parts
    launch(
        tree_speculative_sampling_kernel,
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
        uniform_samples_for_final_sampling,
        target_probs,
        masses,
        counters,
        float(threshold_single),
        max(float(threshold_acc), MIN_THRESHOLD_ACC),
        pieces,
        parts,
        drafts,
        width,
        uniform_samples.shape[1],
        vocab,
        NODES=next_power_of_2(drafts),
        WIDTH=next_power_of_2(width),
        **constants,
    )
