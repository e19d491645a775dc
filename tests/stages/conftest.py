"""One model, one oracle and one set of stages per kind and worker."""

from __future__ import annotations

import pytest

from tests.emulation.conftest import bench, one_thread, spec
from tests.emulation.harness import Bench
from tests.stages.harness import StageBench

__all__ = ["bench", "one_thread", "spec"]


@pytest.fixture(scope="session")
def mtp(bench: Bench) -> StageBench:
    return StageBench(bench, "mtp")


@pytest.fixture(scope="session")
def dspark(bench: Bench) -> StageBench:
    return StageBench(bench, "dspark")


@pytest.fixture(params=["mtp", "dspark"])
def stages(request: pytest.FixtureRequest, mtp: StageBench, dspark: StageBench) -> StageBench:
    return {"mtp": mtp, "dspark": dspark}[request.param]
