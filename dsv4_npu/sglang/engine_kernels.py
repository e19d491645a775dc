"""In plain torch what SGLang's EAGLE worker does between its forwards with Triton or with one vendor's kernels.

Like the model they stand in for kernels, so on the emulated device they work on the memory behind its tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from dsv4_npu.emulation.device import held
from dsv4_npu.errors import InputError


def assign_req_to_token_pool_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write the slots ``out_cache_loc [sum of end - start]`` to positions ``[start, end)`` of each request's row."""
    start_offset, end_offset, table = held(start_offset), held(end_offset), held(req_to_token)
    counts = (end_offset - start_offset).to(torch.int64)
    rows = held(req_pool_indices).to(torch.int64).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    positions = start_offset.to(torch.int64).repeat_interleave(counts) + torch.arange(int(counts.sum())) - first
    table[rows, positions] = held(out_cache_loc).to(table.dtype)


def build_tree_kernel_efficient_func(
    parent_list: Any,
    top_scores_index: Any,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: Any,
) -> None:
    """The verify layout of chains: row j of a request is its j-th draft, and row j + 1 its only child.

    Raises InputError for trees, which DeepSeek-V4 does not have. ``tree_mask`` is left as it is: attention over a chain
    is causal.
    """
    if topk != 1:
        raise InputError(f"topk = {topk}; 1 is needed: DeepSeek-V4's compressor ring holds one row per position")
    lengths = held(seq_lens).to(torch.int64)
    batch = len(lengths)
    step = torch.arange(num_verify_tokens)
    held(retrieve_index).copy_(torch.arange(batch * num_verify_tokens).view(batch, num_verify_tokens))
    held(retrieve_next_token).copy_(torch.where(step + 1 < num_verify_tokens, step + 1, -1).expand(batch, -1))
    held(retrieve_next_sibling).fill_(-1)
    held(positions).copy_((lengths[:, None] + step).flatten())


def install() -> None:
    """Put these, and SGLang's own torch version of the last slots, in the place of the kernels in this process."""
    from sglang.srt.mem_cache import allocation
    from sglang.srt.speculative import eagle_utils

    allocation.get_last_loc = allocation.get_last_loc_torch
    allocation.assign_req_to_token_pool_func = assign_req_to_token_pool_func
    eagle_utils.build_tree_kernel_efficient_func = build_tree_kernel_efficient_func
