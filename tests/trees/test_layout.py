"""Tree tensors against their definition, the worked example of a verify and its commit, sizes of trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu import addressing, ops
from dsv4_npu.config import SpeculationSpec
from dsv4_npu.emulation.trees.head import EagleHead, select_best
from dsv4_npu.errors import ConfigError, InputError
from dsv4_npu.pools.full_kv import FullKVPool
from dsv4_npu.spec import VerifyResult, accepted_rows, accepted_tokens, plan_commit, sizing
from dsv4_npu.spec.trees import (
    TreeSpec,
    accept_tree_greedy,
    accept_tree_sampling,
    most_nodes,
    tree_layout,
)
from tests.trees.harness import Bench

R, A, B, C, X, OTHER = 11, 12, 13, 14, 15, 16
#: Root -> {A, B}, A -> C.
EXAMPLE = torch.tensor([[-1, 0, 0, 1]])
TOKENS = torch.tensor([[R, A, B, C]])
CHOICES = torch.tensor([[A, C, OTHER, X]])


@st.composite
def forests(draw: st.DrawFn) -> torch.Tensor:
    """Parents of a batch of trees with unused nodes here and there."""
    batch, width = draw(st.integers(0, 4)), draw(st.integers(1, 9))
    rows = []
    for _ in range(batch):
        row = [-1]
        for j in range(1, width):
            used = [0] + [i for i in range(1, j) if row[i] >= 0]
            row.append(draw(st.sampled_from([-1, *used])))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64).view(batch, width)


@settings(max_examples=60, deadline=None)
@given(forests())
def test_layout_is_what_it_says(parents: torch.Tensor) -> None:
    layout = tree_layout(parents)
    batch, width = parents.shape
    for b in range(batch):
        parent = parents[b].tolist()
        children = [[j for j in range(1, width) if parent[j] == i] for i in range(width)]
        for j in range(width):
            path, node = [], j
            while node >= 0:
                path.append(node)
                node = parent[node]
            assert int(layout.retrieve_index[b, j]) == b * width + j
            assert int(layout.next_token[b, j]) == (children[j][0] if children[j] else -1)
            later = [i for i in children[parent[j]] if i > j] if parent[j] >= 0 else []
            assert int(layout.next_sibling[b, j]) == (later[0] if later else -1)
            assert int(layout.depth[b, j]) == len(path) - 1
            assert layout.mask[b, j].nonzero().flatten().tolist() == sorted(path)


def accepted(kind: str) -> VerifyResult:
    """The example's verify, by either rule."""
    layout = tree_layout(EXAMPLE)
    if kind == "greedy":
        return accept_tree_greedy(TOKENS, layout, CHOICES, 3)
    certain = torch.nn.functional.one_hot(CHOICES, 20).float()
    return accept_tree_sampling(TOKENS, layout, certain, torch.full((1, 4), 0.7), torch.full((1,), 0.3), 3)


