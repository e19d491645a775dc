"""The emulation that some of the faults and the walkthrough need: built once."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def bench() -> Any:
    pytest.importorskip("transformers", reason="the emulation needs transformers")
    from dsv4_npu.config import ModelSpec
    from tests.emulation.harness import Bench

    torch.set_num_threads(1)
    return Bench(ModelSpec.load("tiny"))
