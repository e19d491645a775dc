"""The move as one Triton launch: a program owns a byte range of a group's rows, reads every source, then writes.

The tile [rows of the group, words] is what makes overlaps and swaps right: it is complete before the first store. A
list so long that not even the narrowest tile holds it goes through a scratch slab in two launches.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_npu.ops._launch import cdiv, launch, next_power_of_2
from dsv4_npu.ops._row_words import MOST_ROWS, as_row_words, block_width

SCRATCH_GROUP = 16


@triton.jit(do_not_specialize=["items", "groups", "group_size", "count"])
def copy_rows_kernel(
    destination,
    source,
    tgt,
    src,
    items,
    groups,
    blocks,
    group_size,
    count,
    destination_layer,
    source_layer,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    entry = tl.arange(0, GROUP)
    column = tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        group = item % groups
        block = (item // groups) % blocks
        layer = (item // groups // blocks).to(tl.int64)
        live = entry < min(group_size, count - group * group_size)
        # A skipped pair (-1, -1) becomes the dummy slot copied onto itself: no mask that depends on data.
        read = tl.maximum(tl.load(src + group * group_size + entry, mask=live, other=0).to(tl.int32), 0).to(tl.int64)
        write = tl.maximum(tl.load(tgt + group * group_size + entry, mask=live, other=0).to(tl.int32), 0).to(tl.int64)
        source_base = source + layer * source_layer + block * BLOCK
        destination_base = destination + layer * destination_layer + block * BLOCK
        # Rows behind the group read slot 0: a mask would cost a select over the tile on Ascend.
        tile = tl.load(source_base + read[:, None] * ROW + column[None, :])
        tl.debug_barrier()  # a program's warps share the tile: none may write while another still reads
        tl.store(destination_base + write[:, None] * ROW + column[None, :], tile, mask=live[:, None])


def copy_rows(
    destination: torch.Tensor, source: torch.Tensor, tgt: torch.Tensor, src: torch.Tensor, group_size: int
) -> None:
    """One launch over [layers, slots, words] slabs; each run of ``group_size`` pairs is read before it is written."""
    count = tgt.numel()
    groups = cdiv(count, group_size)
    layers, row = source.shape[0], source.shape[2]
    padded = max(next_power_of_2(group_size), 2)  # a tile of one row crashes the Ascend front end
    block = block_width(row, padded)
    blocks = row // block
    items = layers * blocks * groups
    launch(
        copy_rows_kernel,
        items,
        source.device,
        destination,
        source,
        tgt,
        src,
        items,
        groups,
        blocks,
        group_size,
        count,
        destination.shape[1] * row,
        source.shape[1] * row,
        ROW=row,
        BLOCK=block,
        GROUP=padded,
    )


def run(slab: torch.Tensor, tgt: torch.Tensor, src: torch.Tensor) -> None:
    if slab.numel() == 0 or tgt.numel() == 0:
        return
    rows = as_row_words(slab.view(slab.shape[0], slab.shape[1] * slab.shape[2], -1))
    if tgt.shape[-1] <= MOST_ROWS:
        copy_rows(rows, rows, tgt, src, tgt.shape[-1])
        return
    count = tgt.numel()
    scratch = rows.new_empty(rows.shape[0], count, rows.shape[2])
    order = torch.arange(count, dtype=torch.int32, device=slab.device)
    copy_rows(scratch, rows, order, src, SCRATCH_GROUP)
    copy_rows(rows, scratch, tgt, order, SCRATCH_GROUP)
