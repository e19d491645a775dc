"""Top-p renormalisation: keep the nucleus of each row and scale it to sum 1."""

from __future__ import annotations

import torch

from dsv4_npu.ops._checks import check_at_least, check_tensor
from dsv4_npu.ops._registry import register
from dsv4_npu.ops._verify_checks import PROBABILITY
from dsv4_npu.ops.top_p_renorm_prob import ref

SCHEMA = "(Tensor probs, Tensor top_p) -> Tensor"


def _meta(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(probs)


OP = register("top_p_renorm_prob", SCHEMA, ref=ref.top_p_renorm_prob, meta=_meta)


def check(
    probs: torch.Tensor,
    top_p: torch.Tensor,
) -> None:
    """Raise InputError for arguments that :func:`top_p_renorm_prob` refuses."""
    name = OP.name
    check_tensor(name, "probs", probs, ("bs", "V"), PROBABILITY)
    check_at_least(name, "V, the columns of probs,", probs.shape[1], 1)
    check_tensor(name, "top_p", top_p, (probs.shape[0],), PROBABILITY, probs.device)


def top_p_renorm_prob(probs: torch.Tensor, top_p: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Keep each row's fewest likeliest tokens whose mass reaches ``top_p[b]`` and divide by that mass.

    A token stays iff the tokens likelier than it (of equal ones, the lower token is the likelier) have a mass below
    ``top_p[b]``. The likeliest token always stays. NaN and negative entries count as 0; a row without a positive entry
    gives zeros. Sums in float32 may keep or drop a token where the mass lies within rounding of ``top_p[b]``.

    Args:
        probs: [bs, V] float32, contiguous; not changed.
        top_p: [bs] float32; a value >= 1 keeps every token.
        backend: "auto" (by the device), "cpu" (C++), "triton" or "ref".

    Returns:
        [bs, V] float32.

    Raises:
        InputError: a wrong shape, dtype or device.

    Source: contracts.md §2 for the treatment of odd entries.
    """
    kept: torch.Tensor = OP.checked(check, backend, probs, top_p)
    return kept
