"""SGLang's NPU branches on the emulated ``npu`` device: the platform of an Ascend host, our classes, their traffic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.npu_process import MODULES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def steps() -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.sglang.npu_process"],
        cwd=ROOT,
        env={**os.environ, "SGLANG_PLATFORM": "dsv4_npu"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    return {one["step"]: one for one in found}


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_engine_serves_on_the_device(drafts: int) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "dsv4_npu.sglang.demo"),
            *("--device", "npu", "--draft-tokens", str(drafts), "--json"),
        ],
        cwd=ROOT,
        env={**os.environ, "SGLANG_PLATFORM": "dsv4_npu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout[done.stdout.index("{") :])
    assert result["right"]
    assert result["sound"]
    assert len(result["outcomes"]) == 11
    assert ("target_verify" in result["report"]["forwards"]) == bool(drafts)
    assert {one["cached"] for one in result["outcomes"]} == {0, 2048}
    assert sum(one["retracted"] for one in result["outcomes"]) >= 1


def value(steps: dict[str, dict[str, Any]], name: str) -> Any:
    assert steps[name]["error"] is None, steps[name]
    return steps[name]["value"]


def test_the_platform_is_that_of_an_ascend_host(steps: dict[str, dict[str, Any]]) -> None:
    assert value(steps, "platform") == "NpuPlatform"
    assert value(steps, "is_npu") is True
    assert value(steps, "targets") == ["ours"]
    assert value(steps, "classes") == [
        "dsv4_npu.sglang.kv_pool",
        "dsv4_npu.sglang.allocator",
        "dsv4_npu.sglang.req_pool",
    ]


@pytest.mark.parametrize("name", MODULES)
def test_its_modules_import(steps: dict[str, dict[str, Any]], name: str) -> None:
    assert value(steps, f"import {name}") is True


def test_speculation_without_a_compressor_is_refused(steps: dict[str, dict[str, Any]]) -> None:
    assert "torch.ops.npu.compressor is not there" in steps["pools without the compressor"]["error"]


def test_nothing_is_read_from_the_device(steps: dict[str, dict[str, Any]]) -> None:
    extend, decode, clear = (value(steps, name) for name in ("extend", "decode", "clear"))
    assert [one["reads"] for one in (extend, decode, clear)] == [0, 0, 0]
    assert extend["value"] == [2475]
    # FULL, SWA and C128.
    assert extend["launches"] == {"extend_slots_kernel": 3}
    # Two C128 layers, one launch.
    assert clear["launches"] == {"clear_c128_draft_states_kernel": 1}


def test_the_greedy_verify_is_right_there(steps: dict[str, dict[str, Any]]) -> None:
    assert value(steps, "greedy") == [[[0, 1, 2, -1], [4, -1, -1, -1]], [2, 0]]


def test_everything_comes_back(steps: dict[str, dict[str, Any]]) -> None:
    assert value(steps, "release") is True
