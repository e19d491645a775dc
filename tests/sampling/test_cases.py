"""Inputs that broke published kernels, with the right answers: cases 33 to 40, each for its whole kind."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from brute_force import JUDGES
from verify_world import Batch, Result, Target, chain_links, random_batch, run, with_chain

CHAIN = "chain_speculative_sampling"
TREE = "tree_speculative_sampling_target_only"
GREEDY = "verify_tree_greedy"
SAMPLERS = (CHAIN, TREE)
BELOW_ONE = 1 - 2**-24


def one_request(
    candidates: list[int],
    target: list[list[float]],
    draft: list[list[float]] | None = None,
    coin: float = 0.5,
    last_coin: float = 0.5,
    width: int | None = None,
) -> Batch:
    drafts = len(candidates)
    children, siblings = chain_links(1, drafts)
    return Batch(
        width=width or drafts,
        candidates=torch.tensor([candidates]),
        rows=torch.arange(drafts)[None],
        children=children,
        siblings=siblings,
        coins=torch.full((1, drafts), coin),
        last_coins=torch.tensor([last_coin]),
        target=torch.tensor([target]),
        draft=torch.tensor([draft or target]),
        target_predict=torch.tensor([target]).argmax(-1),
    )


@pytest.mark.parametrize("op", SAMPLERS)
def test_33_draft_of_target_probability_zero_is_rejected_at_coin_zero(op: str, target: Target) -> None:
    batch = one_request([0, 0], [[0.0, 1.0], [0.5, 0.5]], [[1.0, 0.0], [0.5, 0.5]], coin=0.0, last_coin=0.0)
    assert run(target, op, batch) == Result([1, -77], [[0, -1]], [0])


@pytest.mark.parametrize("coin", [0.0, 0.5, 1.0])
def test_33_draft_of_draft_probability_zero_is_rejected(coin: float, target: Target) -> None:
    batch = one_request([0, 0], [[0.5, 0.5], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]], coin=coin)
    assert run(target, CHAIN, batch) == Result([0, -77], [[0, -1]], [0])


@pytest.mark.parametrize("op", SAMPLERS)
@pytest.mark.parametrize(
    "row", [[0.25, 0.75, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.3, 0.3, 0.4], [1e-30, 0.0, 0.0]]
)
@pytest.mark.parametrize("last_coin", [0.0, 2**-24, 0.5, BELOW_ONE, 1.0])
def test_33_any_coin_gives_a_token_of_positive_probability(
    op: str, row: list[float], last_coin: float, target: Target
) -> None:
    result = run(target, op, one_request([0], [row], last_coin=last_coin))
    assert row[result.predicts[0]] > 0
    if last_coin == 1.0:
        assert result.predicts[0] == max(t for t, p in enumerate(row) if p > 0)
    if last_coin == 0.0:
        assert result.predicts[0] == min(t for t, p in enumerate(row) if p > 0)


@pytest.mark.parametrize("last_coin", [0.0, 0.5, BELOW_ONE, 1.0])
def test_33_residual_that_rounds_to_zero(last_coin: float, target: Target) -> None:
    rows = [[0.5, 0.49999991, 0.0], [0.5, 0.5, 0.0]]
    batch = one_request([0, 1], rows, [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]], coin=1.0, last_coin=last_coin)
    result = run(target, CHAIN, batch)
    assert result.accept_token_num == [0]
    assert result.predicts[0] in (0, 1)


def test_33_tree_whose_children_hold_all_mass(target: Target) -> None:
    """Every token of positive mass was rejected (a coin of 1 rejects them all): the target's own row is sampled."""
    batch = one_request([0, 1, 2], [[0.0, 0.5, 0.5]] * 3, coin=1.0, last_coin=0.75)
    batch = replace(batch, children=torch.tensor([[1, -1, -1]]), siblings=torch.tensor([[-1, 2, -1]]))
    assert run(target, TREE, batch) == Result([2, -77, -77], [[0, -1, -1]], [0])


@pytest.mark.parametrize("op", SAMPLERS)
@pytest.mark.parametrize("missing", [-1, 4, 2**31 - 1, 2**31 + 2, 2**32 + 1, 2**40, -(2**40)])
def test_34_no_draft(op: str, missing: int, target: Target) -> None:
    """Rejected without being read; the draw is from p itself: p - q would give token 2."""
    batch = one_request([5, missing], [[0.0, 0.6, 0.4, 0.0]] * 2, [[0.0, 0.9, 0.1, 0.0]] * 2, last_coin=0.5)
    assert run(target, op, batch) == Result([1, -77], [[0, -1]], [0])


