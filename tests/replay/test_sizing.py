"""Bytes of a deployment against the tensors themselves."""

from __future__ import annotations

import pytest

from dsv4_npu.budget import PoolSizes, budget_of, sizes_for_tokens
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec
from dsv4_npu.errors import ConfigError
from dsv4_npu.pools import DSV4Pools
from dsv4_npu.replay.sizing import GIB, pool_bytes, sizes_for_bytes


def config(model: str, platform: str, spec: str = "chain", rows: int = 3) -> CacheConfig:
    speculation = SpeculationSpec("none") if spec == "none" else SpeculationSpec("chain", 3)
    return CacheConfig(ModelSpec.load(model), PlatformSpec.load(platform), speculation, request_rows=rows)


@pytest.mark.parametrize("spec", ["none", "chain"])
@pytest.mark.parametrize("platform", ["a3", "a5"])
@pytest.mark.parametrize("model", ["tiny", "v4_flash_dspark"])
def test_bytes_are_those_of_the_tensors(model: str, platform: str, spec: str) -> None:
    deployment = config(model, platform, spec)
    sizes = PoolSizes(7, 5, 4, 3)
    pools = DSV4Pools(deployment, sizes, device="meta", draft_stages=spec != "none")
    assert pool_bytes(deployment, sizes) == {name: slab.nbytes for name, slab in pools.families().items()}


@pytest.mark.parametrize("budget", [0.5, 3.0, 40.0])
def test_the_largest_sizes_that_fit(budget: float) -> None:
    deployment = config("v4_flash", "a3", rows=8)
    sizes = sizes_for_bytes(deployment, int(budget * GIB))
    larger = sizes_for_tokens(deployment, (sizes.full_pages + 1) * deployment.page)
    fits, too_much = (budget_of(deployment, s).total_bytes for s in (sizes, larger))
    assert fits <= budget * GIB < too_much


def test_too_little_memory_names_the_options() -> None:
    with pytest.raises(ConfigError, match=r"8 request rows.*raise --hbm-gib or lower --max-running"):
        sizes_for_bytes(config("v4_flash", "a3", rows=8), 1 << 20)
