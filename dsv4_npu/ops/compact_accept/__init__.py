"""Move the accepted rows of predict and hidden states to the front of each request's block, in one launch."""

from __future__ import annotations

import torch

from dsv4_npu.ops._accept_checks import check_accepted, verify_width
from dsv4_npu.ops._checks import INDEX_TYPES, check_no_overlap, check_tensor
from dsv4_npu.ops._registry import register
from dsv4_npu.ops.compact_accept import ref

SCHEMA = "(Tensor(a!) predict, Tensor(b!)? hidden_states, Tensor accept_index, Tensor accept_lens) -> ()"


def _meta(
    predict: torch.Tensor, hidden_states: torch.Tensor | None, accept_index: torch.Tensor, accept_lens: torch.Tensor
) -> None:
    return None


OP = register("compact_accept_", SCHEMA, ref=ref.compact_accept_, meta=_meta, repeats=True)


def check(
    predict: torch.Tensor,
    hidden_states: torch.Tensor | None,
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
) -> None:
    """Raise InputError for arguments that :func:`compact_accept_` refuses."""
    name = OP.name
    check_tensor(name, "predict", predict, ("bs * D",), INDEX_TYPES)
    bs = accept_index.shape[0] if accept_index.dim() else 0
    width = verify_width(name, "predict", predict.shape[0], bs)
    check_accepted(name, accept_index, accept_lens, width, predict.device)
    check_no_overlap(name, "predict", predict, accept_index=accept_index, accept_lens=accept_lens)
    if hidden_states is not None:
        check_tensor(name, "hidden_states", hidden_states, (predict.shape[0], "H"), None, predict.device)
        others = {"predict": predict, "accept_index": accept_index, "accept_lens": accept_lens}
        check_no_overlap(name, "hidden_states", hidden_states, **others)


def compact_accept_(
    predict: torch.Tensor,
    hidden_states: torch.Tensor | None,
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Arrange the rows of an accepted tree path as the next module reads them::

        for b in range(bs):
            rows = accept_index[b, :accept_lens[b]]
            predict[b * D : b * D + accept_lens[b]] = predict[rows].clone()
            hidden_states[b * D : b * D + accept_lens[b]] = hidden_states[rows].clone()

    Rows of a block behind its accepted prefix keep their content, which means nothing any more. A chain needs no call:
    its accepted prefix is in place.

    Args:
        predict: [bs * D] int32 or int64, the verify's tokens by row; changed in place.
        hidden_states: [bs * D, H] of any dtype, or None; changed in place.
        accept_index: [bs, W] int32 or int64, verify rows b * D + j of request b, valid by length.
        accept_lens: [bs] int32 or int64 in 1..W.
        backend: "auto" (by the device), "cpu" (C++), "triton" or "ref".

    Raises:
        InputError: a wrong shape, dtype, device, overlap, or (CPU tensors) a length out of range or a row of another
            request's block. Nothing is then changed.

    Source: contracts.md §3.
    """
    OP.checked(check, backend, predict, hidden_states, accept_index, accept_lens)
