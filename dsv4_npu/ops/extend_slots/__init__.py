"""Slots of the tokens that a batch appends, and the rows of the block table that an attention backend reads."""

from __future__ import annotations

import torch

from dsv4_npu.ops._checks import INDEX_TYPES, check_at_least, check_tensor, check_values, fail, values_known
from dsv4_npu.ops._registry import register
from dsv4_npu.ops.extend_slots import ref

SCHEMA = (
    "(Tensor block_table, Tensor req_pool_indices, Tensor starts, Tensor lengths, int page_size, int total, "
    "int columns) -> (Tensor slots, Tensor tables)"
)


def _meta(
    block_table: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    total: int,
    columns: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    slots = block_table.new_empty(total, dtype=torch.int64)
    return slots, block_table.new_empty((req_pool_indices.shape[0], columns), dtype=torch.int32)


OP = register("extend_slots", SCHEMA, ref=ref.extend_slots, meta=_meta)


def check(
    block_table: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    total: int,
    columns: int,
) -> None:
    """Raise InputError for arguments that :func:`extend_slots` refuses."""
    name = OP.name
    check_tensor(name, "block_table", block_table, ("request rows", "table columns"), (torch.int32,))
    check_tensor(name, "req_pool_indices", req_pool_indices, ("bs",), INDEX_TYPES, block_table.device)
    bs = req_pool_indices.shape[0]
    check_tensor(name, "starts", starts, (bs,), INDEX_TYPES, block_table.device)
    check_tensor(name, "lengths", lengths, (bs,), INDEX_TYPES, block_table.device)
    check_at_least(name, "page_size", page_size, 1)
    check_at_least(name, "total", total, 0)
    if total >= 1 << 31:
        fail(name, f"total is {total}; allowed: below 2**31")
    if not 0 <= columns <= block_table.shape[1]:
        fail(name, f"columns is {columns}; allowed: 0 to {block_table.shape[1]}, the columns of block_table")
    check_values(name, "req_pool_indices", req_pool_indices, 0, block_table.shape[0] - 1)
    check_values(name, "starts", starts, 0, columns * page_size)
    check_values(name, "lengths", lengths, 0, columns * page_size)
    if values_known(starts, lengths):
        if int(lengths.sum()) != total:
            fail(name, f"total is {total}; allowed: {int(lengths.sum())}, the sum of lengths")
        longest = int((starts.long() + lengths.long()).max()) if bs else 0
        if longest > columns * page_size:
            most = f"{columns * page_size}, {columns} columns of {page_size}"
            fail(name, f"a request ends at {longest}; allowed: at most {most}")


def extend_slots(
    block_table: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    total: int,
    columns: int,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn page ids into slots::

        slots  = for b, for p in [starts[b], starts[b] + lengths[b]):
                     block_table[req_pool_indices[b], p // page_size] * page_size + p % page_size
        tables[b, j] = block_table[req_pool_indices[b], j]   for j < ceil((starts[b] + lengths[b]) / page_size), else 0

    Args:
        block_table: [request rows, table columns] int32 page ids (the device mirror of the request table).
        req_pool_indices: [bs] int32 or int64 request rows.
        starts: [bs] int32 or int64, the first new position of each request; 0 or more.
        lengths: [bs] int32 or int64, the number of new positions; 0 or more.
        page_size: tokens per page, any positive number.
        total: the sum of ``lengths``, which the host knows; below 2**31, as slots are. Should it be larger on a device,
            the rest of ``slots`` is 0, a slot of the dummy page.
        columns: width of the returned tables; at least the pages of the longest request.
        backend: "auto" (by the device), "cpu" (C++), "triton" or "ref".

    Returns:
        (slots [total] int64 in request order, tables [bs, columns] int32 padded with page 0, the dummy).

    Raises:
        InputError: a wrong shape, dtype or device, or (CPU tensors) a value out of range, a total that is not the sum,
            or a request that does not fit ``columns``.

    Source: contracts.md §0, facts.md §4.
    """
    given = (block_table, req_pool_indices, starts, lengths, page_size, total, columns)
    slots, tables = OP.checked(check, backend, *given)
    return slots, tables
