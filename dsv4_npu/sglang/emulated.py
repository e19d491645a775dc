"""What SGLang needs to run its DeepSeek-V4 NPU memory on a CPU: the replacements of the emulated platform."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

from dsv4_npu.errors import UnavailableError

#: The value of SGLang's ``_is_npu`` flags. They are constants of import time, so each is set in its module.
YES = True
_KERNELS = "sgl_kernel_npu.mem_cache.allocator"


def let_deepseek_v4_pass(original: Callable[..., None], platform: Any, *, subsystem: str) -> None:
    """SGLang's refusal of out-of-tree platforms, except for the DeepSeek-V4 pools, which are ours."""
    if "DeepSeek-V4" not in subsystem:
        original(platform, subsystem=subsystem)


def rope_of_any_device(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """SGLang's rotary embedding as for a device: its CPU one knows yarn alone, and V4 has layers without scaling."""
    if kwargs.get("device") == "cpu":
        kwargs["device"] = None
    return original(*args, **kwargs)


def add_missing_modules() -> list[str]:
    """Put what SGLang's NPU modules import and this machine lacks into ``sys.modules``; the names that were added.

    ``torch_npu`` gets the one operator that the allocators call; any other attribute raises when it is called.
    ``sgl_kernel_npu`` gets the page kernel that SGLang's NPU allocator asks for, as SGLang's own torch version of it.
    """
    added = []
    if not _found("torch_npu"):
        module = _empty("torch_npu")
        module.npu_scatter_nd_update_ = _scatter_rows  # type: ignore[attr-defined]
        module.__getattr__ = _absent  # type: ignore[method-assign]
        added.append("torch_npu")
    if not _found("sgl_kernel_npu"):
        _empty(_KERNELS).alloc_extend_kernel = _PageKernel()  # type: ignore[attr-defined]
        added.append(_KERNELS)
    return added


def _found(name: str) -> bool:
    if name in sys.modules:
        return True
    return importlib.util.find_spec(name) is not None


def _empty(name: str) -> types.ModuleType:
    module = types.ModuleType(name, "Stand-in of dsv4_npu's emulated platform.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = module
    return module


def _scatter_rows(target: Any, rows: Any, values: Any) -> Any:
    """``torch_npu.npu_scatter_nd_update_``: write ``values`` at ``rows`` [n, 1] of ``target``."""
    target[rows.squeeze(-1).long()] = values
    return target


class _PageKernel:
    """``alloc_extend_kernel[grid](...)`` without a grid."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(
            prefix: Any, lengths: Any, last: Any, pages: Any, out: Any, requests: int, page_size: int, longest: int
        ) -> None:
            from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

            alloc_extend_naive(prefix, lengths, last, pages, out, page_size, out.device)

        return launch


def _absent(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnavailableError(f"torch_npu.{name} was called, and there is no torch_npu on the emulated platform")

    return refuse
