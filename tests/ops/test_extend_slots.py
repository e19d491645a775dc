from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu import addressing
from dsv4_npu.errors import InputError
from dsv4_npu.ops import extend_slots

Result = tuple[torch.Tensor, torch.Tensor]


def make_case(lengths: list[int], starts: list[int], page_size: int, seed: int = 0) -> tuple[Any, ...]:
    gen = torch.Generator().manual_seed(seed)
    ends = [a + n for a, n in zip(starts, lengths, strict=True)]
    columns = max([addressing.pages_for(end, page_size) for end in ends], default=1)
    bs = len(lengths)
    table = 1 + torch.randperm((bs + 2) * (columns + 1), generator=gen, dtype=torch.int32).view(bs + 2, columns + 1)
    rows = torch.randperm(bs + 2, generator=gen)[:bs]
    batch = torch.tensor(starts, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)
    return table, rows, *batch, page_size, sum(lengths), columns


def check(run: Callable[..., Result], case: tuple[Any, ...], device: str = "cpu") -> None:
    table, rows, starts, lengths, page_size, total, columns = case
    slots, tables = run(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in case))
    assert (slots.dtype, tables.dtype) == (torch.int64, torch.int32)
    per_token = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    before = torch.cumsum(lengths, 0) - lengths
    positions = starts[per_token] + torch.arange(total) - before[per_token]
    assert torch.equal(slots.cpu(), addressing.full_slots(table, rows[per_token], positions, page_size))
    held = torch.arange(columns) < -(-(starts + lengths) // page_size)[:, None]
    assert torch.equal(tables.cpu(), torch.where(held, table[rows, :columns], 0))


def on(target: Any) -> Callable[..., Result]:
    return lambda *a: extend_slots(*a, backend=target.backend)


@pytest.mark.parametrize("page_size", [1, 2, 5, 16, 100, 128])
def test_ragged_batches(target: Any, page_size: int) -> None:
    check(on(target), make_case([3, 0, 130, 1, 7], [0, 129, 127, 128, 1], page_size), target.device)


@pytest.mark.parametrize("bs", [0, 1, 3, 257])
def test_batch_sizes(target: Any, bs: int) -> None:
    lengths, starts = [1 + b % 3 for b in range(bs)], [b % 5 for b in range(bs)]
    check(on(target), make_case(lengths, starts, 7), target.device)


def test_verify_window_of_a_long_context(target: Any) -> None:
    check(on(target), make_case([8, 8], [20_000, 126], 128), target.device)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300)), max_size=6), st.integers(1, 140))
def test_any_batch(requests: list[tuple[int, int]], page_size: int) -> None:
    case = make_case([n for n, _ in requests], [start for _, start in requests], page_size)
    for backend in ("ref", "auto"):
        check(lambda *a, backend=backend: extend_slots(*a, backend=backend), case)


@pytest.mark.parametrize("name", ["page of the first", "start ignored", "whole row"])
def test_the_check_sees_a_broken_op(name: str) -> None:
    def mutant(*case: Any) -> Result:
        table, rows, starts, lengths, *rest = case
        if name == "page of the first":
            return extend_slots(table, rows[:1].expand(len(rows)).contiguous(), starts, lengths, *rest)
        if name == "start ignored":
            return extend_slots(table, rows, torch.zeros_like(starts), lengths, *rest)
        slots, _ = extend_slots(*case)
        return slots, table[rows, : rest[-1]]

    with pytest.raises(AssertionError):
        check(mutant, make_case([3, 0, 130], [0, 129, 127], 16))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"page_size": 0}, "page_size is 0"),
        ({"total": 8}, "total is 8; allowed: 7, the sum of lengths"),
        ({"total": 2**31}, "total is 2147483648"),
        ({"columns": 1, "lengths": torch.tensor([4, 3])}, "a request ends at 5; allowed: at most 4, 1 columns of 4"),
        ({"columns": 9}, "columns is 9; allowed: 0 to 8"),
        ({"starts": torch.tensor([-1, 2])}, "starts holds -1"),
        ({"lengths": torch.tensor([8, -1])}, "lengths holds -1"),
        ({"req_pool_indices": torch.tensor([0, 3])}, "req_pool_indices holds 3; allowed: 0 to 2"),
        ({"block_table": torch.zeros(3, 8, dtype=torch.int64)}, "block_table has dtype"),
    ],
)
def test_refused_by_name(change: dict[str, Any], named: str) -> None:
    case = {
        "block_table": torch.zeros(3, 8, dtype=torch.int32),
        "req_pool_indices": torch.tensor([0, 2]),
        "starts": torch.tensor([1, 2]),
        "lengths": torch.tensor([2, 5]),
        "page_size": 4,
        "total": 7,
        "columns": 2,
    } | change
    with pytest.raises(InputError, match=r"extend_slots: ") as caught:
        extend_slots(**case)
    assert named in str(caught.value)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.dsv4_npu.extend_slots.default, make_case([3, 0, 130], [0, 129, 127], 16))