def test_34_no_draft_after_a_rejected_sibling(target: Target) -> None:
    """The sibling's mass is gone, the missing draft's is not a mass at all."""
    batch = one_request([0, 1, -1, 9], [[0.25, 0.25, 0.5]] * 4, coin=1.0, last_coin=0.4)
    batch = replace(batch, children=torch.tensor([[1, -1, -1, -1]]), siblings=torch.tensor([[-1, 2, 3, -1]]))
    assert run(target, TREE, batch).predicts[0] == 2
    assert run(target, TREE, replace(batch, last_coins=torch.tensor([0.3]))).predicts[0] == 0


@pytest.mark.parametrize("op", [CHAIN, TREE, GREEDY])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 6])
def test_35_stride_is_the_width_of_accept_index(op: str, width: int, target: Target) -> None:
    rows = torch.eye(4)[torch.tensor([[1, 2, 3, 0], [3, 2, 1, 0]])]
    children, siblings = chain_links(2, 4)
    batch = Batch(
        width=width,
        candidates=torch.tensor([[0, 1, 2, 3], [0, 3, 2, 1]]),
        rows=torch.arange(8).view(2, 4),
        children=children,
        siblings=siblings,
        coins=torch.full((2, 4), 0.5),
        last_coins=torch.full((2,), 0.5),
        target=rows,
        draft=rows,
        target_predict=rows.argmax(-1),
    )
    result = run(target, op, batch)
    accepted = min(width, 4)
    rest = [-1] * (width - accepted)
    assert result.accept_index == [[*range(accepted), *rest], [*range(4, 4 + accepted), *rest]]
    assert result.accept_token_num == [accepted - 1] * 2
    bonus = [int(rows[b, accepted - 1].argmax()) for b in range(2)]
    assert [result.predicts[accepted - 1], result.predicts[3 + accepted]] == bonus


@pytest.mark.parametrize("op", [CHAIN, TREE])
def test_35_full_walk_draws_from_its_last_row(op: str, target: Target) -> None:
    """The draft beyond a full accept_index is not judged, so nothing is taken off p."""
    batch = one_request([0, 1, 2], [[0.0, 1.0, 0.0], [0.25, 0.25, 0.5], [0.0, 0.0, 1.0]], last_coin=0.9, width=2)
    assert run(target, op, batch) == Result([1, 2, -77], [[0, 1]], [1])


@pytest.mark.parametrize("op", [TREE, GREEDY])
def test_36_second_sibling_and_its_child(op: str, target: Target) -> None:
    rows = torch.eye(100)[torch.tensor([2, 0, 3, 99])]
    batch = one_request([0, 1, 2, 3], rows.tolist(), width=3)
    batch = replace(batch, children=torch.tensor([[1, -1, 3, -1]]), siblings=torch.tensor([[-1, 2, -1, -1]]))
    assert run(target, op, batch) == Result([2, -77, 3, 99], [[0, 2, 3]], [2])


@pytest.mark.parametrize("op", [CHAIN, TREE])
@pytest.mark.parametrize("vocab", [2049, 4099, 9001])
@pytest.mark.parametrize("at", [0, 2047, 2048, 4095, 4096, -1])
@pytest.mark.parametrize("last_coin", [0.0, 0.5, 1.0])
def test_38_the_only_token(op: str, vocab: int, at: int, last_coin: float, target: Target) -> None:
    token = at % vocab if at < 0 else min(at, vocab - 1)
    row = torch.zeros(1, 1, vocab)
    row[..., token] = 1
    batch = replace(one_request([0], [[1.0]], last_coin=last_coin), target=row, draft=row)
    assert run(target, op, batch).predicts == [token]


def virtual_floats(file: Path, *shape: int) -> torch.Tensor:
    """Zeros that take no memory until they are written: a file of holes."""
    return torch.from_file(str(file), shared=True, size=math.prod(shape)).view(shape)


