"""Acceptance against loops written from the contract, and commits: which rows move where, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu.errors import InputError
from dsv4_npu.spec import (
    VerifyResult,
    accept_greedy,
    accept_rejection,
    accepted_rows,
    accepted_tokens,
    chain_layout,
    plan_commit,
)
from dsv4_npu.spec import verify as verify_module

torch.set_num_threads(1)
R, A, B, C, X = 10, 11, 12, 13, 14


def result(predict: list[int], index: list[list[int]], lens: list[int]) -> VerifyResult:
    as_int = {"dtype": torch.int32}
    return VerifyResult(torch.tensor(predict, **as_int), torch.tensor(index, **as_int), torch.tensor(lens, **as_int))


def check_contract(got: VerifyResult, want: list[list[int]], width: int, depth: int) -> None:
    """``want``: per request the accepted drafts and the bonus. A chain accepts the rows 0, 1, 2, ... in order."""
    batch = len(want)
    assert got.predict.shape == (batch * width,)
    assert got.accept_index.shape == (batch, depth)
    assert {got.predict.dtype, got.accept_index.dtype, got.accept_lens.dtype} == {torch.int32}
    assert got.accept_lens.tolist() == [len(run) for run in want]
    for b, run in enumerate(want):
        rows = [b * width + j for j in range(len(run))]
        assert got.accept_index[b].tolist() == rows + [-1] * (depth - len(rows))
        assert [int(got.predict[row]) for row in rows] == run
    assert accepted_tokens(got) == want


# -- greedy -----------------------------------------------------------------------------------------------------------


def greedy_oracle(candidates: list[list[int]], target: list[list[int]], depth: int) -> list[list[int]]:
    """Drafts while each equals the target's choice after the row before it; then the target's next choice."""
    runs = []
    for tokens, choice in zip(candidates, target, strict=True):
        run = []
        while len(run) + 1 < min(depth, len(tokens)) and tokens[len(run) + 1] == choice[len(run)]:
            run.append(tokens[len(run) + 1])
        runs.append([*run, choice[len(run)]])
    return runs


def check_greedy(candidates: list[list[int]], target: list[list[int]], depth: int | None) -> None:
    got = accept_greedy(torch.tensor(candidates), torch.tensor(target), depth)
    width = len(candidates[0])
    check_contract(got, greedy_oracle(candidates, target, depth or width), width, depth or width)


@st.composite
def greedy_batches(draw: Any) -> tuple[list[list[int]], list[list[int]], int | None]:
    batch, width = draw(st.integers(1, 5)), draw(st.integers(1, 10))
    rows = st.lists(st.integers(0, 2), min_size=width, max_size=width)
    candidates = draw(st.lists(rows, min_size=batch, max_size=batch))
    target = draw(st.lists(rows, min_size=batch, max_size=batch))
    for b in range(batch):
        # Matching runs of every length, which independent draws would make too seldom.
        right = draw(st.integers(0, width - 1))
        target[b][:right] = candidates[b][1 : right + 1]
    return candidates, target, draw(st.none() | st.integers(1, width))


@settings(max_examples=150, deadline=None)
@given(greedy_batches())
def test_greedy_against_loops(batch: tuple[list[list[int]], list[list[int]], int | None]) -> None:
    check_greedy(*batch)


def test_greedy_all_accepted_with_a_narrow_index() -> None:
    candidates = torch.tensor([[R, A, B, C], [C, B, A, R]])
    got = accept_greedy(candidates, torch.tensor([[A, B, C, X], [B, A, R, X]]), depth=3)
    assert got.accept_index.tolist() == [[0, 1, 2], [4, 5, 6]]
    assert accepted_tokens(got) == [[A, B, C], [B, A, R]]


def test_width_1_accepts_the_root_alone() -> None:
    check_greedy([[R], [A]], [[X], [B]], None)


def test_no_requests_are_no_work() -> None:
    got = accept_greedy(torch.zeros((0, 4), dtype=torch.int64), torch.zeros((0, 4), dtype=torch.int64))
    assert (accepted_rows(got), accepted_tokens(got)) == ([], [])


def test_no_draft_never_matches() -> None:
    got = accept_greedy(torch.tensor([[R, -1, B]]), torch.tensor([[A, B, X]]))
    assert accepted_tokens(got) == [[A]]


# -- rejection --------------------------------------------------------------------------------------------------------


def rejection_oracle(
    candidates: list[list[int]],
    target: list[list[list[float]]],
    draft: list[list[list[float]]],
    coins: list[list[float]],
    final: list[float],
    depth: int,
) -> list[list[int]]:
    """The chain rule row by row, in exact arithmetic when every number is a small dyadic fraction."""
    runs = []
    for b, tokens in enumerate(candidates):
        run: list[int] = []
        weights = None
        while weights is None:
            row = len(run)
            p, q = target[b][row], draft[b][row]
            more = row + 1 < min(depth, len(tokens))
            token = tokens[row + 1] if more else -1
            if not 0 <= token < len(p):
                weights = p
            elif q[token] > 0 and coins[b][row] * q[token] < p[token]:
                run.append(token)
            else:
                residual = [max(x - y, 0.0) for x, y in zip(p, q, strict=True)]
                weights = residual if sum(residual) > 0 else p
        reach, chosen = 0.0, None
        for token, weight in enumerate(weights):
            reach += weight
            if weight > 0 and (chosen is None or reach - weight <= final[b] * sum(weights)):
                chosen = token
        assert chosen is not None
        runs.append([*run, chosen])
    return runs


def check_rejection(
    candidates: list[list[int]],
    target: list[list[list[float]]],
    draft: list[list[list[float]]],
    coins: list[list[float]],
    final: list[float],
    depth: int | None,
) -> None:
    got = accept_rejection(
        torch.tensor(candidates),
        torch.tensor(target),
        torch.tensor(draft),
        torch.tensor(coins),
        torch.tensor(final),
        depth,
    )
    width = len(candidates[0])
    want = rejection_oracle(candidates, target, draft, coins, final, depth or width)
    check_contract(got, want, width, depth or width)


VOCAB = 4


@st.composite
def distributions(draw: Any) -> list[float]:
    """Four probabilities in sixteenths."""
    cuts = sorted(draw(st.lists(st.integers(0, 16), min_size=VOCAB - 1, max_size=VOCAB - 1)))
    return [(b - a) / 16 for a, b in zip([0, *cuts], [*cuts, 16], strict=True)]


@st.composite
def rejection_batches(draw: Any) -> tuple[Any, ...]:
    batch, width = draw(st.integers(1, 3)), draw(st.integers(1, 6))

    def of(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=width, max_size=width))

    coin = st.sampled_from([i / 16 for i in range(17)])
    return (
        [of(st.integers(-1, VOCAB)) for _ in range(batch)],
        [of(distributions()) for _ in range(batch)],
        [of(distributions()) for _ in range(batch)],
        [of(coin) for _ in range(batch)],
        draw(st.lists(coin, min_size=batch, max_size=batch)),
        draw(st.none() | st.integers(1, width)),
    )


@settings(max_examples=200, deadline=None)
@given(rejection_batches())
def test_rejection_against_loops(batch: tuple[Any, ...]) -> None:
    check_rejection(*batch)


def test_one_hot_rejection_equals_greedy() -> None:
    gen = torch.Generator().manual_seed(0)
    candidates = torch.randint(0, 3, (40, 6), generator=gen)
    choice = torch.randint(0, 3, (40, 6), generator=gen)
    choice[:20, :3] = candidates[:20, 1:4]
    p = torch.nn.functional.one_hot(choice, 3).float()
    q = torch.nn.functional.one_hot(candidates.roll(-1, 1), 3).float()
    coins, final = torch.rand((40, 6), generator=gen), torch.rand(40, generator=gen)
    got, want = accept_rejection(candidates, p, q, coins, final), accept_greedy(candidates, choice)
    assert accepted_tokens(got) == accepted_tokens(want)
    assert torch.equal(got.accept_index, want.accept_index)


@pytest.mark.parametrize(
    ("p", "q", "coin", "final", "tokens"),
    [
        ([0.0, 1.0], [1.0, 0.0], 0.0, 0.5, [1]),
        ([1.0, 0.0], [0.0, 1.0], 0.0, 0.5, [0]),
        ([0.5, 0.5], [0.5, 0.5], 1.0, 0.0, [0]),
        ([0.5, 0.5], [0.5, 0.5], 0.9375, 1.0, [0, 1]),
        ([1.0, 0.0], [1.0, 0.0], 0.5, 1.0, [0, 0]),
    ],
)
def test_the_ends_of_the_coin(p: list[float], q: list[float], coin: float, final: float, tokens: list[int]) -> None:
    """Draft 0: strictly below p, never with q = 0, and a token of probability 0 is not drawn at any coin."""
    rows = torch.tensor([[p, p]])
    got = accept_rejection(
        torch.tensor([[5, 0]]), rows, torch.tensor([[q, q]]), torch.full((1, 2), coin), torch.tensor([final])
    )
    assert accepted_tokens(got) == [tokens]


def test_no_draft_samples_the_root_row() -> None:
    p = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]])
    got = accept_rejection(torch.tensor([[5, -1]]), p, p, torch.zeros(1, 2), torch.tensor([0.3]))
    assert accepted_tokens(got) == [[1]]


def test_a_row_without_a_positive_entry_is_reported() -> None:
    p = torch.zeros((1, 2, 3))
    got = accept_rejection(torch.tensor([[5, 1]]), p, p, torch.zeros(1, 2), torch.zeros(1))
    with pytest.raises(InputError, match="request 0: no token could be drawn"):
        accepted_tokens(got)


# -- refusals of acceptance -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, -1, 4])
def test_depth_lies_between_1_and_the_width(depth: int) -> None:
    tokens = torch.zeros((1, 3), dtype=torch.int64)
    with pytest.raises(InputError, match=f"depth = {depth}; 1 to the verify width 3"):
        accept_greedy(tokens, tokens, depth)
    with pytest.raises(InputError, match=f"depth = {depth}"):
        accept_rejection(tokens, torch.ones(1, 3, 2), torch.ones(1, 3, 2), torch.zeros(1, 3), torch.zeros(1), depth)


def test_tensors_that_do_not_fit_are_refused() -> None:
    tokens = torch.zeros((1, 3), dtype=torch.int64)
    with pytest.raises(InputError, match="candidates"):
        accept_greedy(tokens[0], tokens)
    with pytest.raises(InputError, match="target_predict"):
        accept_greedy(tokens, tokens[:, :2])
    with pytest.raises(InputError, match="candidates"):
        accept_greedy(tokens.float(), tokens)
    with pytest.raises(InputError, match="draft_probs"):
        accept_rejection(tokens, torch.ones(1, 3, 2), torch.ones(1, 3, 4), torch.zeros(1, 3), torch.zeros(1))


def test_chain_layout() -> None:
    index, child, sibling = chain_layout(2, 3)
    assert index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert child.tolist() == [[1, 2, -1], [1, 2, -1]]
    assert sibling.tolist() == [[-1] * 3] * 2


# -- the contract, switched off ---------------------------------------------------------------------------------------


def grid() -> list[tuple[list[list[int]], list[list[int]], int | None]]:
    """Matching runs of every length, with and without a narrower index."""
    cases = []
    for width in (1, 2, 4, 6):
        tokens = list(range(1, width + 1))
        for right in range(width):
            target = [*tokens[1 : right + 1], *[90 + j for j in range(width - right)]]
            for depth in (None, max(1, width - 1)):
                cases.append(([tokens, tokens], [target, target], depth))
    return cases


def check_grid() -> None:
    for case in grid():
        check_greedy(*case)


def changed_greedy(change: Callable[..., None]) -> Callable[..., None]:
    real = verify_module.verify_tree_greedy

    def mutant(*args: Any) -> None:
        real(*args)
        change(*args)

    return mutant


def dirty_tail(predict: torch.Tensor, index: torch.Tensor, *rest: Any) -> None:
    index[index == -1] = 7


def one_fewer(predict: torch.Tensor, index: torch.Tensor, correct: torch.Tensor, *rest: Any) -> None:
    correct.sub_(1).clamp_(min=0)


def bonus_is_the_draft(predict: torch.Tensor, index: torch.Tensor, correct: torch.Tensor, *rest: Any) -> None:
    candidates = rest[0]
    for b, n in enumerate(correct.tolist()):
        predict[index[b, n]] = candidates[b, n]


def local_rows(predict: torch.Tensor, index: torch.Tensor, *rest: Any) -> None:
    index[index >= 0] %= rest[1].shape[1]


@pytest.mark.parametrize("change", [dirty_tail, one_fewer, bonus_is_the_draft, local_rows])
def test_a_broken_contract_shows(monkeypatch: pytest.MonkeyPatch, change: Callable[..., None]) -> None:
    check_grid()
    monkeypatch.setattr(verify_module, "verify_tree_greedy", changed_greedy(change))
    with pytest.raises((AssertionError, InputError)):
        check_grid()


def test_a_length_without_the_root_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = verify_module.VerifyResult
    monkeypatch.setattr(verify_module, "VerifyResult", lambda p, i, n: real(p, i, n - 1))
    with pytest.raises((AssertionError, InputError)):
        check_grid()


def test_a_comparison_that_is_not_strict_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = verify_module.chain_speculative_sampling

    def mutant(*args: Any) -> None:
        coins = args[5] * (1 - 2**-20)
        real(*args[:5], coins, *args[6:])

    monkeypatch.setattr(verify_module, "chain_speculative_sampling", mutant)
    with pytest.raises(AssertionError):
        test_the_ends_of_the_coin([0.5, 0.5], [0.5, 0.5], 1.0, 0.0, [0])


def test_a_draw_from_p_after_a_rejection_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ([[0, 1]], [[[0.5, 0.25, 0.25, 0.0]] * 2], [[[0.25, 0.75, 0.0, 0.0]] * 2], [[1.0, 0.0]], [0.75], None)
    check_rejection(*case)
    real = verify_module.chain_speculative_sampling

    def mutant(*args: Any) -> None:
        real(*args)
        for b, n in enumerate(args[2].tolist()):
            args[0][args[1][b, n]] = int((args[7][b, n].cumsum(0) > args[6][b]).int().argmax())

    monkeypatch.setattr(verify_module, "chain_speculative_sampling", mutant)
    case = (*case[:4], [0.5], None)
    with pytest.raises(AssertionError):
        check_rejection(*case)


# -- commit -----------------------------------------------------------------------------------------------------------


def int64(*values: Any) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.int64)


def test_the_worked_example() -> None:
    """Tree root → {A, B}, A → C; accepted A, C; bonus X. Slots 42080..42083 hold R, A, B, C."""
    verified = result([A, C, -9, X], [[0, 1, 3, -1]], [3])
    assert accepted_rows(verified) == [[0, 1, 3]]
    assert accepted_tokens(verified) == [[A, C, X]], "what is appended to the output"
    plan = plan_commit(int64([42080, 42081, 42082, 42083]), int64(100), accepted_rows(verified))
    assert plan.targets.tolist() == [42080, 42081, 42082]
    assert plan.sources.tolist() == [42080, 42081, 42083]
    assert [m.tolist() for m in plan.moves] == [[42082], [42083]]
    assert plan.new_lens.tolist() == [103]
    memory = dict(zip(range(42080, 42084), (R, A, B, C), strict=True))
    memory |= dict(zip(plan.targets.tolist(), [memory[s] for s in plan.sources.tolist()], strict=True))
    assert [memory[42080 + j] for j in range(3)] == [R, A, C], "the KV that becomes history"


@st.composite
def commits(draw: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], list[list[int]]]:
    batch, width = draw(st.integers(0, 4)), draw(st.integers(1, 6))
    slots = draw(st.permutations(range(batch * width)))
    lens = draw(st.lists(st.integers(0, 5000), min_size=batch, max_size=batch))
    rows = []
    for b in range(batch):
        rest = draw(st.lists(st.sampled_from(range(1, width)), unique=True)) if width > 1 else []
        rows.append([b * width, *(b * width + j for j in sorted(rest))])
    return np.array(slots, dtype=np.int64).reshape(batch, width), np.array(lens, dtype=np.int64), rows


@settings(max_examples=100, deadline=None)
@given(commits())
def test_a_commit_moves_the_accepted_rows_to_the_front(commit: Any) -> None:
    slots, lens, rows = commit
    before = slots.copy()
    plan = plan_commit(slots, lens, rows)
    assert {plan.sources.dtype, plan.targets.dtype, plan.new_lens.dtype} == {np.dtype(np.int64)}
    flat = slots.reshape(-1).tolist()
    memory = {slot: row for row, slot in enumerate(flat)}
    for targets, sources in (plan.moves, (plan.targets, plan.sources)):
        moved = dict(memory)
        moved.update({t: memory[s] for t, s in zip(targets.tolist(), sources.tolist(), strict=True)})
        for b, accepted in enumerate(rows):
            assert [moved[slot] for slot in slots[b, : len(accepted)].tolist()] == accepted
    assert plan.new_lens.tolist() == [n + len(accepted) for n, accepted in zip(lens.tolist(), rows, strict=True)]
    assert not bool((plan.moves[0] == plan.moves[1]).any())
    assert np.array_equal(slots, before)


def test_a_chain_moves_nothing() -> None:
    plan = plan_commit(int64([5, 6, 7], [90, 91, 92]), int64(1, 2), [[0, 1], [3, 4, 5]])
    assert [len(m) for m in plan.moves] == [0, 0]
    assert plan.new_lens.tolist() == [3, 5]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([[0, 1], []], "request 1: 0 accepted rows; 1 to 3"),
        ([[0, 1, 2, 2], [3]], "request 0: 4 accepted rows; 1 to 3"),
        ([[0, 3], [3]], "request 0: verify row 3; 0 to 2"),
        ([[0], [2]], "request 1: verify row 2; 3 to 5"),
        ([[0, -1], [3]], "request 0: verify row -1"),
        ([[1], [3]], "request 0: first accepted row 1; the root, row 0"),
        ([[0], [3, 4, 4]], r"request 1: accepted rows \[3, 4, 4\]; each row can be accepted once"),
        ([[0]], "1 lists of accepted rows for 2 requests"),
        ([[0], [3], [6]], "3 lists of accepted rows for 2 requests"),
    ],
)
def test_wrong_rows_are_refused(rows: list[list[int]], says: str) -> None:
    with pytest.raises(InputError, match=says):
        plan_commit(int64([5, 6, 7], [8, 9, 10]), int64(1, 2), rows)


@pytest.mark.parametrize(
    ("slots", "lens"), [(int64(1, 2), int64(1)), (int64([1, 2]), int64(1, 2)), (int64([1, 2]), int64([1]))]
)
def test_shapes_that_do_not_fit_are_refused(slots: Any, lens: Any) -> None:
    with pytest.raises(InputError, match=r"\[bs, D\] and \[bs\] are needed"):
        plan_commit(slots, lens, [[0]])


@pytest.mark.parametrize("length", [0, -1, 4])
def test_a_length_that_the_index_does_not_hold_is_refused(length: int) -> None:
    with pytest.raises(InputError, match=f"request 1: accept_lens = {length}; 1 to 3"):
        accepted_rows(result([1, 2, 3, 4, 5, 6], [[0, -1, -1], [3, 4, 5]], [1, length]))


def test_a_mover_without_the_move_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = plan_commit

    def in_place(slots: Any, lens: Any, rows: Any) -> Any:
        plan = real(slots, lens, rows)
        return type(plan)(plan.targets, plan.targets, plan.new_lens)

    monkeypatch.setitem(globals(), "plan_commit", in_place)
    with pytest.raises(AssertionError):
        test_the_worked_example()
