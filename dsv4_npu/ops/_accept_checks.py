"""Checks of a verify's result, shared by the ops that consume it (the layout is contracts.md §1)."""

from __future__ import annotations

import torch

from dsv4_npu.ops._checks import INDEX_TYPES, check_tensor, check_values, fail, values_known


def check_accepted(
    op: str, accept_index: torch.Tensor, accept_lens: torch.Tensor, width: int, device: torch.device
) -> None:
    """``accept_index`` [bs, W] holds, by length, rows of each request's own block of ``width`` verify rows."""
    check_tensor(op, "accept_index", accept_index, ("bs", "W"), INDEX_TYPES, device)
    bs, most = accept_index.shape
    check_tensor(op, "accept_lens", accept_lens, (bs,), INDEX_TYPES, device)
    check_values(op, "accept_lens", accept_lens, 1, min(most, width))
    if not values_known(accept_index, accept_lens):
        return
    valid = torch.arange(most) < accept_lens[:, None]
    foreign = valid & (accept_index.long().div(width, rounding_mode="floor") != torch.arange(bs)[:, None])
    if foreign.any():
        b = int(foreign.nonzero()[0, 0])
        row = int(accept_index[foreign][0])
        fail(
            op, f"accept_index of request {b} holds {row}; allowed: its own rows, {b * width} to {(b + 1) * width - 1}"
        )


def verify_width(op: str, name: str, rows: int, bs: int) -> int:
    """D of a tensor with ``rows`` = bs · D verify rows; 1 where there are no requests."""
    if bs == 0:
        if rows:
            fail(op, f"{name} has {rows} rows for no requests; allowed: 0")
        return 1
    if rows == 0 or rows % bs:
        fail(op, f"{name} has {rows} rows for {bs} requests; allowed: a positive multiple, D rows each")
    return rows // bs
