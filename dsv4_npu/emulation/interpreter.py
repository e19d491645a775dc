"""Triton's interpreter as the stand-in for an NPU's compiler."""

from __future__ import annotations

import importlib
import sys

from dsv4_npu.errors import UnavailableError


def interpret_triton() -> None:
    """Switch Triton to its interpreter, also when it was imported without it.

    Triton decorates its own library when it is imported, by the state of the switch at that moment; so that library is
    loaded again. Kernels of ours that were loaded before stay compiled ones, so then it is too late.

    Raises UnavailableError: Triton cannot be imported, or kernels were loaded before.
    """
    try:
        import triton
    except (ImportError, OSError) as error:
        raise UnavailableError(
            f"device npu: Triton's interpreter stands in for the NPU, and triton cannot be imported here ({error}): "
            "pip install --no-deps triton==3.7.1"
        ) from error
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(triton.language.cdiv, InterpretedFunction):
        ours = [name for name in sys.modules if name.startswith("dsv4_npu.ops.") and name.endswith(".triton")]
        if ours:
            raise UnavailableError(
                f"device npu: {ours[0]} was loaded for a compiler; activate the device before the first kernel runs, "
                "or set TRITON_INTERPRET=1 before Python starts"
            )
        triton.knobs.runtime.interpret = True
        for name in ("triton.language.standard", "triton.language.random", "triton.language"):
            importlib.reload(importlib.import_module(name))
