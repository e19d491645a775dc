"""A stand-in for the Ascend driver under Triton's own JIT: launches on CPU tensors run through Ascend's linalg IR.

While a :class:`Machine` is active, ``kernel[grid](...)`` binds and specialises its arguments as on an NPU; instead of
loading a device binary, the linalg IR of both front ends (A2/A3 and A5) is executed on the CPU. Each launch runs four
times from the same bytes: programs ascending, descending and shuffled, with two different fillings of everything that
the kernel does not own. All runs must agree bit for bit, which shows that programs do not depend on each other's
order, that nothing is read from beyond a tensor or from lanes that no load has filled, and that nothing is written
beyond a tensor.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .cpu_object import CpuObject, element_count
from .lowering import lower
from .toolchain import TARGETS, Target, ToolError

GUARD = 4096
COPY_LIMIT = 1 << 28
FILLINGS = (0xFF, 0x5A)


class LaunchError(AssertionError):
    """A launch whose runs disagree, or that wrote beyond a tensor."""


@dataclass
class Specialization:
    """One kernel as the JIT compiles it: source, argument types, constants."""

    key: str
    source: Any
    options: dict[str, Any]
    folder: Path
    launches: int = 0
    aliased: set[str] = field(default_factory=set)
    linalg: dict[str, str] = field(default_factory=dict)
    objects: dict[str, CpuObject] = field(default_factory=dict)

    @property
    def kernel(self) -> str:
        return str(self.source.fn.__name__)

    @property
    def constants(self) -> dict[str, Any]:
        return {name: value for name, value in self.source.constants.items() if value is not None}

    @property
    def types(self) -> dict[str, str]:
        return {name: kind for name, kind in self.source.signature.items() if name not in self.source.constants}

    def ir(self, target: Target) -> str:
        """The linalg IR for a target (the two A2/A3 chips share one)."""
        front_end = "a5" if target.a5 else "a2"
        if front_end not in self.linalg:
            self.linalg[front_end] = lower(self.source, target, self.options)
        return self.linalg[front_end]

    def accessed(self, marks: str) -> set[str]:
        """The pointer arguments that the front end marks so: 0 read, 1 written, 2 both; it leaves unused ones alone."""
        pointers = [name for name, kind in self.types.items() if kind.startswith("*")]
        heads = re.findall(r"%arg\d+: memref<[^>]*>( \{[^}]*\})?", self.ir(TARGETS[0]).split(") attributes")[0])[2:]
        return {name for name, head in zip(pointers, heads, strict=True) if re.search(f"tensor_kind = [{marks}]", head)}

    def cpu(self, target: Target) -> CpuObject:
        text = self.ir(target)
        if text not in self.objects:
            self.objects[text] = CpuObject(text, self.folder / f"cpu{len(self.objects)}")
        return self.objects[text]


class Machine:
    """Holds the kernels that were launched while it was active."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.execute = True
        self.kernels: dict[str, Specialization] = {}

    def compile(self, source: Any, target: Any = None, options: dict[str, Any] | None = None) -> Any:
        """What the JIT calls for a new specialisation; returns what it will launch."""
        defaults = _default_options()
        chosen = {name: value for name, value in (options or {}).items() if defaults.get(name) != value}
        chosen.pop("debug", None)
        described = repr((source.fn.cache_key, source.signature, sorted(source.constants.items(), key=str), chosen))
        key = hashlib.sha256(described.encode()).hexdigest()[:16]
        return _Launchable(Specialization(key, source, chosen, self.folder / f"{source.fn.__name__}-{key}"))

    def launch(self, kernel: Specialization, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        kernel = self.kernels.setdefault(kernel.key, kernel)
        kernel.launches += 1
        names = [name for name in kernel.source.fn.arg_names if name in kernel.source.signature]
        pairs = [(name, value) for name, value in zip(names, args, strict=True) if name in kernel.types]
        kernel.aliased |= _aliased(pairs, kernel.accessed("012"), kernel.accessed("12"))
        if not self.execute:
            return
        passed = [value for _, value in pairs]
        programs = list(range(grid[0] * grid[1] * grid[2]))
        shuffled = random.Random(0).sample(programs, len(programs))
        plans = [(programs, 0), (programs[::-1], 1), (shuffled, 0)]
        tensors = [value for value in passed if isinstance(value, torch.Tensor)]
        if sum(tensor.untyped_storage().nbytes() for tensor in tensors) > COPY_LIMIT:
            in_place = [
                (value.data_ptr(), element_count(value)) if isinstance(value, torch.Tensor) else value
                for value in passed
            ]
            kernel.cpu(TARGETS[0]).run(in_place, grid, programs, FILLINGS[0])
            return
        runs = [(TARGETS[0], *plan) for plan in plans] + [(TARGETS[-1], programs, 0)]
        results = []
        for target, order, filling in runs:
            memory = _Memory(tensors, FILLINGS[filling])
            kernel.cpu(target).run([memory.argument(value) for value in passed], grid, order, FILLINGS[filling])
            results.append(memory.contents(kernel.kernel))
        ways = ("programs ascending", "programs descending, other fillings", "programs shuffled", "A5's front end")
        for way, result in zip(ways, results, strict=True):
            for name, first, other in zip(results[0], results[0].values(), result.values(), strict=True):
                if first != other:
                    raise LaunchError(f"{kernel.kernel}: {way} gives other bytes in storage {name} than {ways[0]}")
        _Memory.write_back(tensors, results[0])


def _aliased(arguments: list[tuple[str, Any]], used: set[str], written: set[str]) -> set[str]:
    """The names of used pointer arguments that share a storage with another one, where one of them is written."""
    by_storage: dict[int, set[str]] = {}
    for name, value in arguments:
        if name in used and isinstance(value, torch.Tensor) and value.numel():
            by_storage.setdefault(value.untyped_storage().data_ptr(), set()).add(name)
    return {name for names in by_storage.values() if len(names) > 1 and names & written for name in names}


def _default_options() -> dict[str, Any]:
    from triton.backends.ascend.compiler import NPUOptions

    return dict(NPUOptions().__dict__)


class _Memory:
    """Copies of the storages behind some tensors, each between two guard zones."""

    def __init__(self, tensors: list[torch.Tensor], filling: int) -> None:
        self.filling = filling
        self.buffers: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in self.buffers or not storage.nbytes():
                continue
            buffer = torch.full((storage.nbytes() + 2 * GUARD,), filling, dtype=torch.uint8)
            ctypes.memmove(buffer.data_ptr() + GUARD, storage.data_ptr(), storage.nbytes())
            self.buffers[storage.data_ptr()] = buffer

    def argument(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.untyped_storage().nbytes():
            return (0, 0)
        buffer = self.buffers[value.untyped_storage().data_ptr()]
        start = value.data_ptr() - value.untyped_storage().data_ptr()
        return (buffer.data_ptr() + GUARD + start, element_count(value))

    def contents(self, kernel: str) -> dict[int, bytes]:
        for buffer in self.buffers.values():
            if not ((buffer[:GUARD] == self.filling).all() and (buffer[-GUARD:] == self.filling).all()):
                raise LaunchError(f"{kernel}: wrote beyond a tensor")
        return {address: buffer[GUARD:-GUARD].numpy().tobytes() for address, buffer in self.buffers.items()}

    @staticmethod
    def write_back(tensors: list[torch.Tensor], contents: dict[int, bytes]) -> None:
        for tensor in tensors:
            address = tensor.untyped_storage().data_ptr()
            if address in contents:
                ctypes.memmove(address, contents[address], len(contents[address]))


class _Launchable:
    """What the JIT sees in place of a compiled kernel; always launches on the active machine."""

    function = packed_metadata = None

    def __init__(self, kernel: Specialization) -> None:
        self.kernel = kernel

    def launch_metadata(self, *args: Any) -> None:
        return None

    def _init_handles(self) -> None:
        return None

    def run(self, x: int, y: int, z: int, *rest: Any) -> None:
        _machine().launch(self.kernel, (x, y, z), rest[6:])


class _Driver:
    """The few questions that the JIT asks a driver."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("npu", TARGETS[0].arch, 0)


_active: Machine | None = None


def _machine() -> Machine:
    if _active is None:
        raise ToolError("a kernel bound to the stand-in driver was launched without it")
    return _active


@contextmanager
def active(machine: Machine, programs: int = 40) -> Iterator[Machine]:
    """Make Triton launches in this process run on ``machine``; ``programs`` stands for the vector cores."""
    global _active
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from dsv4_npu.ops import _launch

    create_binder = JITFunction.create_binder
    limit = _launch.program_limit

    def bind_and_redirect(self: Any, backend: Any) -> None:
        create_binder(self, backend)
        self.compile = lambda *args, **options: _machine().compile(*args, **options)

    JITFunction.create_binder = bind_and_redirect
    _launch.program_limit = lambda device_type, index: programs
    driver.set_active(_Driver())
    _launch._compiles_for_cpu_tensors.cache_clear()
    _active = machine
    try:
        yield machine
    finally:
        _active = None
        driver.reset_active()
        JITFunction.create_binder = create_binder
        _launch.program_limit = limit
        _launch._compiles_for_cpu_tensors.cache_clear()
