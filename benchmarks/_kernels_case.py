"""One op at one size, as benchmarks/kernels.py runs it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4_npu import ops
from dsv4_npu.ops import _registry

POISON = -77


@dataclass(frozen=True)
class Case:
    """An op with inputs of one size.

    Attributes:
        make: an input set from a seed, fresh random values each time.
        ours: the public function with its checks; ``bare`` the operator without them.
        rivals: other implementations of the same work by name.
        verify: runs ours on a set with poisoned outputs and raises AssertionError where the result is not ``ref.py``'s.
        touched: bytes that the set makes any implementation read and write.
        ceiling: the bandwidth they move at: "fill", "copy" or "read".
        sets: input sets to go round.
        calls: calls per measurement.
    """

    op: str
    size: str
    batch: int
    make: Callable[[int], Any]
    ours: Callable[[Any], object]
    bare: Callable[[Any], object]
    verify: Callable[[Any], None]
    touched: Callable[[Any], int]
    ceiling: str
    rivals: dict[str, Callable[[Any], object]] = field(default_factory=dict)
    sets: int = 8
    calls: int = 128


@dataclass(frozen=True)
class Sizes:
    """``small`` runs in seconds under Triton's interpreter; its times mean nothing."""

    layers: int = 31
    ring: int = 256
    width: int = 1024
    drafts: int = 8
    pages: int = 2048
    page: int = 128
    row: int = 512
    hidden: int = 4096
    lengths: int = 512


SMALL = Sizes(layers=3, ring=132, width=20, drafts=5, pages=20, page=16, row=24, hidden=40, lengths=20)


def both(name: str, device: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The public function and the bare operator; on CPU tensors the Triton kernel under its interpreter."""
    if device == "cpu":
        return functools.partial(getattr(ops, name), backend="triton"), _registry.ops[name].triton()
    return getattr(ops, name), _registry.ops[name].overload


def generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def same(op: str, got: torch.Tensor, want: torch.Tensor) -> None:
    if not torch.equal(got.cpu(), want.cpu()):
        wrong = (got.cpu() != want.cpu()).nonzero()
        raise AssertionError(f"{op}: {len(wrong)} elements differ from ref, the first at {wrong[0].tolist()}")
