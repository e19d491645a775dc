"""Slots of drafts and verify windows from SGLang's request table, without a look at the device."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_npu.errors import InputError


def assign_extend_cache_locs_uniform_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
    *,
    full_v2p: torch.Tensor | None = None,
    swa_v2p: torch.Tensor | None = None,
    full_out: torch.Tensor | None = None,
    swa_out: torch.Tensor | None = None,
    page_size: int = 1,
    positions_out: torch.Tensor | None = None,
    anchor_src: torch.Tensor | None = None,
    anchor_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Slots of positions ``[start, start + draft_token_num)`` of each request, joined; int64 (int32 on an NPU).

    ``positions_out`` ``[bs, draft_token_num]`` gets the positions and ``anchor_out[:, 0]`` gets ``anchor_src``.
    Virtual page tables (``full_v2p``) belong to SGLang's unified pool, which DeepSeek-V4 has none of on an NPU.
    """
    if full_v2p is not None:
        raise InputError("full_v2p is given; None is needed: the unified pool is not available on an NPU")
    positions = _positions(start_offset, draft_token_num)
    if positions_out is not None:
        positions_out.copy_(positions)
    if anchor_out is not None and anchor_src is not None:
        anchor_out[:, 0].copy_(anchor_src.view(-1))
    slots = req_to_token[req_pool_indices.long().view(-1, 1), positions].reshape(-1)
    return slots.to(torch.int32 if slots.device.type == "npu" else torch.int64)


def assign_draft_cache_locs_contiguous_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """Write the slots of the ``topk · num_cols`` positions behind each request's length into ``out_cache_loc``.

    ``positions`` ``[bs · topk]`` and ``mrope`` ``[3, bs · topk]`` get each request's length, once per branch.
    """
    slots = req_to_token[req_pool_indices.long().view(-1, 1), _positions(seq_lens, topk * num_cols)]
    out_cache_loc.copy_(slots.reshape(out_cache_loc.shape))
    if positions is not None:
        lengths = seq_lens.repeat_interleave(topk)
        positions.copy_(lengths)
        if mrope is not None:
            mrope.copy_(lengths.expand_as(mrope))


def fill_front_out_cache_loc_func(
    num_front: torch.Tensor, out_cache_loc: torch.Tensor, front_out_cache_loc: torch.Tensor
) -> None:
    """Pack the first ``num_front[b]`` slots of each request's window to the front of ``front_out_cache_loc``."""
    if num_front.numel():
        window = out_cache_loc.view(num_front.numel(), -1)
        columns = torch.arange(window.shape[1], device=window.device)
        pack_front((columns < num_front.view(-1, 1)).view(-1), out_cache_loc.view(-1), front_out_cache_loc)


def pack_front(chosen: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
    """Write the chosen ``values`` to the front of ``out``, in order; the rest of ``out`` stays as it is."""
    size = out.numel()
    place = torch.where(chosen, chosen.cumsum(0) - 1, size)
    room = torch.cat((out.view(-1), out.new_zeros(1)))
    room.scatter_(0, place, values.to(out.dtype))
    out.view(-1).copy_(room[:size])


def _positions(starts: torch.Tensor, count: int) -> torch.Tensor:
    return starts.long().view(-1, 1) + torch.arange(count, device=starts.device)
