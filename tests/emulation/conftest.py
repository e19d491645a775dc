"""One model and one oracle per worker: building and asking them is what costs time here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_npu.config import ModelSpec
from tests.emulation.harness import Bench


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Two threads make these small forwards five times slower."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def spec() -> ModelSpec:
    return ModelSpec.load("tiny")


@pytest.fixture(scope="session")
def bench(spec: ModelSpec) -> Any:
    pytest.importorskip("transformers", reason="the emulation needs transformers")
    return Bench(spec)
