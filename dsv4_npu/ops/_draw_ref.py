"""The final draw of the sampling oracles: a strict inverse CDF in token order over one row of weights."""

from __future__ import annotations

import torch


def positive_part(row: torch.Tensor) -> torch.Tensor:
    """A probability row as float64 weights: NaN and negative entries count as 0."""
    wide = row.to(torch.float64)
    return torch.where(wide > 0, wide, torch.zeros_like(wide))


def draw(weights: torch.Tensor, coin: float) -> int:
    """The first token whose cumulated weight exceeds ``coin`` times the total; -1 if no weight is positive.

    A coin at or beyond the last step (1.0, or one that rounding pushed there) gives the last token of positive weight,
    so a token of weight 0 is never returned.
    """
    positive = torch.nonzero(weights > 0).flatten()
    if positive.numel() == 0:
        return -1
    steps = torch.cumsum(weights[positive], dim=0)
    beyond = torch.nonzero(steps > coin * steps[-1]).flatten()
    chosen = int(beyond[0]) if beyond.numel() else int(positive.numel()) - 1
    return int(positive[chosen])


def draw_residual(residual: torch.Tensor, target: torch.Tensor, coin: float) -> int:
    """A draw from ``residual``; from ``target`` where the residual has no mass; -1 where neither has any."""
    token = draw(residual, coin)
    return token if token >= 0 else draw(target, coin)