@pytest.mark.parametrize("kind", ["greedy", "target-only"])
def test_worked_example(kind: str) -> None:
    result = accepted(kind)
    assert result.accept_index.tolist() == [[0, 1, 3]]
    assert result.accept_lens.tolist() == [3]
    assert accepted_tokens(result) == [[A, C, X]]

    page, layers, first = 16, 2, 42080
    pool = FullKVPool(layers, first // page, page, heads=2, key_dim=3, value_dim=3, dtype=torch.float32)
    slots = torch.arange(first, first + 4)
    rows = torch.arange(layers * 4 * 6, dtype=torch.float32).view(layers, 4, 2, 3)
    for layer in range(layers):
        pool.write(layer, slots, rows[layer], -rows[layer])
    before = [slab.clone() for slab in pool.tensors()]

    tgt, src = ops.gather_accepted_slots(slots, result.accept_index, result.accept_lens)
    assert tgt.tolist() == [[42080, 42081, 42082]]
    assert src.tolist() == [[42080, 42081, 42083]]
    commit = plan_commit(slots.numpy()[None], np.array([1000]), accepted_rows(result))
    assert [array.tolist() for array in commit.moves] == [[42082], [42083]]
    assert commit.new_lens.tolist() == [1003]
    still = tgt == src
    pool.move_kv(tgt.masked_fill(still, -1), src.masked_fill(still, -1))
    for slab, old, sign in zip(pool.tensors(), before, (1, -1), strict=True):
        want = old.clone()
        want.view(layers, -1, 2, 3)[:, 42082] = sign * rows[:, 3]  # C over B
        assert torch.equal(slab, want)
    kept = pool.read(0, slots[:3])[0]
    assert torch.equal(kept, rows[0, [0, 1, 3]])  # R, A, C

    bonus = torch.zeros(1, dtype=torch.int32)
    ops.fill_bonus_tokens_(bonus, result.predict, result.accept_index, result.accept_lens)
    hidden = torch.tensor([[R], [A], [B], [C]])
    ops.compact_accept_(result.predict, hidden, result.accept_index, result.accept_lens)
    assert bonus.tolist() == [X]
    assert result.predict[:3].tolist() == [A, C, X]
    assert hidden[:3].flatten().tolist() == [R, A, C]


def test_siblings_are_followed() -> None:
    layout = tree_layout(torch.tensor([[-1, 0, 0, 2]]))
    result = accept_tree_greedy(torch.tensor([[9, 1, 2, 3]]), layout, torch.tensor([[2, 0, 3, 99]]), 4)
    assert result.accept_index.tolist() == [[0, 2, 3, -1]]
    assert result.predict.tolist() == [2, -1, 3, 99]


def test_a_full_accept_index_ends_the_walk() -> None:
    result = accept_tree_greedy(TOKENS, tree_layout(EXAMPLE), CHOICES, 2)
    assert result.accept_index.tolist() == [[0, 1]]
    assert accepted_tokens(result) == [[A, C]]


def test_an_accept_index_wider_than_the_tree() -> None:
    result = accept_tree_greedy(TOKENS, tree_layout(EXAMPLE), CHOICES, 6)
    assert result.accept_index.tolist() == [[0, 1, 3, -1, -1, -1]]


def test_no_requests() -> None:
    none = torch.zeros((0, 4), dtype=torch.int64)
    result = accept_tree_greedy(none, tree_layout(none), none, 3)
    assert result.accept_index.shape == (0, 3)
    assert accepted_tokens(result) == []


def test_wrong_arguments() -> None:
    layout = tree_layout(EXAMPLE)
    with pytest.raises(InputError, match="depth = 0"):
        accept_tree_greedy(TOKENS, layout, CHOICES, 0)
    with pytest.raises(InputError, match=r"\[bs, D\] is needed"):
        accept_tree_greedy(TOKENS[0], layout, CHOICES, 3)


@pytest.mark.parametrize(
    ("topk", "steps", "width", "message"),
    [
        (0, 3, 4, "topk = 0; at least 1"),
        (2, -1, 1, "steps = -1; at least 1"),
        (2, 0, 4, "steps = 0; at least 1 is needed for a tree of 4 nodes"),
        (2, 2, 8, "draft_tokens = 7; a tree of topk = 2 and steps = 2 has 6 drafts"),
        (1, 3, 5, "draft_tokens = 4; a tree of topk = 1 and steps = 3 has 3 drafts"),
        (2, 2, 0, "draft_tokens = -1"),
    ],
)
def test_trees_that_cannot_be(topk: int, steps: int, width: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TreeSpec(topk, steps, width)


@pytest.mark.parametrize("topk", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_largest_tree_is_what_the_head_can_see(bench: Bench, topk: int, steps: int) -> None:
    spec = TreeSpec(topk, steps, most_nodes(topk, steps))
    head = EagleHead(bench.model, 0)
    tokens, parents = head.propose(head.start(2), torch.tensor([3, 4]), spec)
    depth = tree_layout(parents).depth
    assert tokens.shape == (2, spec.width)
    for b in range(2):
        per_level = [int((depth[b] == level).sum()) for level in range(steps + 1)]
        assert per_level == [1, topk] + [topk * topk] * (steps - 1)
        pairs = list(zip(parents[b].tolist(), tokens[b].tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)  # siblings are different tokens


def test_the_best_nodes_are_taken_with_their_parents() -> None:
    # Levels 0 | 1 2 | 3 4 5 6; node 5 (of parent 2) is as good as its parent.
    tokens = torch.tensor([[0, 10, 20, 30, 40, 50, 60]])
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 2]])
    scores = torch.tensor([[-1.0, -2.0, -3.0, -9.0, -2.0, -8.0]])
    for width, want in ((2, [0, 10]), (3, [0, 10, 20]), (4, [0, 10, 20, 50]), (5, [0, 10, 20, 30, 50])):
        chosen, above = select_best(tokens, parents, scores, width)
        assert chosen.tolist() == [want]
        for node, parent in enumerate(above[0].tolist()):
            if node:
                assert 0 <= parent < node
    assert above.tolist() == [[-1, 0, 0, 1, 2]]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 300), st.integers(1, 5), st.integers(1, 5), st.integers(1, 17), st.integers(1, 16))
def test_the_reserve_holds_every_branch(committed: int, topk: int, steps: int, page: int, width: int) -> None:
    """Each branch begins with its own copy of the partly filled last page; two rounds fit behind the committed end."""
    spec = TreeSpec(topk, steps, min(width, most_nodes(topk, steps)))
    allocated = sizing.next_allocated(committed, committed, spec.reserve(page), page)
    for start in (committed, committed + min(spec.depth, spec.width)):
        if topk == 1 or page == 1:
            end = start + topk * steps
        else:
            each = addressing.pages_for(start % page + steps, page)
            end = addressing.floor_to(start, page) + topk * each * page
        assert max(end, start + spec.width) <= allocated


def test_the_reserve_in_numbers() -> None:
    assert TreeSpec(4, 3, 16).reserve(128) == 2 * 4 * 2 * 128
    assert TreeSpec(4, 3, 16).reserve(1) == 2 * 16
    assert TreeSpec(1, 3, 4).reserve(128) == 2 * 4


def test_deepseek_v4_takes_no_trees() -> None:
    with pytest.raises(
        ConfigError, match=r"topk = 4 on DeepSeek-V4.*two tree nodes of one depth would share a state row"
    ):
        SpeculationSpec("chain", 3, topk=4)
