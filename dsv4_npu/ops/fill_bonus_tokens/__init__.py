"""The bonus token of each request: the last one that a verify appended, the root of the next round."""

from __future__ import annotations

import torch

from dsv4_npu.ops._accept_checks import check_accepted, verify_width
from dsv4_npu.ops._checks import INDEX_TYPES, check_no_overlap, check_tensor
from dsv4_npu.ops._registry import register
from dsv4_npu.ops.fill_bonus_tokens import ref

SCHEMA = "(Tensor(a!) bonus_tokens, Tensor predict, Tensor accept_index, Tensor accept_lens) -> ()"


def _meta(
    bonus_tokens: torch.Tensor, predict: torch.Tensor, accept_index: torch.Tensor, accept_lens: torch.Tensor
) -> None:
    return None


OP = register("fill_bonus_tokens_", SCHEMA, ref=ref.fill_bonus_tokens_, meta=_meta, repeats=True)


def check(
    bonus_tokens: torch.Tensor,
    predict: torch.Tensor,
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
) -> None:
    """Raise InputError for arguments that :func:`fill_bonus_tokens_` refuses."""
    name = OP.name
    check_tensor(name, "bonus_tokens", bonus_tokens, ("bs",), INDEX_TYPES)
    bs = bonus_tokens.shape[0]
    check_tensor(name, "predict", predict, ("bs * D",), INDEX_TYPES, bonus_tokens.device)
    check_tensor(name, "accept_index", accept_index, (bs, "W"), INDEX_TYPES, bonus_tokens.device)
    width = verify_width(name, "predict", predict.shape[0], bs)
    check_accepted(name, accept_index, accept_lens, width, predict.device)
    others = {"predict": predict, "accept_index": accept_index, "accept_lens": accept_lens}
    check_no_overlap(name, "bonus_tokens", bonus_tokens, **others)


def fill_bonus_tokens_(
    bonus_tokens: torch.Tensor,
    predict: torch.Tensor,
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Write each request's bonus token, for which no KV exists yet::

        bonus_tokens[b] = predict[accept_index[b, accept_lens[b] - 1]]

    Args:
        bonus_tokens: [bs] int32 or int64; written in place.
        predict: [bs * D] int32 or int64, the verify's tokens by row, not yet compacted.
        accept_index: [bs, W] int32 or int64, verify rows b * D + j of request b, valid by length.
        accept_lens: [bs] int32 or int64 in 1..W.
        backend: "auto" (by the device), "cpu" (C++), "triton" or "ref".

    Raises:
        InputError: a wrong shape, dtype, device, overlap with ``bonus_tokens``, or (CPU tensors) a length out of range
            or a row of another request's block. Nothing is then changed.

    Source: contracts.md §1.
    """
    OP.checked(check, backend, bonus_tokens, predict, accept_index, accept_lens)
