"""Our verify and sampling functions where SGLang looks for ``sgl_kernel_npu.sample``.

A library that is there and right stays in use. Where it is absent its place is taken before SGLang looks
(:func:`inject`); where it lacks a function, or answers wrongly on tiny inputs, that function is replaced once the
device is known (:func:`settle`).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch

LIBRARY = "sgl_kernel_npu"
SAMPLE = f"{LIBRARY}.sample"
GREEDY = f"{SAMPLE}.verify_tree_greedy"
#: The functions that SGLang keeps as globals of its modules, ``None`` where it found none.
FUNCTIONS = (
    "chain_speculative_sampling_triton",
    "tree_speculative_sampling_target_only",
    "top_k_renorm_prob",
    "top_p_renorm_prob",
)
#: The modules from which SGLang's others import them. Before 0.5.23 they went to the library itself, at each call.
SOURCES = ("sglang.kernels.ops.speculative.verify_sampling", "sglang.kernels.ops.sampling.renorm", SAMPLE)

logger = logging.getLogger(__name__)


def is_absent() -> bool:
    """Whether Python would find no ``sgl_kernel_npu.sample``. Imports nothing."""
    if SAMPLE in sys.modules:
        return False
    library = PathFinder.find_spec(LIBRARY) if LIBRARY not in sys.modules else sys.modules[LIBRARY].__spec__
    places = getattr(library, "submodule_search_locations", None)
    return places is None or PathFinder.find_spec(SAMPLE, list(places)) is None


def inject() -> bool:
    """Put stand-ins into ``sys.modules`` if the library's functions are absent; whether it did.

    Takes effect only before SGLang's ``verify_sampling`` is first imported. The library itself gets no stand-in: SGLang
    imports it for operators that only it brings, and must go on to say that it is not there.
    """
    if not is_absent():
        return False
    from dsv4_npu import sampling

    sample = _module(SAMPLE, package=True)
    greedy = _module(GREEDY, package=False)
    for name in FUNCTIONS:
        setattr(sample, name, getattr(sampling, name))
    greedy.verify_tree_greedy = sampling.verify_tree_greedy  # type: ignore[attr-defined]
    sample.verify_tree_greedy = greedy  # type: ignore[attr-defined]
    return True


def settle(device: torch.device) -> dict[str, str]:
    """Give every function that is missing or wrong on ``device`` ours, in every module that holds it.

    Call it once the process has its device and before graphs are captured: it launches each foreign function on tiny
    inputs and waits for the device.

    Returns:
        By function: "ours", or "library" where the one that SGLang found passed the self-check.
    """
    from dsv4_npu import sampling
    from dsv4_npu.sampling import first_failure

    for source in SOURCES:
        with contextlib.suppress(ImportError):
            importlib.import_module(source)
    verdicts: dict[int, bool] = {}
    result = {}
    for name in FUNCTIONS:
        ours = getattr(sampling, name)
        result[name] = "ours"
        for module, found in _holders(name):
            if found is ours:
                continue
            if found is not None and id(found) not in verdicts:
                failure = first_failure(name, found, device)
                verdicts[id(found)] = failure is None
                if failure is not None:
                    logger.warning("%s of SGLang fails the self-check on %s (%s): using ours", name, device, failure)
            if found is not None and verdicts[id(found)]:
                result[name] = "library"
            else:
                setattr(module, name, ours)
    return result


def _holders(name: str) -> list[tuple[types.ModuleType, Callable[..., Any] | None]]:
    """SGLang's modules that import ``name``, not the one that defines it; and the library."""
    found = []
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("sglang.") or module_name == SAMPLE:
            value = getattr(module, "__dict__", {}).get(name, module)
            if value is not module and (module_name == SAMPLE or getattr(value, "__module__", None) != module_name):
                found.append((module, value))
    return found


def _module(name: str, package: bool) -> types.ModuleType:
    module = types.ModuleType(name, "dsv4_npu's functions in the place of an absent sgl_kernel_npu.")
    module.__spec__ = ModuleSpec(name, None, is_package=package)
    if package:
        module.__path__ = []
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)
    return module
