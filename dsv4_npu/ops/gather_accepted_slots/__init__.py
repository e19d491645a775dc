"""The slots that a commit copies between, from the verify window alone."""

from __future__ import annotations

import torch

from dsv4_npu.ops._accept_checks import check_accepted, verify_width
from dsv4_npu.ops._checks import INDEX_TYPES, check_tensor
from dsv4_npu.ops._registry import register
from dsv4_npu.ops.gather_accepted_slots import ref

SCHEMA = "(Tensor out_cache_loc, Tensor accept_index, Tensor accept_lens) -> (Tensor tgt, Tensor src)"


def _meta(
    out_cache_loc: torch.Tensor, accept_index: torch.Tensor, accept_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return out_cache_loc.new_empty(accept_index.shape), out_cache_loc.new_empty(accept_index.shape)


OP = register("gather_accepted_slots", SCHEMA, ref=ref.gather_accepted_slots, meta=_meta)


def check(
    out_cache_loc: torch.Tensor,
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
) -> None:
    """Raise InputError for arguments that :func:`gather_accepted_slots` refuses."""
    name = OP.name
    check_tensor(name, "out_cache_loc", out_cache_loc, ("bs * D",), INDEX_TYPES)
    bs = accept_index.shape[0] if accept_index.dim() else 0
    width = verify_width(name, "out_cache_loc", out_cache_loc.shape[0], bs)
    check_accepted(name, accept_index, accept_lens, width, out_cache_loc.device)


def gather_accepted_slots(
    out_cache_loc: torch.Tensor, accept_index: torch.Tensor, accept_lens: torch.Tensor, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Target and source slots of a commit, padded with -1, as ``move_kv_(slab, tgt, src)`` takes them::

        tgt[b, k] = out_cache_loc[b * D + k]              for k < accept_lens[b], else -1
        src[b, k] = out_cache_loc[accept_index[b, k]]     for k < accept_lens[b], else -1

    The slot of position seq_len + k is that of verify row k, so the targets are the positions that the commit adds.
    The request's row of the block table is not read: under overlap it may belong to another request by now.

    Args:
        out_cache_loc: [bs * D] int32 or int64, the slot of each verify row.
        accept_index: [bs, W] int32 or int64, verify rows b * D + j of request b, valid by length.
        accept_lens: [bs] int32 or int64 in 1..W.
        backend: "auto" (by the device), "cpu" (C++), "triton" or "ref".

    Returns:
        (tgt, src), each [bs, W] of ``out_cache_loc``'s dtype.

    Raises:
        InputError: a wrong shape, dtype or device, or (CPU tensors) a length out of range or a row of another request's
            block.

    Source: contracts.md §0, §3.
    """
    tgt, src = OP.checked(check, backend, out_cache_loc, accept_index, accept_lens)
    return tgt, src
