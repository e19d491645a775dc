from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4_npu.errors import InputError
from dsv4_npu.ops import clear_request_states_


def make_case(count: int, ring: int, half: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(count * 1000 + ring)
    return {
        "state": torch.rand(3, (count + 2) * ring + 1, 2 * half, generator=gen).to(dtype),
        "req_pool_indices": torch.randperm(count + 1, generator=gen)[:count] + 1,
        "ring_size": ring,
    }


def check(run: Callable[..., None], case: dict[str, Any], device: str = "cpu") -> None:
    """Decided element by element: whose bank, which half?"""
    before, ring = case["state"], case["ring_size"]
    half = before.shape[2] // 2
    row, column = torch.arange(before.shape[1])[:, None], torch.arange(2 * half)
    cleared = torch.isin(row // ring, case["req_pool_indices"])
    empty = torch.where(column < half, 0.0, -torch.inf).to(before.dtype)
    want = torch.where(cleared, empty, before)
    state = before.to(device, copy=True)
    run(state, case["req_pool_indices"].to(device), ring)
    assert torch.equal(state.cpu(), want)


@pytest.mark.parametrize(
    ("count", "ring", "half"),
    [(n, ring, half) for n in (0, 1, 3) for ring, half in ((1, 1), (8, 5), (16, 64), (33, 7))] + [(257, 8, 5)],
)
def test_banks_of_these_requests_and_no_other(target: Any, count: int, ring: int, half: int) -> None:
    check(lambda *a: clear_request_states_(*a, backend=target.backend), make_case(count, ring, half), target.device)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_dtypes_and_a_repeated_request(target: Any, index: torch.dtype) -> None:
    case = make_case(3, 16, 9, torch.float64)
    case["req_pool_indices"] = torch.tensor([2, 2, 4], dtype=index)
    check(lambda *a: clear_request_states_(*a, backend=target.backend), case, target.device)


@pytest.mark.parametrize("name", ["last row left", "next bank too", "score zero", "one layer"])
def test_the_check_sees_a_broken_clear(name: str) -> None:
    def mutant(state: torch.Tensor, requests: torch.Tensor, ring: int) -> None:
        half = state.shape[2] // 2
        for r in requests.tolist():
            first, end = r * ring, (r + 1) * ring + {"last row left": -1, "next bank too": 1}.get(name, 0)
            layers = slice(0, 1) if name == "one layer" else slice(None)
            state[layers, first:end, :half] = 0
            state[layers, first:end, half:] = 0 if name == "score zero" else -torch.inf

    with pytest.raises(AssertionError):
        check(mutant, make_case(3, 8, 5))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ring_size": 0}, "ring_size is 0"),
        ({"req_pool_indices": torch.tensor([4])}, "req_pool_indices holds 4; allowed: 0 to 3"),
        ({"req_pool_indices": torch.tensor([-1])}, "req_pool_indices holds -1"),
        ({"req_pool_indices": torch.tensor([1], dtype=torch.int16)}, "req_pool_indices has dtype"),
        ({"state": torch.zeros(3, 33, 3)}, "state has rows of 3"),
    ],
)
def test_refused_by_name_and_unchanged(change: dict[str, Any], named: str) -> None:
    case = make_case(2, 8, 4) | change
    before = case["state"].clone()
    with pytest.raises(InputError, match=r"clear_request_states_: ") as caught:
        clear_request_states_(**case)
    assert named in str(caught.value)
    assert torch.equal(case["state"], before)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.dsv4_npu.clear_request_states_.default, tuple(make_case(2, 8, 4).values()))
