"""Simulated acceptance: the layout of a real one, and nothing that claims to be one."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu.errors import ConfigError, InputError
from dsv4_npu.spec import accepted_rows, accepted_tokens, chain_layout
from dsv4_npu.spec.simulated import SimulatedResult, simulate_acceptance
from dsv4_npu.spec.trees import TreeLayout, TreeSpec, tree_layout
from tests.trees.harness import Bench, check_empty
from tests.trees.test_layout import forests


def chain(batch: int, width: int) -> TreeLayout:
    return tree_layout(torch.arange(-1, width - 1).expand(batch, width).contiguous())


def test_a_chain_is_a_tree() -> None:
    layout = chain(3, 5)
    tensors = (layout.retrieve_index, layout.next_token, layout.next_sibling)
    assert all(torch.equal(*pair) for pair in zip(tensors, chain_layout(3, 5), strict=True))


@settings(max_examples=60, deadline=None)
@given(forests(), st.integers(1, 7), st.data())
def test_the_layout_of_a_real_result(parents: torch.Tensor, depth: int, data: st.DataObject) -> None:
    batch, width = parents.shape
    lengths = torch.tensor([data.draw(st.integers(1, 8)) for _ in range(batch)], dtype=torch.int64)
    layout = tree_layout(parents)
    result = simulate_acceptance(parents.clamp_min(0), layout, lengths, depth, tokens="fixed", topk=4, fixed_token=77)
    assert isinstance(result, SimulatedResult)
    assert result.accept_index.shape == (batch, depth)
    for b, rows in enumerate(accepted_rows(result)):
        most = min(int(layout.depth[b].max()) + 1, depth)
        assert len(rows) == min(int(lengths[b]), most)
        assert rows[0] == b * width
        for above, below in itertools.pairwise(rows):
            assert int(parents[b, below - b * width]) == above - b * width
        assert result.accept_index[b, len(rows) :].eq(-1).all()
    assert accepted_tokens(result) == [[77] * len(rows) for rows in accepted_rows(result)]


def test_real_drafts_and_the_targets_bonus() -> None:
    candidates = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    target = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
    lengths = torch.tensor([3, 1])
    result = simulate_acceptance(candidates, chain(2, 4), lengths, 4, tokens="drafts", topk=1, target_predict=target)
    assert result.accept_index.tolist() == [[0, 1, 2, -1], [4, -1, -1, -1]]
    assert accepted_tokens(result) == [[2, 3, 12], [20]]


def test_refusals() -> None:
    layout, tokens = chain(1, 3), torch.tensor([[1, 2, 3]])
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ConfigError, match="simulated_tokens = 'drafts' with topk = 2; 1 is needed"):
        simulate_acceptance(tokens, layout, one, 3, tokens="drafts", topk=2, target_predict=tokens)
    with pytest.raises(ConfigError, match="'fixed' or 'drafts' is needed"):
        simulate_acceptance(tokens, layout, one, 3, tokens="any", topk=1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="target_predict"):
        simulate_acceptance(tokens, layout, one, 3, tokens="drafts", topk=1)
    with pytest.raises(InputError, match="lengths of shape"):
        simulate_acceptance(tokens, layout, one[:0], 3, tokens="fixed", topk=1)


@pytest.mark.parametrize("length", [1, 3, None])
def test_an_engine_with_fixed_tokens(bench: Bench, length: int | None) -> None:
    spec = TreeSpec(3, 3, 10)
    engine = bench.engine(spec, options={"accept": "simulated", "simulated_length": length, "simulated_token": 42})
    for prompt in (3, 9, 12):
        engine.submit(bench.prompt(prompt), 20)
    for run in engine.run():
        assert run.outputs[1:] == [42] * 19
        if length == 1:
            assert set(run.accepts) == {1}
        elif length is None:
            assert len(run.accepts) > 1
    check_empty(engine)


def test_an_engine_with_real_drafts(bench: Bench) -> None:
    """The drafts become the history, so the logits behind every token are those of the outputs."""
    spec = TreeSpec(1, 3, 4)
    options = {"accept": "simulated", "simulated_length": 3, "simulated_tokens": "drafts"}
    engine = bench.engine(spec, options=options)
    for prompt in (3, 9, 12):
        engine.submit(bench.prompt(prompt), 19)
    for run in engine.run():
        assert dict(run.accepts) == {3: 6}
        want = bench.oracle.forced(run.prompt, run.outputs)
        assert float((torch.stack(run.logits) - want).abs().max()) < 1e-10
        assert run.outputs != bench.oracle.greedy(run.prompt, 19).tokens
    check_empty(engine)
