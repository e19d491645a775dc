"""Checks of arguments that every op's public function makes before anything is written.

Each raises InputError and names the op, the argument, its value and what is allowed. Checks of values look only at
tensors whose values the host has (:func:`values_known`): a device is never read for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from dsv4_npu.errors import InputError

INDEX_TYPES = (torch.int32, torch.int64)


def fail(op: str, message: str) -> NoReturn:
    raise InputError(f"{op}: {message}")


def check_tensor(
    op: str,
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype] | None,
    device: torch.device | None = None,
) -> None:
    """A contiguous tensor of this shape (a string stands for any length and names it), dtype and device."""
    given = tensor.shape
    if given != shape:  # equal only without names; else length by length
        fits = len(given) == len(shape)
        for wanted, length in zip(shape, given, strict=False):
            if wanted != length and not isinstance(wanted, str):
                fits = False
        if not fits:
            fail(op, f"{name} has shape {list(given)}; allowed: [{', '.join(map(str, shape))}]")
    if dtypes is not None and tensor.dtype not in dtypes:
        fail(op, f"{name} has dtype {tensor.dtype}; allowed: {', '.join(map(str, dtypes))}")
    if device is not None and tensor.device != device:
        fail(op, f"{name} is on {tensor.device}; allowed: {device}, where the first tensor is")
    if not tensor.is_contiguous():
        fail(op, f"{name} is not contiguous (strides {list(tensor.stride())}, shape {list(given)})")


def check_at_least(op: str, name: str, value: int, lowest: int) -> None:
    if value < lowest:
        fail(op, f"{name} is {value}; allowed: at least {lowest}")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last byte of a contiguous tensor, as offsets into its storage."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + tensor.numel() * tensor.element_size()


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two contiguous tensors share a byte."""
    if first.numel() == 0 or second.numel() == 0 or first.device != second.device:
        return False
    a, b = _span(first), _span(second)
    if not torch._C._is_alias_of(first, second):  # type: ignore[attr-defined]
        if type(first) is not torch.Tensor or type(second) is not torch.Tensor or first.is_meta:
            return False
        # Two storages can still cover the same memory, as two torch.from_numpy of one array do.
        a = (first.data_ptr(), first.data_ptr() + a[1] - a[0])
        b = (second.data_ptr(), second.data_ptr() + b[1] - b[0])
    return a[0] < b[1] and b[0] < a[1]


def _addresses(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First and one past the last address of a plain tensor; None where a pointer says nothing (fake, wrapped)."""
    if type(tensor) is not torch.Tensor or tensor.is_meta:
        return None
    start = tensor.data_ptr()
    return start, start + tensor.nbytes


def check_no_overlap(op: str, name: str, written: torch.Tensor, **others: torch.Tensor) -> None:
    """``written`` shares no byte with any of ``others``."""
    check_disjoint(op, {name: written}, others)


def check_disjoint(op: str, written: dict[str, torch.Tensor], read: dict[str, torch.Tensor]) -> None:
    """No tensor of ``written`` shares a byte with another one of ``written`` or with one of ``read``.

    Addresses are asked for once per tensor, since this runs before every launch.
    """
    tensors = written | read
    spans = [_addresses(tensor) for tensor in tensors.values()]
    for i, name in enumerate(written):
        mine = spans[i]
        for j in range(i + 1, len(spans)):
            theirs = spans[j]
            if mine is not None and theirs is not None and (mine[1] <= theirs[0] or theirs[1] <= mine[0]):
                continue
            other = list(tensors)[j]
            if overlap(tensors[name], tensors[other]):
                fail(op, f"{other} shares memory with {name}, which the op writes; give it memory of its own")


def values_known(*tensors: torch.Tensor) -> bool:
    """Whether the host may look at the values: real CPU tensors, not fake, meta, wrapped or on a device."""
    for tensor in tensors:  # noqa: SIM110 (a generator costs more than the check)
        if type(tensor) is not torch.Tensor or not tensor.is_cpu:
            return False
    return True


def check_values(op: str, name: str, tensor: torch.Tensor, lowest: int, highest: int) -> None:
    """Each value lies in [lowest, highest]; looked at only when the host has the values."""
    if tensor.numel() == 0 or not values_known(tensor):
        return
    low, high = (int(value) for value in torch.aminmax(tensor))
    if low < lowest:
        fail(op, f"{name} holds {low}; allowed: {lowest} to {highest}")
    if high > highest:
        fail(op, f"{name} holds {high}; allowed: {lowest} to {highest}")
