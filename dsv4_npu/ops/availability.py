"""What of the optional machinery is there: compiled parts, Triton, devices. For ``doctor`` and for error messages.

Nothing here raises: a part that cannot be used is reported with the reason and the way to get it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass

import torch

from dsv4_npu.ops import _registry

TRITON_DISTRIBUTIONS = ("triton-ascend", "triton")


@dataclass(frozen=True)
class Part:
    """One optional part. ``detail`` is its version or kind when usable, else what is wrong and what to install."""

    name: str
    usable: bool
    detail: str


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _import_part(name: str, module: str, distributions: tuple[str, ...], advice: str) -> Part:
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        return Part(name, False, f"{type(error).__name__}: {error}; {advice}")
    return Part(name, True, _version(*distributions) or "version unknown")


def extension() -> Part:
    """The C++ CPU kernels. Without them the CPU key runs ``ref.py``."""
    if _registry.extension_problem:
        return Part("_C", False, _registry.extension_problem)
    missing = sorted(name for name, op in _registry.ops.items() if not op.has_cpp)
    if missing:
        return Part("_C", False, f"built from other sources: no kernel for {', '.join(missing)}; build it again")
    return Part("_C", True, f"{len(_registry.ops)} kernels on the stable ABI, torch {torch.__version__}")


def ledger() -> Part:
    """The C++ page ledgers. Without them their Python twins run."""
    build = "with pybind11, cmake and a C++ compiler there: pip install --no-build-isolation --no-deps ."
    return _import_part("_ledger", "dsv4_npu._ledger", ("dsv4-npu",), build)


def triton() -> Part:
    """Triton, which the kernels on an NPU or a GPU need."""
    advice = "install triton-ascend for an NPU, triton for a CUDA GPU"
    return _import_part("triton", "triton", TRITON_DISTRIBUTIONS, advice)


def torch_npu() -> Part:
    """Huawei's torch_npu, which brings ``device="npu"``."""
    advice = f"on an Ascend machine with CANN install the torch_npu that pairs with torch {torch.__version__}"
    return _import_part("torch_npu", "torch_npu", ("torch-npu", "torch_npu"), advice)


def report() -> tuple[Part, ...]:
    """Every optional part of the kernels, looked for now (this imports Triton and torch_npu when they are there)."""
    return extension(), ledger(), triton(), torch_npu()
