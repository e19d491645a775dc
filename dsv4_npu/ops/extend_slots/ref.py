"""The oracle: position by position."""

from __future__ import annotations

import torch


def extend_slots(
    block_table: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    total: int,
    columns: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    slots = torch.zeros(total, dtype=torch.int64, device=block_table.device)
    tables = torch.zeros(len(starts), columns, dtype=torch.int32, device=block_table.device)
    at = 0
    requests = zip(req_pool_indices.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    for b, (row, start, length) in enumerate(requests):
        pages = block_table[row].tolist()
        for position in range(start, start + length):
            slots[at] = pages[position // page_size] * page_size + position % page_size
            at += 1
        for column in range(-(-(start + length) // page_size)):
            tables[b, column] = pages[column]
    return slots, tables
