"""The bank clear as one Triton launch over (request, layer, run of rows)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_npu.ops._launch import cdiv, launch, next_power_of_2
from dsv4_npu.ops._state_words import as_words

ROWS_PER_ITEM = 16


@triton.jit(do_not_specialize=["items"])
def clear_request_states_kernel(
    state,
    req_pool_indices,
    items,
    layers,
    runs,
    layer_stride,
    ring_size,
    SCORE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    empty = tl.where(column < WIDTH // 2, 0, SCORE).to(state.dtype.element_ty)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        request = tl.load(req_pool_indices + item // (layers * runs)).to(tl.int64)
        layer = (item // runs) % layers
        first = (item % runs) * ROWS
        base = state + layer.to(tl.int64) * layer_stride + request * ring_size * WIDTH
        for row in range(first, min(first + ROWS, ring_size)):
            tl.store(base + row * WIDTH + column, empty, mask=column < WIDTH)


def run(state: torch.Tensor, req_pool_indices: torch.Tensor, ring_size: int) -> None:
    layers, rows, width = state.shape
    words, score = as_words(state)
    runs = cdiv(ring_size, ROWS_PER_ITEM)
    items = layers * runs * req_pool_indices.shape[0]
    launch(
        clear_request_states_kernel,
        items if width else 0,
        state.device,
        words,
        req_pool_indices,
        items,
        layers,
        runs,
        rows * width,
        ring_size,
        SCORE=score,
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        ROWS=ROWS_PER_ITEM,
    )