@pytest.mark.parametrize("op", SAMPLERS)
def test_39_offsets_beyond_32_bits(op: str, target: Target, tmp_path: Path) -> None:
    """Rows of width 1024 beyond number 4,200,000: the memory stays virtual, only the rows that are read are touched."""
    if target.device == "cuda":
        pytest.skip("a GPU has no virtual memory to spare: see test_39_offsets_beyond_32_bits_on_a_gpu")
    # The tree kernel holds one lane per node, so there the batch goes far instead of the tree.
    bs, drafts, vocab = (3, 2_100_001, 1024) if op == CHAIN else (6, 850_000, 1024)
    children, siblings = (torch.full((bs, drafts), -1) for _ in range(2))
    rows, candidates = (torch.zeros(bs, drafts, dtype=torch.int64) for _ in range(2))
    probs = virtual_floats(tmp_path / "probs", bs, drafts, vocab)
    for b in range(bs):
        rows[b, :2] = torch.tensor([b * drafts, b * drafts + 1])
        candidates[b, 1] = 3
        children[b, 0] = 1
        probs[b, :2] = torch.eye(vocab)[[3, 5 + b]]
    coins = torch.full((bs, drafts), 0.5)
    batch = Batch(2, candidates, rows, children, siblings, coins, coins[:, 0].contiguous(), probs, probs, rows)
    predicts, index, number = batch.outputs()
    run_raw(target, op)(predicts, index, number, *batch.inputs(op))
    assert index.tolist() == [[b * drafts, b * drafts + 1] for b in range(bs)]
    assert [int(predicts[b * drafts]) for b in range(bs)] == [3] * bs
    assert [int(predicts[b * drafts + 1]) for b in range(bs)] == [5 + b for b in range(bs)]


def run_raw(target: Target, op: str) -> Callable[..., None]:
    """The implementation without the checks of values, which would read all of the virtual memory."""
    from dsv4_npu.ops._registry import ops

    return lambda *arguments: ops[op](target.backend, *arguments)


def only_programs(wanted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter run these programs of a grid and no others, which see the whole grid's size."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder, grids = interpreter.interpreter_builder, []
    start, set_size, set_index = interpreter.GridExecutor.__init__, builder.set_grid_dim, builder.set_grid_idx

    def begin(self: Any, fn: Any, names: Any, grid: tuple[int, ...], hooks: Any = ()) -> None:
        grids.append(grid)
        start(self, fn, names, (len(wanted),), hooks)

    monkeypatch.setattr(interpreter.GridExecutor, "__init__", begin)
    monkeypatch.setattr(builder, "set_grid_dim", lambda *given: set_size(*grids[-1], 1, 1))
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: set_index(wanted[x], y, z))


@functools.cache
def large_batch(op: str) -> Batch:
    batch = random_batch(40, 4096, 8, 8, 4, exact=True)
    return with_chain(batch) if op == CHAIN else batch


@functools.cache
def right_for_large_batch(op: str) -> Result:
    return run(Target("ref", "cpu"), op, large_batch(op))


@pytest.fixture
def launches() -> Iterator[list[int]]:
    """The programs of each launch; empty where Triton is not installed."""
    seen: list[int] = []

    def note(launch: Any) -> None:
        seen.append(launch.programs)

    observers = importlib.import_module("dsv4_npu.ops._launch").observers if importlib.util.find_spec("triton") else []
    observers.append(note)
    yield seen
    observers.remove(note)


@pytest.mark.parametrize("op", [CHAIN, TREE, GREEDY])
def test_40_large_batch(op: str, target: Target, launches: list[int]) -> None:
    """4096 requests of 8 drafts. The interpreter takes minutes for them: see the next test."""
    if target.kind == "interpreter":
        pytest.skip("a test of its own")
    batch = large_batch(op)
    JUDGES[op](batch, run(target, op, batch))
    assert len(launches) == (1 if target.kind == "cuda" else 0)
    assert all(0 < programs <= 65535 for programs in launches)


