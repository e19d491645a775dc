"""The kernel benchmark compares results before it times them: every case passes, and a wrong rival is caught."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_npu import ops

pytest.importorskip("triton", reason="triton is not installed")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is off", allow_module_level=True)

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _kernels_case import SMALL
from _kernels_memory import clear_draft_states, memory_cases
from _kernels_sampling import CHAIN, TREE, sampling_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_the_memory_cases_pass() -> None:
    seen = set()
    for build in memory_cases(DEVICE, True, {}):
        for case in build():
            case.verify(case.make(7))
            assert case.touched(case.make(7)) > 0
            seen.add(case.op)
    assert len(seen) == 7


@pytest.mark.parametrize("op", [CHAIN, TREE])
def test_the_sampling_cases_pass(op: str) -> None:
    case = sampling_case(op, DEVICE, 3, 4, 300, {})
    for seed in range(3):
        case.verify(case.make(seed))


def test_a_rival_that_does_nothing_is_caught() -> None:
    case = sampling_case(CHAIN, DEVICE, 3, 4, 300, {"chain": lambda *arguments: None})
    with pytest.raises(AssertionError):
        case.verify(case.make(0))
    case = clear_draft_states(DEVICE, 3, SMALL, {"clear": lambda *arguments, **sizes: None})
    with pytest.raises(AssertionError, match="differs"):
        case.verify(case.make(0))


def test_a_rival_that_draws_the_neighbour_is_caught() -> None:
    def neighbour(predicts: Any, index: Any, number: Any, *rest: Any) -> None:
        candidates, rows, _, _, coins, final, p, q = rest[:8]
        given = (predicts, index, number, candidates, rows, coins, final, p, q)
        ops.chain_speculative_sampling(*given, backend="ref")
        last = index.gather(1, number.long()[:, None]).flatten().long()
        predicts[last] = (predicts[last] + 1) % p.shape[2]

    case = sampling_case(CHAIN, DEVICE, 3, 4, 300, {"chain": neighbour})
    with pytest.raises(AssertionError, match=r"coin|weight"):
        case.verify(case.make(0))
