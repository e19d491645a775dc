"""States as integer words: Ascend has no float64 vectors, and an empty row is only bits."""

from __future__ import annotations

import torch

_MINUS_INFINITY = {torch.float32: (torch.int32, -(1 << 23)), torch.float64: (torch.int64, -(1 << 52))}


def as_words(state: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The state viewed as integers of its element size, and the word whose bits are -inf (0 is 0 in both)."""
    dtype, minus_infinity = _MINUS_INFINITY[state.dtype]
    return state.view(dtype), minus_infinity
