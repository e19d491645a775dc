"""The Triton implementation; see :mod:`dsv4_npu.ops._renorm_triton`."""

from __future__ import annotations

import torch

from dsv4_npu.ops._renorm_triton import renorm


def run(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    return renorm(probs, top_p, by_mass=True)
