"""Runs each sampling test on every implementation: ref, C++, Triton under its interpreter, Triton on a CUDA GPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest
import torch
from verify_world import Target

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, which the ops do on first use


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Many requests take the interpreter long; that it gives what ref gives on any coins is tested in the fast tier."""
    for item in items:
        if item.path.name == "test_distribution.py" and item.name.split("[")[-1].startswith("interpreter"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(
    params=[
        pytest.param(Target("ref", "cpu"), id="ref"),
        pytest.param(Target("cpu", "cpu"), id="cpp"),
        pytest.param(Target("triton", "cpu"), id="interpreter"),
        pytest.param(Target("auto", "cuda"), id="cuda", marks=pytest.mark.gpu),
    ]
)
def target(request: pytest.FixtureRequest) -> Target:
    chosen: Target = request.param
    if chosen.device == "cuda" and not HAS_CUDA:
        pytest.skip("no CUDA GPU")
    if chosen.kind in ("interpreter", "cuda") and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (pip install --no-deps triton==3.7.1)")
    if chosen.kind == "interpreter" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter is off: with a GPU the kernels run compiled")
    if chosen.kind == "cpp":
        from dsv4_npu.ops import _registry

        if _registry.extension_problem:
            pytest.skip(_registry.extension_problem)
    return chosen
