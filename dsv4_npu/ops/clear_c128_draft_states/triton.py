"""The clear as one Triton launch over (request, layer) pairs.

A program walks its pairs; within a pair it writes the rejected rows whole, so an accepted run costs three scalar reads.
Consecutive programs take consecutive layers of one request, which spreads a single request over all cores.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_npu.ops._launch import launch, next_power_of_2
from dsv4_npu.ops._state_words import as_words


@triton.jit(do_not_specialize=["pairs"])
def clear_c128_draft_states_kernel(
    state,
    req_pool_indices,
    seq_lens,
    accept_lens,
    pairs,
    layers,
    layer_stride,
    ring_size,
    num_draft_tokens,
    SCORE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    empty = tl.where(column < WIDTH // 2, 0, SCORE).to(state.dtype.element_ty)
    for pair in range(tl.program_id(0), pairs, tl.num_programs(0)):
        batch = pair // layers
        layer = pair % layers
        accepted = tl.load(accept_lens + batch).to(tl.int32)
        row = ((tl.load(seq_lens + batch).to(tl.int64) + accepted) % ring_size).to(tl.int32)
        bank = tl.load(req_pool_indices + batch).to(tl.int64) * ring_size
        base = state + layer.to(tl.int64) * layer_stride + bank * WIDTH
        for _ in range(accepted, num_draft_tokens):
            tl.store(base + row.to(tl.int64) * WIDTH + column, empty, mask=column < WIDTH)
            row = tl.where(row + 1 == ring_size, 0, row + 1)


def run(
    state: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    ring_size: int,
    num_draft_tokens: int,
) -> None:
    layers, rows, width = state.shape
    words, score = as_words(state)
    pairs = layers * req_pool_indices.shape[0]
    launch(
        clear_c128_draft_states_kernel,
        pairs if width else 0,
        state.device,
        words,
        req_pool_indices,
        seq_lens,
        accept_lens,
        pairs,
        layers,
        rows * width,
        ring_size,
        num_draft_tokens,
        SCORE=score,
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        num_warps=8,
    )
