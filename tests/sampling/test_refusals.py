"""What the ops refuse, by name, before anything is written; and that torch sees them as well-formed operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from verify_world import POISON, Batch, random_batch

from dsv4_npu import ops
from dsv4_npu.errors import InputError

CHAIN = "chain_speculative_sampling"
TREE = "tree_speculative_sampling_target_only"
GREEDY = "verify_tree_greedy"
ALL = (CHAIN, TREE, GREEDY)
BATCH = random_batch(3, 2, 4, 3, 5)

Change = Callable[[Batch], Batch]
INPUTS: list[tuple[tuple[str, ...], str, Change, str]] = [
    (ALL, "candidates shape", lambda x: replace(x, candidates=x.candidates[0]), "candidates has shape"),
    (ALL, "candidates type", lambda x: replace(x, candidates=x.candidates.int()), "candidates has dtype torch.int32"),
    (ALL, "rows type", lambda x: replace(x, rows=x.rows.int()), "retrieve_index has dtype"),
    (ALL, "rows range", lambda x: replace(x, rows=x.rows + 1), "retrieve_index holds 8; allowed: 0 to 7"),
    (ALL, "rows stride", lambda x: replace(x, rows=x.rows.T.contiguous().T), "retrieve_index is not contiguous"),
    ((TREE, GREEDY), "child range", lambda x: replace(x, children=x.children + 4), "retrieve_next_token holds"),
    ((TREE, GREEDY), "sibling range", lambda x: replace(x, siblings=x.siblings - 1), "retrieve_next_sibling holds -2"),
    ((CHAIN, TREE), "coins", lambda x: replace(x, coins=x.coins[:, :1].contiguous()), "of uniform_samples is 1"),
    ((CHAIN, TREE), "coin type", lambda x: replace(x, coins=x.coins.double()), "uniform_samples has dtype"),
    ((CHAIN, TREE), "last coins", lambda x: replace(x, last_coins=x.last_coins[:1]), "final_sampling has shape"),
    ((CHAIN, TREE), "p type", lambda x: replace(x, target=x.target.bfloat16()), "target_probs has dtype"),
    ((CHAIN, TREE), "p shape", lambda x: replace(x, target=x.target[:, :3].contiguous()), "target_probs has shape"),
    ((CHAIN, TREE), "p stride", lambda x: replace(x, target=x.target.mT.contiguous().mT), "target_probs is not cont"),
    ((CHAIN,), "q rows", lambda x: replace(x, draft=x.draft[:, :1].contiguous()), "draft_probs per request is 1"),
    ((CHAIN,), "q vocab", lambda x: replace(x, draft=x.draft[..., :4].contiguous()), "draft_probs has shape"),
    ((TREE,), "single", lambda x: replace(x, threshold_single=1.5), "threshold_single is 1.5; allowed: 0 to 1"),
    ((TREE,), "acc", lambda x: replace(x, threshold_acc=float("nan")), "threshold_acc is nan; allowed: 0 to 1"),
    ((GREEDY,), "target", lambda x: replace(x, target_predict=x.target_predict[:, :3].contiguous()), "target_predict"),
    ((GREEDY,), "device", lambda x: replace(x, target_predict=x.target_predict.to("meta")), "is on meta; allowed: cpu"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [pytest.param(op, change, text, id=f"{op}: {name}") for names, name, change, text in INPUTS for op in names],
)
def test_wrong_input(op: str, change: Change, message: str) -> None:
    outputs = BATCH.outputs()
    with pytest.raises(InputError, match=message) as error:
        getattr(ops, op)(*outputs, *change(BATCH).inputs(op))
    assert str(error.value).startswith(f"{op}: ")
    assert all(bool((x == POISON).all()) for x in outputs)


@pytest.mark.parametrize("op", ALL)
@pytest.mark.parametrize(
    ("at", "wrong", "message"),
    [
        (0, torch.zeros(7, dtype=torch.int32), "predicts has shape"),
        (0, torch.zeros(8, dtype=torch.int64), "predicts has dtype"),
        (1, torch.zeros(3, 3, dtype=torch.int32), "accept_index has shape"),
        (1, torch.zeros(2, 0, dtype=torch.int32), "the width of accept_index is 0; allowed: at least 1"),
        (1, torch.zeros(3, 2, dtype=torch.int32).T, "accept_index is not contiguous"),
        (2, torch.zeros(3, dtype=torch.int32), "accept_token_num has shape"),
    ],
)
def test_wrong_output(op: str, at: int, wrong: Any, message: str) -> None:
    outputs = list(BATCH.outputs())
    outputs[at] = wrong
    with pytest.raises(InputError, match=message):
        getattr(ops, op)(*outputs, *BATCH.inputs(op))


@pytest.mark.parametrize("op", ALL)
def test_shared_memory(op: str) -> None:
    predicts, index, number = BATCH.outputs()
    function = getattr(ops, op)
    with pytest.raises(InputError, match="accept_token_num shares memory with predicts"):
        function(predicts, index, predicts[3:5], *BATCH.inputs(op))
    with pytest.raises(InputError, match="accept_token_num shares memory with accept_index"):
        function(predicts, index, index.view(-1)[:2], *BATCH.inputs(op))
    held = torch.zeros(8, dtype=torch.int64)
    inside = replace(BATCH, candidates=held.view(2, 4))
    with pytest.raises(InputError, match="candidates shares memory with accept_index"):
        function(predicts, held.view(torch.int32)[2:8].view(2, 3), number, *inside.inputs(op))


@pytest.mark.parametrize("op", [CHAIN, TREE])
def test_row_without_mass_raises_when_checked(op: str) -> None:
    batch = replace(BATCH, target=torch.zeros_like(BATCH.target))
    with pytest.raises(InputError, match=r"no positive entry in the last row of request\(s\) \[0, 1\]"):
        getattr(ops, op)(*batch.outputs(), *batch.inputs(op), checked=True)
    getattr(ops, op)(*BATCH.outputs(), *BATCH.inputs(op), checked=True)


@pytest.mark.parametrize("op", ALL)
def test_unknown_backend(op: str) -> None:
    with pytest.raises(InputError, match="backend is 'npu'; allowed: auto"):
        getattr(ops, op)(*BATCH.outputs(), *BATCH.inputs(op), backend="npu")


@pytest.mark.parametrize("op", ALL)
def test_opcheck(op: str) -> None:
    torch.library.opcheck(getattr(torch.ops.dsv4_npu, op).default, (*BATCH.outputs(), *BATCH.inputs(op)))


@pytest.mark.parametrize(
    ("op", "limits"), [("top_k_renorm_prob", torch.tensor([2, 3])), ("top_p_renorm_prob", torch.tensor([0.5, 0.9]))]
)
def test_opcheck_of_renorm(op: str, limits: torch.Tensor) -> None:
    torch.library.opcheck(getattr(torch.ops.dsv4_npu, op).default, (torch.rand(2, 7), limits))


@pytest.mark.parametrize("op", ALL)
def test_cpp_refuses_rows_outside(op: str) -> None:
    """Called without the Python checks it still never writes outside the buffers."""
    from dsv4_npu.ops import _registry

    if _registry.extension_problem:
        pytest.skip(_registry.extension_problem)
    bad = replace(BATCH, rows=BATCH.rows + 5)
    with pytest.raises(RuntimeError, match="retrieve_index is out of range"):
        getattr(torch.ops.dsv4_npu, op)(*BATCH.outputs(), *bad.inputs(op))


@pytest.mark.parametrize(
    ("op", "probs", "limits", "message"),
    [
        ("top_k_renorm_prob", torch.rand(4), torch.tensor([1]), "probs has shape"),
        ("top_k_renorm_prob", torch.rand(2, 4), torch.tensor([1.0, 2.0]), "top_k has dtype torch.float32"),
        ("top_k_renorm_prob", torch.rand(2, 4), torch.tensor([1]), "top_k has shape"),
        ("top_p_renorm_prob", torch.rand(2, 4).double(), torch.tensor([0.5, 0.5]), "probs has dtype torch.float64"),
        ("top_p_renorm_prob", torch.rand(4, 2).T, torch.tensor([0.5, 0.5]), "probs is not contiguous"),
        ("top_p_renorm_prob", torch.rand(2, 0), torch.tensor([0.5, 0.5]), "columns of probs, is 0"),
    ],
)
def test_wrong_renorm(op: str, probs: torch.Tensor, limits: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        getattr(ops, op)(probs, limits)
