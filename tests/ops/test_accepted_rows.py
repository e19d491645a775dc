"""compact_accept_, fill_bonus_tokens_ and gather_accepted_slots: what follows a verify."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4_npu.errors import InputError
from dsv4_npu.ops import compact_accept_, fill_bonus_tokens_, gather_accepted_slots, move_kv_

Case = dict[str, torch.Tensor]


def make_case(bs: int, width: int, most: int | None = None, *, index: torch.dtype = torch.int32, seed: int = 0) -> Case:
    """Random accepted paths: any rows of the own block, the root first, garbage behind the length."""
    gen = torch.Generator().manual_seed(seed)
    most = width if most is None else most
    accept_index = torch.randint(-(2**20), 2**20, (bs, most), generator=gen)
    accept_lens = torch.randint(1, min(width, most) + 1, (bs,), generator=gen)
    for b in range(bs):
        n = int(accept_lens[b])
        rows = (1 + torch.randperm(width - 1, generator=gen)[: n - 1]).sort().values
        accept_index[b, :n] = b * width + torch.cat((torch.zeros(1, dtype=torch.int64), rows))
    return {
        "predict": torch.randint(0, 129280, (bs * width,), generator=gen).to(index),
        "accept_index": accept_index.to(index),
        "accept_lens": accept_lens.to(index),
        "out_cache_loc": (1 + torch.randperm(4 * bs * width + 1, generator=gen))[: bs * width],
    }


def to(case: Case, device: str) -> Case:
    return {k: v.to(device, copy=True) for k, v in case.items()}


def paths(case: Case) -> list[list[int]]:
    lens = case["accept_lens"].tolist()
    return [row[:n] for row, n in zip(case["accept_index"].tolist(), lens, strict=True)]


SIZES = [(bs, width) for bs in (0, 1, 3) for width in range(1, 10)] + [(257, 3)]


def check_compact(run: Callable[..., None], case: Case, hidden: torch.Tensor | None, device: str = "cpu") -> None:
    bs = case["accept_index"].shape[0]
    width = case["predict"].shape[0] // max(bs, 1)
    order = torch.arange(bs * width)
    for b, rows in enumerate(paths(case)):
        order[b * width : b * width + len(rows)] = torch.tensor(rows)
    moved = to(case, device)
    states = None if hidden is None else hidden.to(device, copy=True)
    run(moved["predict"], states, moved["accept_index"], moved["accept_lens"])
    assert torch.equal(moved["predict"].cpu(), case["predict"][order])
    if hidden is not None and states is not None:
        assert torch.equal(states.cpu().view(torch.uint8), hidden.view(torch.uint8)[order])


@pytest.mark.parametrize(("bs", "width"), SIZES)
def test_compact(target: Any, bs: int, width: int) -> None:
    case = make_case(bs, width, seed=width)
    hidden = torch.rand(bs * width, 20 if bs < 100 else 8).to(torch.bfloat16)
    check_compact(lambda *a: compact_accept_(*a, backend=target.backend), case, hidden, target.device)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("most", [2, 5, 7])
def test_compact_any_dtype_and_index_width(target: Any, dtype: torch.dtype, most: int) -> None:
    case = make_case(3, 5, most, index=torch.int64)
    hidden = torch.randint(0, 100, (15, 7 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    check_compact(lambda *a: compact_accept_(*a, backend=target.backend), case, hidden, target.device)


def test_compact_wide_rows_and_none(target: Any) -> None:
    case = make_case(2, 6)
    run = lambda *a: compact_accept_(*a, backend=target.backend)  # noqa: E731
    check_compact(run, case, torch.rand(12, 4096), target.device)
    check_compact(run, case, None, target.device)


def test_the_worked_example(target: Any) -> None:
    """R, A, B, C with A and C accepted, bonus X: outputs A, C, X; KV of R, A, C."""
    predict = torch.tensor([101, 103, 0, 199], dtype=torch.int32, device=target.device)
    index = torch.tensor([[0, 1, 3]], dtype=torch.int32, device=target.device)
    lens = torch.tensor([3], dtype=torch.int32, device=target.device)
    slots = torch.tensor([42080, 42081, 42082, 42083], device=target.device)
    bonus = torch.zeros(1, dtype=torch.int32, device=target.device)
    fill_bonus_tokens_(bonus, predict, index, lens, backend=target.backend)
    assert bonus.tolist() == [199]
    tgt, src = gather_accepted_slots(slots, index, lens, backend=target.backend)
    assert tgt.tolist() == [[42080, 42081, 42082]]
    assert src.tolist() == [[42080, 42081, 42083]]
    slab = torch.arange(42112, dtype=torch.int32, device=target.device).view(1, 329, 128, 1, 1)
    move_kv_(slab, tgt, src, backend=target.backend)
    assert slab.flatten()[42080:42084].tolist() == [42080, 42081, 42083, 42083]
    compact_accept_(predict, None, index, lens, backend=target.backend)
    assert predict.tolist()[:3] == [101, 103, 199]


def check_bonus(run: Callable[..., None], case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    want = [int(case["predict"][rows[-1]]) for rows in paths(case)]
    moved = to(case, device)
    bonus = torch.full((len(want),), -7, dtype=dtype, device=device)
    run(bonus, moved["predict"], moved["accept_index"], moved["accept_lens"])
    assert bonus.tolist() == want


@pytest.mark.parametrize(("bs", "width"), SIZES)
def test_bonus(target: Any, bs: int, width: int) -> None:
    case = make_case(bs, width, seed=width, index=(torch.int32, torch.int64)[width % 2])
    dtype = (torch.int32, torch.int64)[width // 2 % 2]
    check_bonus(lambda *a: fill_bonus_tokens_(*a, backend=target.backend), case, dtype, target.device)


def check_slots(run: Callable[..., tuple[torch.Tensor, torch.Tensor]], case: Case, device: str = "cpu") -> None:
    slots = case["out_cache_loc"].tolist()
    bs, most = case["accept_index"].shape
    width = len(slots) // max(bs, 1)
    pad = [[-1] * (most - len(rows)) for rows in paths(case)]
    moved = to(case, device)
    tgt, src = run(moved["out_cache_loc"], moved["accept_index"], moved["accept_lens"])
    assert tgt.dtype == src.dtype == case["out_cache_loc"].dtype
    assert src.tolist() == [[slots[row] for row in rows] + pad[b] for b, rows in enumerate(paths(case))]
    assert tgt.tolist() == [slots[b * width :][: len(rows)] + pad[b] for b, rows in enumerate(paths(case))]


@pytest.mark.parametrize(("bs", "width"), SIZES)
def test_slots(target: Any, bs: int, width: int) -> None:
    case = make_case(bs, width, max(1, width - width % 3), seed=width, index=(torch.int32, torch.int64)[width % 2])
    case["out_cache_loc"] = case["out_cache_loc"].to((torch.int32, torch.int64)[width // 2 % 2])
    check_slots(lambda *a: gather_accepted_slots(*a, backend=target.backend), case, target.device)


def test_the_checks_see_broken_ops() -> None:
    case = make_case(3, 6, seed=3)
    hidden = torch.rand(18, 4)
    assert not (case["accept_lens"] == 1).all()

    def predict_only(predict: torch.Tensor, hidden: Any, *rest: torch.Tensor) -> None:
        compact_accept_(predict, None, *rest)

    def by_width(predict: torch.Tensor, hidden: torch.Tensor, index: torch.Tensor, lens: torch.Tensor) -> None:
        for b in range(3):
            for k in range(int(lens[b])):
                predict[b * 4 + k], hidden[b * 4 + k] = predict[index[b, k]].clone(), hidden[index[b, k]].clone()

    def bonus_by_width(bonus: torch.Tensor, predict: torch.Tensor, index: torch.Tensor, lens: torch.Tensor) -> None:
        bonus[:] = predict[index[:, 0] + lens - 1]

    def unpadded(slots: torch.Tensor, index: torch.Tensor, lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return slots.view(3, 6).clone(), slots[index.clamp(0, 17)]

    for mutant in (predict_only, by_width):
        with pytest.raises(AssertionError):
            check_compact(mutant, case, hidden)
    with pytest.raises(AssertionError):
        check_bonus(bonus_by_width, case, torch.int32)
    with pytest.raises(AssertionError):
        check_slots(unpadded, case)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"accept_lens": torch.tensor([0, 1])}, "accept_lens holds 0; allowed: 1 to 3"),
    ({"accept_lens": torch.tensor([1, 4])}, "accept_lens holds 4; allowed: 1 to 3"),
    ({"accept_lens": torch.tensor([1])}, "accept_lens has shape [1]"),
    (
        {"accept_index": torch.tensor([[0, 1, 2], [4, 5, 3]])},
        "accept_index of request 1 holds 3; allowed: its own rows",
    ),
    ({"accept_index": torch.tensor([[0, 1, -1], [4, 5, 6]])}, "accept_index of request 0 holds -1"),
    ({"accept_index": torch.tensor([[0.0, 1, 2], [4, 5, 6]])}, "accept_index has dtype"),
    ({"predict": torch.zeros(7, dtype=torch.int32), "out_cache_loc": torch.zeros(7, dtype=torch.int32)}, "has 7 rows"),
]


@pytest.mark.parametrize(("change", "named"), CHANGES)
def test_refused_by_name_and_unchanged(change: dict[str, Any], named: str) -> None:
    case = {
        "predict": torch.arange(8),
        "out_cache_loc": torch.arange(8),
        "accept_index": torch.tensor([[0, 1, 2], [4, 5, 6]]),
        "accept_lens": torch.tensor([3, 3]),
    } | change
    accepted = case["accept_index"], case["accept_lens"]
    hidden, bonus = torch.rand(case["predict"].shape[0], 4), torch.full((2,), 9)
    before = case["predict"].clone(), hidden.clone()
    for call in (
        lambda: compact_accept_(case["predict"], hidden, *accepted),
        lambda: fill_bonus_tokens_(bonus, case["predict"], *accepted),
        lambda: gather_accepted_slots(case["out_cache_loc"], *accepted),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert named in str(caught.value)
    assert torch.equal(case["predict"], before[0])
    assert torch.equal(hidden, before[1])
    assert bonus.tolist() == [9, 9]


def test_refuses_shared_memory() -> None:
    index, lens = torch.tensor([[0, 1], [4, 5]]), torch.tensor([2, 1])
    predict = torch.arange(8)
    with pytest.raises(InputError, match="predict shares memory with hidden_states"):
        compact_accept_(predict, predict.view(8, 1), index, lens)
    with pytest.raises(InputError, match="predict shares memory with bonus_tokens"):
        fill_bonus_tokens_(predict[:2], predict, index, lens)
    with pytest.raises(InputError, match="accept_lens shares memory with predict"):
        compact_accept_(predict, None, index, predict[1:3])


def test_opcheck() -> None:
    case = make_case(3, 5, 4)
    accepted = case["accept_index"], case["accept_lens"]
    ops = torch.ops.dsv4_npu
    torch.library.opcheck(ops.compact_accept_.default, (case["predict"], torch.rand(15, 4), *accepted))
    torch.library.opcheck(ops.compact_accept_.default, (case["predict"], None, *accepted))
    bonus = torch.zeros(3, dtype=torch.int64)
    torch.library.opcheck(ops.fill_bonus_tokens_.default, (bonus, case["predict"], *accepted))
    torch.library.opcheck(ops.gather_accepted_slots.default, (case["out_cache_loc"], *accepted))
