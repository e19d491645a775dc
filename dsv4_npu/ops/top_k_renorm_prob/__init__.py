"""Top-k renormalisation: keep the likeliest tokens of each row and scale them to sum 1."""

from __future__ import annotations

import torch

from dsv4_npu.ops._checks import INDEX_TYPES, check_at_least, check_tensor
from dsv4_npu.ops._registry import register
from dsv4_npu.ops._verify_checks import PROBABILITY
from dsv4_npu.ops.top_k_renorm_prob import ref

SCHEMA = "(Tensor probs, Tensor top_k) -> Tensor"


def _meta(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(probs)


OP = register("top_k_renorm_prob", SCHEMA, ref=ref.top_k_renorm_prob, meta=_meta)


def check(
    probs: torch.Tensor,
    top_k: torch.Tensor,
) -> None:
    """Raise InputError for arguments that :func:`top_k_renorm_prob` refuses."""
    name = OP.name
    check_tensor(name, "probs", probs, ("bs", "V"), PROBABILITY)
    check_at_least(name, "V, the columns of probs,", probs.shape[1], 1)
    check_tensor(name, "top_k", top_k, (probs.shape[0],), INDEX_TYPES, probs.device)


def top_k_renorm_prob(probs: torch.Tensor, top_k: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Set all but each row's ``top_k[b]`` likeliest tokens to 0 and divide by what is left.

    Of equal probabilities the lower token is the likelier, so exactly ``top_k[b]`` tokens remain (fewer where fewer are
    positive). NaN and negative entries count as 0; a row without a positive entry gives zeros.

    Args:
        probs: [bs, V] float32, contiguous; not changed.
        top_k: [bs] int32 or int64; a value <= 0 or >= V keeps every token.
        backend: "auto" (by the device), "cpu" (C++), "triton" or "ref".

    Returns:
        [bs, V] float32.

    Raises:
        InputError: a wrong shape, dtype or device.

    Source: contracts.md §2 for the treatment of odd entries.
    """
    kept: torch.Tensor = OP.checked(check, backend, probs, top_k)
    return kept
