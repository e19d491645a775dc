"""The oracle: copy every source row away, then write the targets."""

from __future__ import annotations

import torch


def move_kv_(slab: torch.Tensor, tgt: torch.Tensor, src: torch.Tensor) -> None:
    rows = slab.view(slab.shape[0], slab.shape[1] * slab.shape[2], -1)
    pairs = [pair for pair in zip(tgt.flatten().tolist(), src.flatten().tolist(), strict=True) if pair != (-1, -1)]
    copies = [(target, rows[:, source].clone()) for target, source in pairs]
    for target, row in copies:
        rows[:, target] = row
