"""The oracle: one row at a time, in plain torch."""

from __future__ import annotations

import torch


def clear_c128_draft_states_(
    state: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    ring_size: int,
    num_draft_tokens: int,
) -> None:
    half = state.shape[2] // 2
    requests = zip(req_pool_indices.tolist(), seq_lens.tolist(), accept_lens.tolist(), strict=True)
    for request, seq_len, accept_len in requests:
        for offset in range(accept_len, num_draft_tokens):
            row = request * ring_size + (seq_len + offset) % ring_size
            state[:, row, :half] = 0.0
            state[:, row, half:] = float("-inf")
