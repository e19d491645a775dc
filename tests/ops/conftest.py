"""Runs each op test on every implementation: ref, C++, Triton under its interpreter, Triton on a CUDA GPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, which the ops do on first use


@dataclass(frozen=True)
class Target:
    """An implementation and where its tensors live."""

    backend: str
    device: str


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
    if chosen.backend == "triton" or chosen.device == "cuda":
        if importlib.util.find_spec("triton") is None:
            pytest.skip("triton is not installed (pip install --no-deps triton==3.7.1)")
        if chosen.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("Triton's interpreter is off: with a GPU the kernels run compiled")
    if chosen.backend == "cpu":
        from dsv4_npu.ops import _registry

        if _registry.extension_problem:
            pytest.skip(_registry.extension_problem)
    return chosen
