"""Launching a compiled kernel again: what counts as the same kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_npu import ops

_launch = pytest.importorskip("dsv4_npu.ops._launch", reason="triton is not installed")


class Kernel:
    """What ``specialization`` looks at; a jitted function has these attributes, an interpreted one need not."""

    arg_names = ("x", "n", "rows", "scale", "BLOCK")
    do_not_specialize = ("n",)


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device."""

    def get_device(self) -> int:
        return 3


def key(x: torch.Tensor, n: int, rows: int, scale: float, **constants: Any) -> tuple[Any, ...]:
    arguments = (x, n, rows, scale)
    result: tuple[Any, ...]
    result, values = _launch.specialization(Kernel, torch.device("cuda", 0), arguments, constants)
    assert values == [x.data_ptr(), n, rows, scale]
    return result


def test_what_makes_another_kernel() -> None:
    memory = torch.zeros(64)
    assert memory.data_ptr() % 16 == 0
    base = key(memory[:8], 5, 16, 0.5, BLOCK=8, num_warps=4)
    assert base == key(memory[16:40], 7, 16, 1.0, BLOCK=8, num_warps=4)
    others = [
        key(memory[:8].as_subclass(Elsewhere), 5, 16, 0.5, BLOCK=8, num_warps=4),
        key(memory[1:9], 5, 16, 0.5, BLOCK=8, num_warps=4),
        key(memory.view(torch.int32)[:8], 5, 16, 0.5, BLOCK=8, num_warps=4),
        key(memory[:8], 1 << 31, 16, 0.5, BLOCK=8, num_warps=4),
        key(memory[:8], 5, 1, 0.5, BLOCK=8, num_warps=4),
        key(memory[:8], 5, 17, 0.5, BLOCK=8, num_warps=4),
        key(memory[:8], 5, 16, 0.5, BLOCK=16, num_warps=4),
        key(memory[:8], 5, 16, 0.5, BLOCK=8, num_warps=8),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_sizes_equal_triton_s() -> None:
    triton = pytest.importorskip("triton")
    for n in [*range(1, 70), 1023, 1024, 1025, 2**40 + 1]:
        assert _launch.next_power_of_2(n) == triton.next_power_of_2(n)
        for divisor in (1, 2, 7, 64):
            assert _launch.cdiv(n, divisor) == triton.cdiv(n, divisor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_misaligned_tensors_after_aligned_ones() -> None:
    """A kernel compiled for 16-byte aligned tensors would load wide from these and fault or mix up elements."""
    for shift in (0, 1, 2, 3, 0):
        memory = torch.arange(1, 5000, dtype=torch.int32, device="cuda")
        lengths, starts = memory[shift : shift + 30], memory[100 + shift : 130 + shift]
        rows = torch.arange(30, device="cuda", dtype=torch.int32)
        table = memory[200 + shift : 200 + shift + 600].view(30, 20)
        arguments = (table, rows, starts, lengths, 16, int(lengths.sum()), 20)
        for got, want in zip(ops.extend_slots(*arguments), ops.extend_slots(*arguments, backend="ref"), strict=True):
            assert torch.equal(got, want)
