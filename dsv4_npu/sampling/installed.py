"""The functions of an installed ``sgl_kernel_npu``, used only after they passed the self-check."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from dsv4_npu.errors import UnavailableError
from dsv4_npu.sampling.self_check import first_failure

MODULES = {"verify_tree_greedy": "sgl_kernel_npu.sample.verify_tree_greedy"}
PACKAGE = "sgl_kernel_npu.sample"

_checked: dict[tuple[str, str], Callable[..., Any] | None] = {}


def find(op: str) -> Callable[..., Any]:
    """The library's function.

    Raises UnavailableError where the library is missing, lacks the function, or only leads back to this package.
    """
    module = MODULES.get(op, PACKAGE)
    try:
        function: Callable[..., Any] | None = getattr(importlib.import_module(module), op, None)
    except (ImportError, OSError) as error:
        raise UnavailableError(
            f"{op}: backend 'sgl_kernel_npu' cannot be imported here ({error}). It has no PyPI wheel: build it from "
            "the sgl-kernel-npu sources, or use backend='auto'."
        ) from error
    if function is None:
        raise UnavailableError(f"{op}: the installed sgl_kernel_npu has no {module}.{op}; use backend='auto'")
    if getattr(function, "__module__", "").startswith("dsv4_npu"):
        raise UnavailableError(f"{op}: {module} is this package's own stand-in; use backend='auto'")
    return function


def trusted(op: str, device: torch.device) -> Callable[..., Any] | None:
    """The library's function if it passes the self-check on this kind of device, else None and one warning.

    Checked once per op and kind of device in a process. Raises UnavailableError like :func:`find`.
    """
    key = (op, device.type)
    if key not in _checked:
        function = find(op)
        failure = first_failure(op, function, device)
        if failure is not None:
            warnings.warn(
                f"sgl_kernel_npu's {op} fails the self-check on {device.type} ({failure}); dsv4_npu's own runs instead",
                RuntimeWarning,
                stacklevel=3,
            )
        _checked[key] = function if failure is None else None
    return _checked[key]
