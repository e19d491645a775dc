"""The slots and tables as one Triton launch over (request, page): a scalar page id, then one run of slots."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_npu.ops._launch import launch, next_power_of_2

LENGTHS_AT_ONCE = 256


@triton.jit(do_not_specialize=["items", "columns", "total"])
def extend_slots_kernel(
    slots,
    tables,
    block_table,
    req_pool_indices,
    starts,
    lengths,
    items,
    columns,
    total,
    table_stride,
    page_size,
    PAGE: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    lane = tl.arange(0, LENGTHS)
    offset = tl.arange(0, PAGE)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        batch = item // columns
        column = item % columns
        start = tl.load(starts + batch).to(tl.int32)
        end = start + tl.load(lengths + batch).to(tl.int32)
        first = column * page_size
        request = tl.load(req_pool_indices + batch).to(tl.int64)
        page = tl.load(block_table + request * table_stride + column)
        page = tl.where(first < end, page, 0)
        tl.store(tables + item, page)
        low = tl.maximum(first, start)
        high = tl.minimum(first + page_size, end)
        if low < high:
            before = 0
            for other in range(0, batch, LENGTHS):
                some = tl.load(lengths + other + lane, mask=lane < batch - other, other=0)
                before += tl.sum(some.to(tl.int32), 0)
            at = before + low - start
            run_length = tl.minimum(high - low, total - at)
            slot = page * page_size + low - first + offset
            tl.store(slots + at + offset, slot.to(tl.int64), mask=offset < run_length)


def run(
    block_table: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    total: int,
    columns: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    bs = req_pool_indices.shape[0]
    slots = block_table.new_zeros(total, dtype=torch.int64)
    tables = block_table.new_empty((bs, columns))
    launch(
        extend_slots_kernel,
        bs * columns,
        block_table.device,
        slots,
        tables,
        block_table,
        req_pool_indices,
        starts,
        lengths,
        bs * columns,
        columns,
        total,
        block_table.shape[1],
        page_size,
        PAGE=next_power_of_2(page_size),
        LENGTHS=LENGTHS_AT_ONCE,
    )
    return slots, tables
