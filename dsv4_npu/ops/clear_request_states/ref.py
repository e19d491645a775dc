"""The oracle: one bank at a time, in plain torch."""

from __future__ import annotations

import torch


def clear_request_states_(state: torch.Tensor, req_pool_indices: torch.Tensor, ring_size: int) -> None:
    half = state.shape[2] // 2
    for request in req_pool_indices.tolist():
        bank = state[:, request * ring_size : (request + 1) * ring_size]
        bank[:, :, :half] = 0.0
        bank[:, :, half:] = float("-inf")
