"""SGLang's engine on the emulated ``npu`` device: its NPU branches run, and our classes on the NPU's own paths.

The platform is that of an Ascend host (``SGLANG_PLATFORM=dsv4_npu``), pages have 128 tokens, tensors lie on ``npu:0``
and our operators are the Triton kernels under Triton's interpreter. What SGLang imports of an Ascend host and this
machine lacks is stood in for by modules whose attributes exist and raise when they are called. What is called all the
same, and is not memory, is replaced one by one in :func:`install`.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from dsv4_npu.emulation import device
from dsv4_npu.emulation.stream import Event

#: Packages of an Ascend host that SGLang imports without a guard.
STACK = ("torch_npu", "sgl_kernel_npu", "torchair", "acl", "custom_ops", "triton.language.extra.cann")
_GIB = 1 << 30
#: Memory that the emulated device reports.
MEMORY = 16 * _GIB


class Absent(type):
    """A class of a missing package: it can be named, also its attributes, and raises when it is called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(f"{cls.__name__} was called, and there is no Ascend stack in this process")


class Settings:
    """An object whose settings may be read and set."""

    def __getattr__(self, name: str) -> Any:
        return Settings()


class Stack(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of :data:`STACK` that are not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """A module of the stack, whatever its name."""
        inside = any(name == one or name.startswith(f"{one}.") for one in STACK)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: Any) -> types.ModuleType:
        """A module with any attribute."""
        module = types.ModuleType(spec.name)

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Absent(f"{spec.name}.{name}", (), {})

        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: Any) -> None:
        """The few attributes that SGLang calls when it is imported."""
        if module.__name__ == "torch_npu":
            module.npu = vars(torch)["npu"]
            module.npu_scatter_nd_update_ = _scatter
            module._apply_patches = _nothing
        elif module.__name__ == "torchair":
            module.get_npu_backend = lambda **_: "eager"
        elif module.__name__ == "torchair.configs.compiler_config":
            module.CompilerConfig = Settings
        elif module.__name__ == "acl":
            # Not architecture 35 (A5).
            module.rt = types.SimpleNamespace(get_device_info=lambda *_: (0, 0))


def _scatter(target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``torch_npu.npu_scatter_nd_update_``."""
    target[rows.squeeze(-1).long()] = values
    return target


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Nothing to do."""


class OneStream:
    """A stream of the emulated device, which has one, where work runs when it is enqueued."""

    npu_stream = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: Any = None) -> Any:
        """An event that is done."""
        return vars(torch)["npu"].Event()

    def query(self) -> bool:
        """Everything is done."""
        return True

    def __enter__(self) -> OneStream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def prepare() -> None:
    """Make ``npu`` the emulated device and find the stack; once, before SGLang is imported in this process.

    Raises UnavailableError where the device cannot be emulated.
    """
    device.activate()
    if not any(isinstance(finder, Stack) for finder in sys.meta_path):
        sys.meta_path.append(Stack())
    backend: Any = type(vars(torch)["npu"])
    backend.config = Settings()
    backend.mem_get_info = lambda *_: (MEMORY, MEMORY)
    backend.get_device_name = lambda *_: "emulated"
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(backend, name, lambda *_: 0)
    for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "set_stream", "set_compile_mode"):
        setattr(backend, name, _nothing)
    backend.Stream = backend.StreamContext = OneStream
    backend.current_stream = backend.default_stream = lambda *_: OneStream()
    backend.stream = lambda *_: contextlib.nullcontext()
    # Streams wait for events; with one stream there is nothing to wait for.
    event: Any = Event
    event.wait = _nothing


def install() -> None:
    """Replace in SGLang what needs a real device and is not memory; before its processes are forked."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.hardware_backend.npu import utils as npu_utils
    from sglang.srt.hardware_backend.npu.quantization import moe_methods  # noqa: F401
    from sglang.srt.managers import schedule_batch, scheduler  # noqa: F401
    from sglang.srt.mem_cache import allocation
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.model_loader import loader
    from sglang.srt.platforms import current_platform
    from sglang.srt.utils import common

    from dsv4_npu.sglang import start

    # One process: gloo stands in for HCCL, and nothing is sent.
    parallel_state.get_torch_distributed_pg_options = _nothing
    platform: Any = type(current_platform)
    platform.get_torch_distributed_backend_str = lambda *_: "gloo"
    scheduler._prewarm_hccl_group = _nothing
    # The model's own object is never computed: its weights stay as they are.
    loader.initialize_dummy_weights = _nothing
    _everywhere(npu_utils.npu_format_cast, lambda tensor, *_args, **_kwargs: tensor)
    # The device has no pinned host memory, and SGLang's own Triton kernels cannot look behind its tensors.
    _everywhere(common.is_pin_memory_available, lambda *_args, **_kwargs: False)
    tensor: Any = torch.Tensor
    tensor.pin_memory = lambda one, *_args, **_kwargs: one
    tensor.record_stream = _nothing
    allocation.support_triton = forward_batch_info.support_triton = lambda *_: False
    # The compressor whose save rule would be probed is the emulation's own.
    vars(start)["probe_before_serving"] = _nothing


def _everywhere(theirs: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """Rebind a function of SGLang in every module that imported it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang."):
            for attribute, value in list(vars(module).items()):
                if value is theirs:
                    setattr(module, attribute, ours)
