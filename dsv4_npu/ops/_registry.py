"""The library ``torch.ops.dsv4_npu``: how an op's schema meets its implementations.

The schema is defined here, once, from the string in the op's folder. Implementations by dispatch key:

==============  ====================================================================================================
CPU             C++ from ``_C`` where it is built and holds this op, else ``ref.py``
Meta            the shape function, through ``torch.library.register_fake``
PrivateUse1     Triton, the NPU's key; the module ``<op>/triton.py`` is imported by the first call
CUDA            the same Triton kernels, for testing and measuring
==============  ====================================================================================================
"""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsv4_npu.errors import InputError, UnavailableError
from dsv4_npu.ops._calls import MOST_REMEMBERED, Calls, facts_of, recorded, undisturbed
from dsv4_npu.ops._signature import Signature, apart, signature_of, written_arguments

NAMESPACE = "dsv4_npu"
EXTENSION = Path(__file__).parent.parent / "_C.so"
BACKENDS = ("auto", "cpu", "triton", "ref")

# Launchers keep scratch memory and compiled kernels from call to call: threads fill these stores one after another.
_launching = threading.RLock()
_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def _load_extension() -> str | None:
    """Open ``_C``; the reason in words when that does not work."""
    if not EXTENSION.is_file():
        return (
            f"{EXTENSION.name} is not built ("
            "with torch, cmake and a C++ compiler there: pip install --no-build-isolation --no-deps .)"
        )
    try:
        torch.ops.load_library(str(EXTENSION))  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"{EXTENSION.name} does not load with torch {torch.__version__}: {error}"
    return None


@dataclass(frozen=True)
class Op:
    """One registered operator and its implementations side by side."""

    name: str
    schema: str
    ref: Callable[..., Any]
    repeats: bool = False
    written: tuple[int, ...] = ()
    calls: Calls = field(default_factory=Calls, repr=False, compare=False)
    passed: set[Signature] = field(default_factory=set, repr=False, compare=False)

    @property
    def qualified_name(self) -> str:
        return f"{NAMESPACE}::{self.name}"

    @property
    def overload(self) -> Any:
        return getattr(torch.ops.dsv4_npu, self.name).default

    @property
    def has_cpp(self) -> bool:
        """Whether the CPU key holds the C++ implementation."""
        return self.name not in _ref_on_cpu

    def triton(self) -> Callable[..., Any]:
        """The function ``run`` of ``<op>/triton.py``.

        Raises UnavailableError when Triton cannot be imported.
        """
        name = f"dsv4_npu.ops.{self.name.rstrip('_')}.triton"
        try:
            module = sys.modules.get(name) or importlib.import_module(name)
        except (ImportError, OSError) as error:
            raise UnavailableError(
                f"{self.name} on this device needs Triton, which cannot be imported here ({error}). Install "
                "triton-ascend for an NPU (pip install triton-ascend) or triton for a CUDA GPU (pip install triton)."
            ) from error
        run: Callable[..., Any] = module.run
        return run

    def on_device(self, *args: Any) -> Any:
        """Launch the Triton kernel on the device of the tensors, be it the current one or not."""
        run = self.triton()
        with _launching, _as_current(_first_tensor(args).device):
            return run(*args)

    def checked(self, check: Callable[..., None], backend: str, *args: Any, also: tuple[Any, ...] = ()) -> Any:
        """Run ``check(*args, *also)``, then the op on ``args``; a call that comes again is not checked again.

        Tensors on a GPU or NPU go to the Triton kernel without a detour through the dispatcher, which costs the host
        more than a launch: unless a mode, a trace, a transform or a profiler is to see the operator.
        """
        facts = facts_of((*args, *also)) if undisturbed() and not torch._C._get_tracing_state() else None
        if facts is None or backend != "auto":
            if facts is None or not self.calls.known(facts):
                check(*args, *also)
                if facts is not None:
                    self.calls.remember(facts)
            return self(backend, *args)
        if self.calls.repeat(facts):
            return None
        if not self.calls.known(facts):
            self._check(check, args, also)
            self.calls.remember(facts)
        if not _has_kernels(args):
            return self.overload(*args)
        if not self.repeats:
            return self.on_device(*args)
        self.calls.remember(facts, recorded(self.on_device, args))
        return None

    def _check(self, check: Callable[..., None], args: tuple[Any, ...], also: tuple[Any, ...]) -> None:
        """``check``, unless a call that passed it differs in addresses only and these show no overlap."""
        signature = signature_of((*args, *also))
        if signature in self.passed and apart(args, self.written):
            return
        check(*args, *also)
        if len(self.passed) >= MOST_REMEMBERED:
            self.passed.clear()
        self.passed.add(signature)

    def __call__(self, backend: str, *args: Any) -> Any:
        """Run the implementation that ``backend`` names; ``"auto"`` dispatches on the tensors' device.

        Raises InputError for an unknown backend, UnavailableError for one that is not there.
        """
        if backend == "auto":
            return self.overload(*args)
        if backend == "ref":
            return self.ref(*args)
        if backend == "triton":
            return self.on_device(*args)
        if backend == "cpu":
            if not self.has_cpp:
                raise UnavailableError(f"{self.name}: backend 'cpu' is the C++ implementation, but {extension_problem}")
            return self.overload(*args)
        raise InputError(f"{self.name}: backend is {backend!r}; allowed: {', '.join(BACKENDS)}")


extension_problem: str | None
ops: dict[str, Op] = {}
_ref_on_cpu: set[str] = set()


def _has_kernels(args: tuple[Any, ...]) -> bool:
    """Whether the first tensor lies on a device whose dispatch key holds the Triton kernels."""
    first = _first_tensor(args)
    return first.is_cuda or first.device.type == torch._C._get_privateuse1_backend_name()


def _first_tensor(args: tuple[Any, ...]) -> torch.Tensor:
    return next(arg for arg in args if isinstance(arg, torch.Tensor))


def _as_current(device: torch.device) -> AbstractContextManager[Any]:
    """An NPU as the current device, where Triton launches; for a CUDA GPU the launcher itself sees to that."""
    name = torch._C._get_privateuse1_backend_name()
    if device.type != name or device.index is None:
        return nullcontext()
    backend = getattr(torch, name)
    if backend.current_device() == device.index:
        return nullcontext()
    guard: AbstractContextManager[Any] = backend.device(device.index)
    return guard


def register(name: str, schema: str, *, ref: Callable[..., Any], meta: Callable[..., Any], repeats: bool = False) -> Op:
    """Define the op ``name`` (the folder's name, plus ``_`` when it writes its arguments) and all its implementations.

    ``schema`` starts at the parenthesis, as in ``"(Tensor(a!) x, int n) -> ()"``. ``meta`` returns empty tensors of the
    right shapes (None for an op that only writes its arguments). ``repeats`` says that a call whose ``triton.py`` makes
    one launch can be made again by that launch alone: nothing is returned, and no memory is allocated for one call.
    Called once, by the op's ``__init__.py``.
    """
    op = Op(name, schema, ref, repeats, written_arguments(schema))
    _library.define(name + schema)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.qualified_name, "CPU"):
        _ref_on_cpu.add(name)
        _library.impl(name, ref, "CPU")
    torch.library.register_fake(op.qualified_name, meta, lib=_library)
    for key in ("PrivateUse1", "CUDA"):
        _library.impl(name, op.on_device, key)
    ops[name] = op
    return op


extension_problem = _load_extension()
if extension_problem:
    warnings.warn(f"CPU kernels run in plain torch, slower: {extension_problem}", RuntimeWarning, stacklevel=2)
