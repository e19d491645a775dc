"""The compaction as one Triton launch over (request, columns of the hidden states); column block 0 does the tokens too.

A program holds all accepted rows of its columns before it writes the first, as in ``move_kv``.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_npu.ops._launch import launch, next_power_of_2
from dsv4_npu.ops._row_words import as_row_words, block_width


@triton.jit(do_not_specialize=["items"])
def compact_accept_kernel(
    predict,
    hidden_states,
    accept_index,
    accept_lens,
    items,
    blocks,
    verify_width,
    index_width,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    entry = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        batch = item // blocks
        block = item % blocks
        accepted = tl.load(accept_lens + batch).to(tl.int32)
        live = entry < accepted
        first = batch * verify_width
        row = tl.load(accept_index + batch * index_width + entry, mask=live, other=0).to(tl.int32)
        row = tl.where(live, row, first)
        if block == 0:
            tokens = tl.load(predict + row)
            tl.debug_barrier()  # a program's warps share the rows: none may write while another still reads
            tl.store(predict + first + entry, tokens, mask=live)
        if ROW > 0:
            base = hidden_states + block * BLOCK
            read = row.to(tl.int64)
            write = (first + entry).to(tl.int64)
            tile = tl.load(base + read[:, None] * ROW + column[None, :])
            tl.debug_barrier()
            tl.store(base + write[:, None] * ROW + column[None, :], tile, mask=live[:, None])


def run(
    predict: torch.Tensor, hidden_states: torch.Tensor | None, accept_index: torch.Tensor, accept_lens: torch.Tensor
) -> None:
    bs, index_width = accept_index.shape
    if bs == 0:
        return
    rows = max(next_power_of_2(index_width), 2)  # a tile of one row crashes the Ascend front end
    if hidden_states is None or hidden_states.numel() == 0:
        hidden, row, block = predict, 0, 1
    else:
        hidden = as_row_words(hidden_states)
        row = hidden.shape[-1]
        block = block_width(row, rows)
    blocks = max(row // block, 1)
    launch(
        compact_accept_kernel,
        bs * blocks,
        predict.device,
        predict,
        hidden,
        accept_index,
        accept_lens,
        bs * blocks,
        blocks,
        predict.shape[0] // bs,
        index_width,
        ROW=row,
        BLOCK=block,
        ROWS=rows,
    )
