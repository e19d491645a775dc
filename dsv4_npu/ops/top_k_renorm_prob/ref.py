"""Top-k renormalisation in plain torch: the oracle of the other implementations."""

from __future__ import annotations

import torch

from dsv4_npu.ops._draw_ref import positive_part


def top_k_renorm_prob(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keep each row's ``top_k`` likeliest tokens and scale them to sum 1. Arguments as in the package's docstring."""
    out = torch.zeros_like(probs)
    vocab = probs.shape[1]
    for b, k in enumerate(top_k.tolist()):
        row = positive_part(probs[b])
        keep = torch.argsort(row, descending=True, stable=True)[: k if 0 < k < vocab else vocab]
        mass = row[keep].sum()
        if mass > 0:
            out[b, keep] = (row[keep] / mass).to(probs.dtype)
    return out
