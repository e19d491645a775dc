"""The oracle: the token at the last accepted row of each request."""

from __future__ import annotations

import torch


def fill_bonus_tokens_(
    bonus_tokens: torch.Tensor, predict: torch.Tensor, accept_index: torch.Tensor, accept_lens: torch.Tensor
) -> None:
    for b, length in enumerate(accept_lens.tolist()):
        bonus_tokens[b] = predict[int(accept_index[b, length - 1])]
