from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4_npu.errors import InputError
from dsv4_npu.ops import move_kv_

DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int8, torch.float16, torch.float32, torch.float64]


def make_slab(layers: int, pages: int, page: int, row: int, dtype: torch.dtype, heads: int = 1) -> torch.Tensor:
    shape = (layers, pages, page, heads, row * dtype.itemsize)
    gen = torch.Generator().manual_seed(row)
    return torch.randint(0, 120, shape, generator=gen, dtype=torch.uint8).view(dtype)


def expected(slab: torch.Tensor, tgt: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    """As one gather: which slot does each slot's content come from?"""
    layers, pages, page = slab.shape[:3]
    origin = torch.arange(pages * page)
    moved = tgt.flatten() >= 0
    origin[tgt.flatten()[moved].long()] = src.flatten()[moved].long()
    return slab.view(torch.uint8).reshape(layers, pages * page, -1)[:, origin].reshape(slab.view(torch.uint8).shape)


def check(
    run: Callable[..., None], slab: torch.Tensor, tgt: torch.Tensor, src: torch.Tensor, device: str = "cpu"
) -> None:
    want = expected(slab, tgt, src)
    moved = slab.to(device, copy=True)
    run(moved, tgt.to(device), src.to(device))
    got = moved.cpu().view(torch.uint8)
    if (tgt < 0).any():  # slot 0 is nobody's
        want[:, 0, 0], got[:, 0, 0] = 0, 0
    assert torch.equal(got, want)


def on(target: Any) -> Callable[..., None]:
    return lambda *a: move_kv_(*a, backend=target.backend)


OVERLAPS = [
    ([1, 2, 3], [2, 3, 4]),
    ([2, 3, 4], [1, 2, 3]),
    ([1, 2], [2, 1]),
    ([5, 6, 7, 1], [6, 7, 5, 1]),
    ([3], [17]),
    ([3, -1, 30, -1], [17, -1, 3, -1]),
    ([], []),
]


@pytest.mark.parametrize(("tgt", "src"), OVERLAPS, ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_overlaps_and_swaps(target: Any, tgt: list[int], src: list[int], index: torch.dtype) -> None:
    slab = make_slab(2, 3, 16, 20, torch.bfloat16)
    check(on(target), slab, torch.tensor(tgt, dtype=index), torch.tensor(src, dtype=index), target.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", [1, 5, 160])
def test_every_dtype_and_row(target: Any, dtype: torch.dtype, row: int) -> None:
    check(on(target), make_slab(3, 4, 8, row, dtype), torch.tensor([9, 1, 30]), torch.tensor([10, 9, 2]), target.device)


def test_every_other_byte_is_equal(target: Any) -> None:
    """Token 17 to 3 in pages of 16: page 1 offset 1 to page 0 offset 3."""
    slab = make_slab(1, 4, 16, 64, torch.bfloat16).to(target.device)
    before = slab.clone()
    move_kv_(
        slab, torch.tensor([3], device=target.device), torch.tensor([17], device=target.device), backend=target.backend
    )
    assert torch.equal(slab[0, 0, 3], before[0, 1, 1])
    slab[0, 0, 3] = before[0, 0, 3]
    assert torch.equal(slab, before)


def test_the_worked_example(target: Any) -> None:
    """Slots 42080.. hold R, A, B, C; rows 0, 1 and 3 were accepted: C goes over B."""
    slab = torch.arange(2 * 42112, dtype=torch.float32).view(1, 329, 128, 1, 2)
    tgt, src = torch.tensor([[42081, 42082]]), torch.tensor([[42081, 42083]])
    check(on(target), slab, tgt, src, target.device)


def groups_case(
    groups: int, width: int, seed: int = 0, layers: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each group permutes or compacts slots of its own range; some pairs are skipped."""
    gen = torch.Generator().manual_seed(seed)
    span = 2 * width
    slots = 8 + groups * span
    tgt, src = torch.full((groups, width), -1), torch.full((groups, width), -1)
    for g in range(groups):
        n = int(torch.randint(0, width + 1, (1,), generator=gen))
        tgt[g, :n] = 8 + g * span + torch.randperm(span, generator=gen)[:n]
        src[g, :n] = 8 + g * span + torch.randint(0, span, (n,), generator=gen)
    return make_slab(layers, slots // 8 + 1, 8, 6 * layers - 4, torch.bfloat16), tgt, src


@pytest.mark.parametrize("width", range(1, 10))
@pytest.mark.parametrize("groups", [0, 1, 3])
def test_groups(target: Any, groups: int, width: int) -> None:
    check(on(target), *groups_case(groups, width, width), target.device)


def test_many_groups(target: Any) -> None:
    check(on(target), *groups_case(257, 3, layers=1), target.device)


@pytest.mark.parametrize("count", [40, 500, 1000])
def test_long_lists(target: Any, count: int) -> None:
    """The last one goes through scratch on devices."""
    gen = torch.Generator().manual_seed(count)
    tgt, src = 1 + torch.randperm(1999, generator=gen)[:count], torch.randint(0, 2000, (count,), generator=gen)
    tgt[7], src[7] = -1, -1
    check(on(target), make_slab(1, 250, 8, 32, torch.bfloat16), tgt, src, target.device)


def test_repeated_runs_agree(target: Any) -> None:
    """Permutations within groups: a program that wrote before all of its reads were done would show now and then."""
    groups, width, rounds = (64, 16, 50) if target.device == "cuda" else (3, 16, 2)
    gen = torch.Generator().manual_seed(1)
    slab = make_slab(8 if target.device == "cuda" else 1, groups * 2 + 2, 8, 256, torch.bfloat16)
    tgt = (8 + torch.arange(groups * width)).view(groups, width)
    for _ in range(rounds):
        src = tgt.gather(1, torch.rand(groups, width, generator=gen).argsort(1))
        check(on(target), slab, tgt, src, target.device)


def test_heads_move_together(target: Any) -> None:
    slab = make_slab(2, 4, 4, 3, torch.float16, heads=5)
    check(on(target), slab, torch.tensor([5, 6]), torch.tensor([6, 9]), target.device)


def test_a_slab_at_an_odd_byte(target: Any) -> None:
    memory = make_slab(1, 8, 4, 8, torch.int8).flatten()
    slab = memory[3 : 3 + 7 * 32].view(1, 7, 4, 1, 8)
    check(on(target), slab, torch.tensor([5, 6]), torch.tensor([6, 9]), "cpu" if target.device == "cpu" else "cuda")


def in_order(slab: torch.Tensor, tgt: torch.Tensor, src: torch.Tensor, step: int = 1) -> None:
    rows = slab.view(slab.shape[0], slab.shape[1] * slab.shape[2], -1)
    for t, s in list(zip(tgt.tolist(), src.tolist(), strict=True))[::step]:
        rows[:, t] = rows[:, s].clone()


@pytest.mark.parametrize(("step", "caught_by"), [(1, 1), (-1, 0), (1, 2), (-1, 2)])
def test_the_check_sees_reads_after_writes(step: int, caught_by: int) -> None:
    slab = make_slab(2, 3, 16, 20, torch.bfloat16)
    tgt, src = (torch.tensor(x) for x in OVERLAPS[caught_by])
    with pytest.raises(AssertionError):
        check(lambda *a: in_order(*a, step=step), slab, tgt, src)


def test_the_check_sees_a_layer_left_out() -> None:
    slab = make_slab(2, 3, 16, 20, torch.bfloat16)
    with pytest.raises(AssertionError):
        check(lambda slab, *a: move_kv_(slab[:1], *a), slab, torch.tensor([3]), torch.tensor([17]))


@pytest.mark.parametrize(
    ("tgt", "src", "named"),
    [
        ([3, 3], [1, 2], "tgt holds 3 twice"),
        ([0], [1], "tgt holds 0"),
        ([48], [1], "tgt holds 48; allowed: -1 to 47"),
        ([1], [48], "src holds 48"),
        ([-2], [-2], "tgt holds -2"),
        ([-1], [5], "pair 0 is (-1, 5)"),
        ([5, 6], [1, -1], "pair 1 is (6, -1)"),
        ([1, 2], [1], "src has shape [1]; allowed: [2]"),
        ([[1, 2], [3, 4]], [[1, 2], [3, 2]], "src holds 2, which another group targets"),
        ([[[1]]], [[[1]]], "tgt has shape"),
    ],
)
def test_refused_by_name_and_unchanged(tgt: list[Any], src: list[Any], named: str) -> None:
    slab = make_slab(2, 3, 16, 4, torch.bfloat16)
    before = slab.clone()
    with pytest.raises(InputError, match=r"move_kv_: ") as caught:
        move_kv_(slab, torch.tensor(tgt), torch.tensor(src))
    assert named in str(caught.value)
    assert torch.equal(slab, before)


def test_refuses_slabs_and_lists_that_share_memory() -> None:
    slab = torch.zeros(1, 4, 8, 1, 2, dtype=torch.int64)
    with pytest.raises(InputError, match="tgt shares memory with slab"):
        move_kv_(slab, slab[0, 0, 0, 0, :1], torch.tensor([1]))
    with pytest.raises(InputError, match="slab is not contiguous"):
        move_kv_(slab.transpose(1, 2), torch.tensor([1]), torch.tensor([1]))


def test_opcheck() -> None:
    slab = make_slab(2, 3, 16, 4, torch.bfloat16)
    pairs = torch.tensor([1, 2]), torch.tensor([2, 1])
    torch.library.opcheck(torch.ops.dsv4_npu.move_kv_.default, (slab, *pairs))
