"""One model and one oracle per worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trees.harness import Bench


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Two threads make these small forwards slower."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def bench() -> Any:
    pytest.importorskip("transformers", reason="the emulation needs transformers")
    return Bench()
