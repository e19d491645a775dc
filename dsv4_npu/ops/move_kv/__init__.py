"""Move token rows within a slab, all layers in one launch, every source read before any target is written."""

from __future__ import annotations

import torch

from dsv4_npu.ops._checks import (
    INDEX_TYPES,
    check_no_overlap,
    check_tensor,
    check_values,
    fail,
    values_known,
)
from dsv4_npu.ops._registry import register
from dsv4_npu.ops.move_kv import ref

SCHEMA = "(Tensor(a!) slab, Tensor tgt, Tensor src) -> ()"


def _meta(slab: torch.Tensor, tgt: torch.Tensor, src: torch.Tensor) -> None:
    return None


OP = register("move_kv_", SCHEMA, ref=ref.move_kv_, meta=_meta, repeats=True)


def check(
    slab: torch.Tensor,
    tgt: torch.Tensor,
    src: torch.Tensor,
) -> None:
    """Raise InputError for arguments that :func:`move_kv_` refuses."""
    name = OP.name
    check_tensor(name, "slab", slab, ("layers", "pages", "page", "heads", "row"), None)
    shape = ("n",) if tgt.dim() == 1 else ("groups", "n")
    check_tensor(name, "tgt", tgt, shape, INDEX_TYPES, slab.device)
    check_tensor(name, "src", src, tuple(tgt.shape), INDEX_TYPES, slab.device)
    check_no_overlap(name, "slab", slab, tgt=tgt, src=src)
    slots = slab.shape[1] * slab.shape[2]
    check_values(name, "tgt", tgt, -1, slots - 1)
    check_values(name, "src", src, -1, slots - 1)
    if values_known(tgt, src):
        _check_pairs(name, tgt.flatten().long(), src.flatten().long(), tgt.shape[-1])


def move_kv_(slab: torch.Tensor, tgt: torch.Tensor, src: torch.Tensor, *, backend: str = "auto") -> None:
    """KV[tgt] <- KV[src] in every layer, with all sources read before any target is written::

        rows = slab.view(layers, pages * page, row)
        rows[:, tgt] = rows[:, src].clone()

    Overlaps in either direction and swaps come out right. A pair (-1, -1) is skipped, so padded lists need no
    filtering on the device.

    Args:
        slab: [layers, pages, page, heads, row] of any dtype, contiguous; changed in place. Slot s is page s // page,
            offset s % page.
        tgt: [n] or [groups, n] int32 or int64 target slots: 1 <= slot < pages * page, or -1. No slot twice. (Slot 0
            lies in the dummy page; on a device its row is left unspecified when pairs are skipped.)
        src: like ``tgt``, source slots from 0 on. In the two-dimensional form no group may target a slot that another
            group reads (requests own their slots, so one request is one group); groups then move in parallel.
        backend: "auto" (by the device), "cpu" (C++), "triton" or "ref".

    Raises:
        InputError: a wrong shape, dtype, device, overlap with ``slab``, or (CPU tensors) a slot out of range, a target
            that occurs twice, a pair of which one is -1, or groups that touch each other. ``slab`` is then unchanged.

    Source: contracts.md §3.
    """
    OP.checked(check, backend, slab, tgt, src)


def _check_pairs(name: str, tgt: torch.Tensor, src: torch.Tensor, group_size: int) -> None:
    half = ((tgt < 0) != (src < 0)).nonzero()
    if half.numel():
        at = int(half[0])
        fail(name, f"pair {at} is ({int(tgt[at])}, {int(src[at])}); allowed: two slots, or -1 twice to skip it")
    group = torch.arange(tgt.numel()) // max(group_size, 1)
    moved = tgt >= 0
    targets, order = tgt[moved].sort()
    if targets.numel() == 0:
        return
    if int(targets[0]) == 0:
        fail(name, "tgt holds 0; allowed: slots from 1 on, slot 0 lies in the dummy page")
    twice = (targets[1:] == targets[:-1]).nonzero()
    if twice.numel():
        fail(name, f"tgt holds {int(targets[twice[0]])} twice; allowed: each target once")
    found = torch.searchsorted(targets, src[moved]).clamp(max=targets.numel() - 1)
    foreign = (targets[found] == src[moved]) & (group[moved][order][found] != group[moved])
    if foreign.any():
        slot = int(src[moved][foreign][0])
        fail(name, f"src holds {slot}, which another group targets; allowed: groups that do not touch each other")
