"""The page about movement: its example runs, its table of sizes is computed again."""

from __future__ import annotations

import re
from pathlib import Path

from dsv4_npu.budget import sizes_for_tokens
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec
from dsv4_npu.movement import describe
from dsv4_npu.pools import DSV4Pools

PAGE = (Path(__file__).parents[2] / "docs" / "movement.md").read_text(encoding="utf-8")


def test_the_example_runs() -> None:
    found = re.search(r"<!-- example -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found
    names: dict[str, object] = {}
    exec(found[1], names)
    assert (names["start"], names["evicted"]) == (300, [])


def test_the_sizes_are_those_of_the_pools() -> None:
    rows = re.findall(r"^\| (v4_\w+) (a\d) \| (\d+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 8
    for model, platform, length, cells in rows:
        config = CacheConfig(
            ModelSpec.load(model), PlatformSpec.load(platform), SpeculationSpec("chain", 3), context_len=131072
        )
        pools = DSV4Pools(config, sizes_for_tokens(config, 131072), device="meta", draft_stages=True)
        spans = describe(config, int(length))
        mib = {
            name: spans[name].size * sum(t.shape[0] * t.shape[-1] * t.element_size() for t in slab.tensors()) / 2**20
            for name, slab in pools.families().items()
        }
        states = sum(size for name, size in mib.items() if "state" in name)
        want = (mib["swa"], mib["c4"] + mib["c4 indexer"], mib["c128"], states, sum(mib.values()))
        assert [f"{size:.1f}" for size in want] == cells.split(" | "), (model, platform, length)
