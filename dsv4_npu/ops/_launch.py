"""Launching Triton kernels: a one-dimensional persistent grid of a size that suits the device.

Imported only by the ops' ``triton.py`` modules, so Triton is there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from dsv4_npu.errors import UnavailableError
from dsv4_npu.ops._calls import Repeat, recording

# Triton's own launch sorts out arguments anew each time, which costs more host time than the kernel takes. Calling the
# compiled kernel with all arguments in order, constants included, is a form that Triton's tutorials show. Used where it
# was tried (3.6) or the code is the same (3.7).
DIRECT_VERSIONS = ((3, 6), (3, 7))
MOST_PROGRAMS = 65535  # Ascend's limit for the product of the grid
FEWEST_VECTOR_CORES = 40  # of the smallest supported NPU (facts.md §5); used where the driver does not tell


@dataclass(frozen=True)
class Launch:
    """What an observer is told: the kernel's name and its number of programs."""

    kernel: str
    programs: int


observers: list[Callable[[Launch], None]] = []


@functools.cache
def program_limit(device_type: str, index: int | None) -> int:
    """The largest useful grid on a device.

    On an NPU more programs than vector cores are slow; a GPU hides latency with many programs per processor; the
    interpreter runs programs one after another, where a small grid still makes each program loop.
    """
    if device_type == "cuda":
        return min(MOST_PROGRAMS, 64 * torch.cuda.get_device_properties(index).multi_processor_count)
    if device_type == "npu":
        try:
            utilities = triton.runtime.driver.active.utils
            return int(utilities.get_device_properties(index or 0)["num_vectorcore"])
        except (AttributeError, KeyError, RuntimeError):
            return FEWEST_VECTOR_CORES
    return 7


@functools.cache
def _compiles_for_cpu_tensors() -> bool:
    """Whether the active driver is one for NPUs, which takes any tensor; upstream's takes none from the CPU."""
    try:
        return bool(triton.runtime.driver.active.get_current_target().backend == "npu")
    except RuntimeError:
        return False


def cdiv(dividend: int, divisor: int) -> int:
    """``triton.cdiv`` for plain integers: Triton's own costs microseconds on the host."""
    return -(-dividend // divisor)


def next_power_of_2(value: int) -> int:
    """``triton.next_power_of_2`` for plain integers from 1 on."""
    return 1 << (value - 1).bit_length()


_direct = tuple(int(part) for part in triton.__version__.split(".")[:2]) in DIRECT_VERSIONS
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def specialization(
    kernel: Any, device: torch.device, args: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[tuple[Any, ...], list[Any]]:
    """What a compiled kernel depends on, or more, and the arguments with tensors as addresses.

    It depends on types, the device and alignment of tensors, and the values of specialised integers.
    """
    key: list[Any] = [id(kernel), device.index, *constants.items()]
    values: list[Any] = []
    unspecialised = kernel.do_not_specialize
    for name, arg in zip(kernel.arg_names, args, strict=False):
        kind = type(arg)
        if kind is int:
            key.append(-(2**31) <= arg < 2**31 if name in unspecialised else arg)
        elif kind is float:
            key.append(kind)
        else:
            address = arg.data_ptr()
            key += (arg.dtype, arg.get_device(), address & 15)
            arg = address
        values.append(arg)
    return tuple(key), values


def _hooked() -> bool:
    """Whether a tool, such as Triton's profiler, wants to be told of each launch."""
    hooks = triton.knobs.runtime
    first, last = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(
        (first is not None and getattr(first, "calls", True)) or (last is not None and getattr(last, "calls", True))
    )


def _repeat(compiled: Any, launch: Launch, index: int, stream: int, values: list[Any]) -> Repeat:
    """The launch once more, with the same addresses, numbers and stream, where that is what a new call would make."""
    run, function, metadata, programs = compiled.run, compiled.function, compiled.packed_metadata, launch.programs
    current_stream, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    capturing = torch._C._cuda_isCurrentStreamCapturing

    def repeat() -> bool:
        # A captured graph may be replayed on any stream: each call in it is given scratch memory of its own.
        if current_device() != index or current_stream(index) != stream or capturing() or _hooked():
            return False
        for observe in observers:
            observe(launch)
        run(programs, 1, 1, stream, function, metadata, None, None, None, *values)
        return True

    return repeat


def _launch_on_cuda(
    kernel: Any, programs: int, device: torch.device, args: tuple[Any, ...], constants: dict[str, Any]
) -> Repeat | None:
    """Launch on the current device; the launch as one that can be repeated, if that is asked for and possible."""
    if not _direct:
        kernel[(programs,)](*args, **constants)
        return None
    key, values = specialization(kernel, device, args, constants)
    known = _compiled.get(key)
    if known is None:
        compiled = kernel[(programs,)](*args, **constants)
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])
        return None
    compiled, in_order = known
    values += in_order
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    compiled[(programs, 1, 1)](*values, stream=stream)
    if recording.launches is None or torch._C._cuda_isCurrentStreamCapturing():
        return None
    return _repeat(compiled, Launch(kernel.fn.__name__, programs), device.index, stream, values)


def launch(kernel: Any, items: int, device: torch.device, *args: Any, **constants: Any) -> None:
    """Run ``kernel`` over ``items`` pieces of work; no work, no launch.

    The kernel strides over its items by ``tl.num_programs(0)``, so any grid size computes the same.
    """
    if items <= 0:
        return
    programs = min(items, program_limit(device.type, device.index), MOST_PROGRAMS)
    for observe in observers:
        observe(Launch(kernel.fn.__name__, programs))
    if device.type == "cuda":
        if torch.cuda.current_device() == device.index:
            repeat = _launch_on_cuda(kernel, programs, device, args, constants)
        else:
            with torch.cuda.device(device):
                repeat = _launch_on_cuda(kernel, programs, device, args, constants)
        if recording.launches is not None:
            recording.launches.append(repeat)
        return
    if device.type == "cpu" and not isinstance(kernel, InterpretedFunction) and not _compiles_for_cpu_tensors():
        raise UnavailableError(
            "Triton kernels run on an NPU (torch_npu and triton-ascend), on a CUDA GPU (a CUDA build of torch, and "
            "triton) or under Triton's interpreter (TRITON_INTERPRET=1 set before Python starts); the tensors are on "
            "the CPU and the interpreter is off"
        )
    kernel[(programs,)](*args, **constants)