@pytest.mark.parametrize(("cores", "programs", "wanted"), [(40, 40, [23]), (10**9, 4096, [0, 1, 2047, 4095])])
@pytest.mark.parametrize("op", [CHAIN, TREE, GREEDY])
def test_40_large_batch_in_the_interpreter(
    op: str, cores: int, programs: int, wanted: list[int], monkeypatch: pytest.MonkeyPatch, launches: list[int]
) -> None:
    """An NPU's grid and the widest: some programs of the one launch; each does its own requests and no other."""
    launch = pytest.importorskip("dsv4_npu.ops._launch", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter is off: with a GPU the kernels run compiled")
    batch = large_batch(op)
    monkeypatch.setattr(launch, "program_limit", lambda *device: cores)
    only_programs(wanted, monkeypatch)
    mine = run(Target("triton", "cpu"), op, batch)
    whole = right_for_large_batch(op)
    done = {request for program in wanted for request in range(program, 4096, programs)}
    for b in range(4096):
        if b in done:
            assert mine.accept_index[b] == whole.accept_index[b]
            assert mine.predicts[b * 8 : b * 8 + 8] == whole.predicts[b * 8 : b * 8 + 8]
            assert mine.accept_token_num[b] == whole.accept_token_num[b]
        else:
            assert mine.accept_index[b] == mine.predicts[b * 8 : b * 8 + 8] == [-77] * 8
    assert launches == [programs]


@pytest.mark.parametrize("op", [CHAIN, TREE, GREEDY])
def test_no_requests_is_no_work(op: str, target: Target) -> None:
    assert run(target, op, random_batch(1, 0, 4, 4, 5)) == Result([], [], [])


@pytest.mark.parametrize("op", SAMPLERS)
def test_nan_and_negative_entries_count_as_zero(op: str, target: Target) -> None:
    nan = float("nan")
    batch = one_request([0, 0], [[nan, -1.0, 0.5, 0.25], [0.5] * 4], [[0.5, 0.5, nan, -1.0], [0.5] * 4], coin=0.0)
    for last_coin, token in ((0.0, 2), (0.6, 2), (0.7, 3), (1.0, 3)):
        assert run(target, op, replace(batch, last_coins=torch.tensor([last_coin]))) == Result(
            [token, -77], [[0, -1]], [0]
        )


@pytest.mark.parametrize("op", SAMPLERS)
@pytest.mark.parametrize("row", [[0.0] * 3, [float("nan")] * 3, [-1.0, 0.0, float("nan")]])
def test_row_without_a_positive_entry_reports_minus_one(op: str, row: list[float], target: Target) -> None:
    assert run(target, op, one_request([0, 1], [row, row], last_coin=0.5)) == Result([-1, -77], [[0, -1]], [0])


@pytest.mark.parametrize("op", [TREE, GREEDY])
def test_links_that_never_end_stop_the_walk(op: str, target: Target) -> None:
    """Siblings in a circle: no such tree exists, but a kernel must not hang on one."""
    batch = one_request([0, 1, 2], [[0.0, 0.0, 0.0, 1.0]] * 3, coin=1.0)
    batch = replace(batch, children=torch.tensor([[1, -1, -1]]), siblings=torch.tensor([[-1, 2, 1]]))
    assert run(target, op, batch) == Result([3, -77, -77], [[0, -1, -1]], [0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("op", SAMPLERS)
def test_39_offsets_beyond_32_bits_on_a_gpu(op: str) -> None:
    bs, drafts, vocab = 2_100_001, 2, 1024
    target = torch.empty(bs, drafts, vocab, device="cuda").zero_()
    target[:, 0, 3] = 1
    target[:, 1, 7] = 1
    target[-1, 1] = torch.eye(vocab)[999].cuda()
    children, siblings = (x.cuda() for x in chain_links(1, drafts))
    batch = Batch(
        width=2,
        candidates=torch.tensor([[0, 3]], device="cuda").repeat(bs, 1),
        rows=torch.arange(bs * drafts, device="cuda").view(bs, drafts),
        children=children.repeat(bs, 1),
        siblings=siblings.repeat(bs, 1),
        coins=torch.full((bs, drafts), 0.5, device="cuda"),
        last_coins=torch.full((bs,), 0.5, device="cuda"),
        target=target,
        draft=target,
        target_predict=torch.zeros(bs, drafts, dtype=torch.int64, device="cuda"),
    )
    predicts, index, number = batch.outputs("cuda")
    run_raw(Target("auto", "cuda"), op)(predicts, index, number, *batch.inputs(op))
    assert bool((number == 1).all())
    assert bool((predicts.view(bs, 2)[:, 0] == 3).all())
    assert bool((predicts.view(bs, 2)[:-1, 1] == 7).all())
    assert int(predicts[-1]) == 999
