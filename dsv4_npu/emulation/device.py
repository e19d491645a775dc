"""An emulated ``npu`` device on a CPU, on torch's Python backend for PrivateUse1; see docs/emulated-npu.md.

After :func:`activate`, ``device="npu"`` works. A tensor on it is a wrapper around held CPU memory: ATen operators run
on that memory, and an operator of ours reaches exactly the kernel registered under the NPU's dispatch key (Triton,
under its interpreter). What costs a real device dear is counted in :data:`~dsv4_npu.emulation.stream.EVENTS`.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from dsv4_npu.emulation.interpreter import interpret_triton
from dsv4_npu.emulation.stream import STREAM, Event
from dsv4_npu.errors import InputError, UnavailableError

NAME = "npu"
_KEY = torch._C.DispatchKey.PrivateUse1
_HOOK = "_setup_privateuseone_for_python_backend"
_INDEXED = {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}

#: Operators that make a tensor from nothing; torch composes the others (zeros, full, rand, ...) of these.
_FACTORIES = (
    "empty.memory_format",
    "empty_strided",
    "arange",
    "arange.start",
    "arange.start_step",
    "eye",
    "eye.m",
    "randperm",
    "tril_indices",
    "triu_indices",
)


class NpuTensor(torch.Tensor):
    """A tensor on the emulated device; ``memory`` is the CPU tensor behind it."""

    memory: torch.Tensor

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> NpuTensor:
        self: NpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=torch.device(NAME, 0),
        )
        self.memory = memory
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"NpuTensor(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def tolist(self) -> Any:
        """A read, as on a device."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refused as on a device, unless ``force`` copies the values to the host: a read."""
        if not force:
            raise TypeError(f"a tensor on {self.device} has no numpy view; copy it to the host first (Tensor.cpu())")
        return self.cpu().numpy()


def held(value: Any) -> Any:
    """The CPU memory behind emulated tensors, also inside of dataclasses, tuples, lists and dictionaries.

    Nothing is counted: this is how the emulation itself, its model and its comparison with the oracle look at memory.
    """
    if isinstance(value, NpuTensor):
        return value.memory
    if isinstance(value, dict):
        return {key: held(one) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(held(one) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {field.name: held(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    return value


def on_device(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """CPU memory that a stand-in for a device kernel has written, as a tensor of ``device``; nothing is copied."""
    return NpuTensor(memory) if device.type == NAME else memory


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    if func.namespace != "aten":
        return _run_own(func, name, args, kwargs)
    if name == "aten::copy_":
        return _copy(*args, **kwargs)
    if torch.Tag.inplace_view in func.tags:
        raise UnavailableError(f"{name}: a tensor on the emulated npu device keeps its shape and memory")
    device = kwargs.get("device")
    if device is not None:
        if torch.device(device).type == "cpu":
            return _to_host(func, args, kwargs)
        kwargs = {**kwargs, "device": "cpu"}
    _check_devices(name, args, kwargs)
    if _reads(func, name, args, kwargs):
        STREAM.read(name)
    elif not _is_view(func) and not name.startswith("aten::empty"):
        STREAM.operator(name)
    return _on_memory(func, args, kwargs)


def _run_own(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator outside of ATen: the kernel under the NPU's key and no other."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1"):
        raise UnavailableError(f"{name} has no kernel for the npu device (dispatch key PrivateUse1)")
    _check_devices(name, args, kwargs)
    launch = importlib.import_module("dsv4_npu.ops._launch")

    def observe(one: Any) -> None:
        STREAM.launch(one.kernel)

    launch.observers.append(observe)
    try:
        return _on_memory(lambda *a, **k: func._op_dk(_KEY, *a, **k), args, kwargs)
    finally:
        launch.observers.remove(observe)


def _on_memory(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run on the held memory; a tensor that was written comes back as the one that was given."""
    given: dict[int, NpuTensor] = {}

    def memory_of(value: Any) -> Any:
        if isinstance(value, NpuTensor):
            given[id(value.memory)] = value
            return value.memory
        return value

    def tensor_of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in given:
            return NpuTensor(value)
        if given[id(value)].shape != value.shape:
            raise UnavailableError("out=: a tensor on the emulated npu device keeps its shape and memory")
        return given[id(value)]

    result = func(*tree_map(memory_of, args), **tree_map(memory_of, kwargs))
    return tree_map(tensor_of, result)


def _is_view(func: Any) -> bool:
    """Whether results only alias arguments: nothing runs on a device."""
    infos = [value.alias_info for value in func._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def _reads(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host must know values before it can go on: a number, or the shape of a result."""
    if name in _INDEXED:
        return any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    if name == "aten::is_nonzero":
        return True
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _check_devices(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """CPU tensors beside device tensors: single numbers are fine, index tensors are copied, the rest is an error."""
    indices = {id(one) for one in args[1]} if name in _INDEXED else set()
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor) and not isinstance(value, NpuTensor) and value.dim():
            if id(value) not in indices:
                raise InputError(f"{name}: a tensor on {value.device} beside tensors on {NAME}:0; one device is needed")
            STREAM.copy_in(value, non_blocking=False)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``target.copy_(source)`` with at least one of them on the device."""
    values: torch.Tensor = held(source)
    if not isinstance(target, NpuTensor):
        if non_blocking:
            STREAM.copy_out(target, values.clone())
            return target
        STREAM.read("aten::copy_")
        return target.copy_(values)
    target.memory.copy_(values)
    if isinstance(source, NpuTensor):
        STREAM.operator("aten::copy_")
    else:
        STREAM.copy_in(source, non_blocking)
    return target


def _to_host(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """``Tensor.to("cpu")``: memory of its own, whatever the dtypes are."""
    result: torch.Tensor = func(*tree_map(held, args), **kwargs).clone()
    if kwargs.get("non_blocking"):
        STREAM.copy_out(result, result.clone())
    else:
        STREAM.read(func._schema.name)
    return result


class _Backend:
    """``torch.npu``."""

    Event = Event

    @staticmethod
    def synchronize(device: Any = None) -> None:
        """Wait for everything: a read in the books."""
        STREAM.read("synchronize")

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Random numbers on the device come from the CPU's generator."""


_library: Any = None


def is_active() -> bool:
    """Whether ``device="npu"`` is the emulated device."""
    return _library is not None


def activate() -> None:
    """Make ``device="npu"`` work in this process; there is no way back. A second call does nothing.

    Raises UnavailableError: torch lacks the hook, another backend holds its place, or Triton's interpreter is missing.
    """
    global _library
    if is_active():
        return
    holder = torch._C._get_privateuse1_backend_name()
    if "torch_npu" in sys.modules or holder != "privateuseone":
        raise UnavailableError(f"device npu: {holder} is loaded in this process and cannot be emulated beside itself")
    setup = getattr(torch.utils.backend_registration, _HOOK, None)
    if setup is None:
        raise UnavailableError(
            f"device npu: torch {torch.__version__} has no torch.utils.backend_registration.{_HOOK}; torch 2.13 has it"
        )
    interpret_triton()
    setup(NAME, backend_module=_Backend())
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in _FACTORIES:
        _register_factory(name)
    _library.impl(
        "_copy_from", lambda source, target, non_blocking=False: _copy(target, source, non_blocking), "PrivateUse1"
    )


def _register_factory(name: str) -> None:
    operator, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, operator), overload or "default")
    _library.impl(name, lambda *args, **kwargs: _run(func, args, kwargs | {"device": NAME}), "PrivateUse1")
