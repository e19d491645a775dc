"""The oracle: copy the accepted rows of a request away, then write them to the front of its block."""

from __future__ import annotations

import torch


def compact_accept_(
    predict: torch.Tensor,
    hidden_states: torch.Tensor | None,
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
) -> None:
    bs = accept_index.shape[0]
    for b, (rows, length) in enumerate(zip(accept_index.tolist(), accept_lens.tolist(), strict=True)):
        first = b * (predict.shape[0] // bs)
        for tensor in (predict, hidden_states):
            if tensor is not None:
                copies = [tensor[row].clone() for row in rows[:length]]
                for k, copy in enumerate(copies):
                    tensor[first + k] = copy
