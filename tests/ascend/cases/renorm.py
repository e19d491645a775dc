"""What the two renormalisations share: rows of exact sums with many ties, and how results are compared."""

from __future__ import annotations

import torch

from ..case import Outputs
from .verify import exact_rows


def rows(batch: int, vocab: int, random: torch.Generator, support: int) -> torch.Tensor:
    """Probability rows with ties, one row with NaN and negative entries, one without any mass."""
    probs = exact_rows((batch,), vocab, random, support)
    if batch > 2:
        probs[1, :: max(vocab // 3, 1)] = -0.5
        probs[1, vocab // 2] = float("nan")
        probs[2] = 0
    return probs


def same_tokens(actual: Outputs, expected: Outputs) -> str | None:
    """The same tokens are kept, and their probabilities agree within two roundings of float32 (one division)."""
    got, want = actual["out"], expected["out"]
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"out: {got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}"
    if not torch.equal(got > 0, want > 0):
        place = tuple(((got > 0) != (want > 0)).nonzero()[0].tolist())
        return f"out{list(place)}: {got[place].item()} instead of {want[place].item()}"
    error = ((got - want).abs() / want.clamp_min(torch.finfo(torch.float32).tiny)).max() if want.numel() else 0.0
    return None if error <= 2.5e-7 else f"out: relative error {float(error)}"
