"""One thread, and the model with its oracle for the few tests that need them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_npu.config import ModelSpec


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def bench() -> Any:
    pytest.importorskip("transformers", reason="the emulation needs transformers")
    from tests.emulation.harness import Bench

    return Bench(ModelSpec.load("tiny"))
