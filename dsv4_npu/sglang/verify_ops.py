"""What SGLang calls between a verify and the next draft, on our ops."""

from __future__ import annotations

from functools import lru_cache

import torch

from dsv4_npu import ops, sampling
from dsv4_npu.sglang.cache_locs import pack_front

Verdict = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def verify_tree_greedy_func(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> Verdict:
    """Accept the drafts that the target's first choices confirm; see :func:`dsv4_npu.ops.verify_tree_greedy`.

    The first three are written and returned. ``topk`` is SGLang's and not needed: the links say who is a sibling.
    """
    return sampling.verify_tree_greedy(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrieve_index,
        retrieve_next_token,
        retrieve_next_sibling,
        target_predict,
    )


def fill_bonus_tokens_func(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """Write each request's last accepted token: ``bonus[b] = accept_tokens[b, accept_lens[b] - 1]``.

    ``accept_tokens`` int32 ``[bs, stride]`` is compacted already, so verify row ``b · stride + k`` is its entry k.
    """
    if batch_size:
        index = _identity(batch_size, accept_stride, accept_tokens.device)
        ops.fill_bonus_tokens_(bonus_tokens, accept_tokens.reshape(-1), index, accept_lens)


def fill_accept_out_cache_loc_func(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor, size: int
) -> None:
    """Pack the slots of all accepted rows (``accept_index`` ≥ 0) to the front of ``accept_out_cache_loc``."""
    rows = accept_index.reshape(-1)[:size]
    pack_front(rows >= 0, out_cache_loc[rows.clamp_min(0).long()], accept_out_cache_loc)


def clear_unaccepted_c128_draft_states(
    state: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    *,
    ring_size: int,
    num_draft_tokens: int,
) -> None:
    """Empty the rows of rejected drafts in one layer's states ``[rows, kv | score]``; ``seq_lens`` before the verify.

    Our pool clears all layers in one launch and does not come here; others may call SGLang's function by its name.
    """
    if num_draft_tokens > 1 and req_pool_indices.numel():
        ops.clear_c128_draft_states_(
            state.unsqueeze(0), req_pool_indices, seq_lens, accept_lens, ring_size, num_draft_tokens
        )


@lru_cache(maxsize=64)
def _identity(batch: int, width: int, device: torch.device) -> torch.Tensor:
    return torch.arange(batch * width, device=device).view(batch, width)
