"""Calls that differ from one that passed its checks in nothing but where their tensors lie."""

from __future__ import annotations

from typing import Any

import torch

Signature = tuple[Any, ...]


def written_arguments(schema: str) -> tuple[int, ...]:
    """The positions of the arguments that an op with this schema writes."""
    arguments = schema[: schema.index(" -> ")].split(", ")
    return tuple(i for i, argument in enumerate(arguments) if "!" in argument)


def signature_of(args: tuple[Any, ...]) -> Signature:
    """All that an op's checks see of plain tensors on a device, but for their addresses."""
    signature: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            signature += (arg.shape, arg.dtype, arg.get_device(), arg.is_contiguous())
        else:
            signature.append(arg)
    return tuple(signature)


def apart(args: tuple[Any, ...], written: tuple[int, ...]) -> bool:
    """Whether no written tensor shares a byte with another argument; the tensors are contiguous."""
    spans = []
    for i, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            start = arg.data_ptr()
            spans.append((start, start + arg.nbytes, i in written))
    spans.sort()
    end, end_written = -1, -1  # of all tensors so far, and of the written ones
    for first, last, is_written in spans:
        if first < last:
            if first < (end if is_written else end_written):
                return False
            end = max(end, last)
            if is_written:
                end_written = max(end_written, last)
    return True
