from __future__ import annotations

import pytest
import torch

from dsv4_npu.alloc import compiled_ledger_available

BACKENDS = ["python", "cpp"] if compiled_ledger_available() else ["python"]


@pytest.fixture(params=["python", "cpp"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param not in BACKENDS:
        pytest.skip("the compiled ledger is not built")
    return str(request.param)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
