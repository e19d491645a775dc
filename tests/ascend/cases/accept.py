"""Accepted rows of a verify, for the ops that consume them."""

from __future__ import annotations

import torch

POISON = -9


def accepted_rows(
    batch: int, drafts: int, width: int, index: torch.dtype, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """``accept_index`` [batch, width] with ascending rows of each request (root first), and ``accept_lens`` [batch].

    Beyond a request's length stands -1, as the verify leaves it.
    """
    accept_index = torch.full((batch, width), -1)
    accept_lens = torch.randint(1, min(width, drafts) + 1, (batch,), generator=random)
    for b in range(batch):
        length = int(accept_lens[b])
        chosen = torch.randperm(drafts - 1, generator=random)[: length - 1].sort().values + 1
        accept_index[b, :length] = b * drafts + torch.cat([torch.zeros(1, dtype=torch.long), chosen])
    return accept_index.to(index), accept_lens.to(index)
