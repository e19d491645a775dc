"""Top-p (nucleus) renormalisation in plain torch: the oracle of the other implementations."""

from __future__ import annotations

import torch

from dsv4_npu.ops._draw_ref import positive_part


def top_p_renorm_prob(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep each row's nucleus and scale it to sum 1. Arguments as in the package's docstring."""
    out = torch.zeros_like(probs)
    for b, p in enumerate(top_p.tolist()):
        row = positive_part(probs[b])
        order = torch.argsort(row, descending=True, stable=True)
        before = torch.cumsum(row[order], dim=0) - row[order]
        keep = order[before < p] if p < 1 else order
        keep = keep if keep.numel() else order[:1]
        mass = row[keep].sum()
        if mass > 0:
            out[b, keep] = (row[keep] / mass).to(probs.dtype)
    return out
