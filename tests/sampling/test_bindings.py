"""SGLang's argument lists, and the self-check that an installed sgl_kernel_npu has to pass."""

from __future__ import annotations

import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from verify_world import Result, Target, random_batch

from dsv4_npu import ops, sampling
from dsv4_npu.errors import InputError, UnavailableError
from dsv4_npu.sampling import installed
from dsv4_npu.sampling.self_check import CASES, first_failure

SAMPLE = [
    "predicts", "accept_index", "accept_token_num", "candidates", "retrive_index", "retrive_next_token",
    "retrive_next_sibling", "uniform_samples", "uniform_samples_for_final_sampling", "target_probs", "draft_probs",
    "threshold_single", "threshold_acc", "deterministic",
]  # fmt: skip
ARGUMENTS = {
    "verify_tree_greedy": [*SAMPLE[:7], "target_predict", "topk"],
    "chain_speculative_sampling_triton": SAMPLE,
    "tree_speculative_sampling_target_only": SAMPLE,
    "top_k_renorm_prob": ["probs", "top_k"],
    "top_p_renorm_prob": ["probs", "top_p"],
}
VERIFY = tuple(ARGUMENTS)[:3]
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_names_and_order(name: str) -> None:
    parameters = inspect.signature(getattr(sampling, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ARGUMENTS[name]
    assert "backend" in [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_own_implementations_pass_the_self_check(name: str, target: Target) -> None:
    def function(*args: Any, **kwargs: Any) -> Any:
        return getattr(sampling, name)(*args, **kwargs, backend=target.backend)

    assert first_failure(name, function, torch.device(target.device)) is None


def test_written_in_place_and_returned(target: Target) -> None:
    batch = random_batch(6, 3, 4, 3, 5)
    for name, op in zip(VERIFY, ("verify_tree_greedy", "chain_speculative_sampling", VERIFY[2]), strict=True):
        own = batch.outputs()
        getattr(ops, op)(*own, *batch.inputs(op), backend="ref")
        outputs = batch.outputs(target.device)
        tree = (batch.candidates, batch.rows, batch.children, batch.siblings)
        rest = (batch.target_predict,) if name == VERIFY[0] else (batch.coins, batch.last_coins, batch.target)
        rest += () if name == VERIFY[0] else (batch.draft, batch.threshold_single, batch.threshold_acc, True)
        moved = [x.to(target.device) if isinstance(x, torch.Tensor) else x for x in (*tree, *rest)]
        returned = getattr(sampling, name)(*outputs, *moved, backend=target.backend)
        assert all(x is y for x, y in zip(returned, outputs, strict=True))
        assert all(torch.equal(x.cpu(), y) for x, y in zip(outputs, own, strict=True))


def test_chain_needs_no_links_and_tree_no_draft_probs() -> None:
    batch = random_batch(6, 2, 4, 4, 5)
    coins = (batch.coins, batch.last_coins, batch.target)
    rows = (batch.candidates, batch.rows)
    sampling.chain_speculative_sampling_triton(*batch.outputs(), *rows, None, None, *coins, batch.draft)
    sampling.tree_speculative_sampling_target_only(*batch.outputs(), *rows, batch.children, batch.siblings, *coins)


def test_one_limit_for_all_rows() -> None:
    probs = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]])
    assert torch.equal(sampling.top_k_renorm_prob(probs, 1), torch.tensor([[0.0, 0, 1], [1, 0, 0]]))
    assert torch.equal(sampling.top_p_renorm_prob(probs, 0.4), torch.tensor([[0.0, 0, 1], [1, 0, 0]]))


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_unknown_backend(name: str) -> None:
    arguments = [None] * (2 if "renorm" in name else len(ARGUMENTS[name]))
    if "renorm" in name:
        arguments = [torch.rand(1, 3), torch.tensor([1])]
    with pytest.raises(InputError, match=r"backend is 'cann'; allowed: auto, .*sgl_kernel_npu"):
        getattr(sampling, name)(*arguments, backend="cann")


class Library:
    """A stand-in for sgl_kernel_npu: its modules in sys.modules, its functions replaceable, calls counted."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.package = types.ModuleType("sgl_kernel_npu.sample")
        self.greedy = types.ModuleType("sgl_kernel_npu.sample.verify_tree_greedy")
        patch.setitem(sys.modules, "sgl_kernel_npu", types.ModuleType("sgl_kernel_npu"))
        patch.setitem(sys.modules, "sgl_kernel_npu.sample", self.package)
        patch.setitem(sys.modules, "sgl_kernel_npu.sample.verify_tree_greedy", self.greedy)
        self.calls = 0

    def provide(self, name: str, function: Callable[..., Any]) -> None:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return function(*args, **kwargs)

        setattr(self.greedy if name == "verify_tree_greedy" else self.package, name, counted)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    installed._checked.clear()
    yield Library(monkeypatch)
    installed._checked.clear()


def call(name: str, backend: str) -> Any:
    """One call with plausible arguments; the outputs as lists."""
    if "renorm" in name:
        limit = torch.tensor([2], dtype=torch.int32) if name == "top_k_renorm_prob" else torch.tensor([0.5])
        return getattr(sampling, name)(torch.tensor([[0.1, 0.2, 0.3, 0.4]]), limit, backend=backend).tolist()
    case = CASES[name][0]
    arguments = case.arguments(name, CPU)  # type: ignore[union-attr]
    returned = getattr(sampling, name)(**arguments, backend=backend)
    return Result(*(x.tolist() for x in returned))


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_right_library_is_used(name: str, library: Library) -> None:
    library.provide(name, getattr(sampling, name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(name, "sgl_kernel_npu") == call(name, "cpu")
    assert library.calls == len(CASES[name]) + 1
    call(name, "sgl_kernel_npu")
    assert library.calls == len(CASES[name]) + 2  # checked once in a process


def stride_of_drafts(**arguments: Any) -> None:
    """Rows of accept_index written D apart, as if it were D wide."""
    bs, drafts = arguments["candidates"].shape
    wide = torch.full((bs, drafts), -1, dtype=torch.int32)
    index = arguments.pop("accept_index")
    sampling.verify_tree_greedy(**arguments, accept_index=wide)
    flat = index.view(-1)
    flat[:] = wide.view(-1)[: flat.numel()]


def first_child_only(**arguments: Any) -> None:
    siblings = torch.full_like(arguments.pop("retrive_next_sibling"), -1)
    sampling.verify_tree_greedy(**arguments, retrive_next_sibling=siblings)


def nothing_written(**arguments: Any) -> None:
    """A build whose kernel does not run."""


def last_token_at_coin_one(**arguments: Any) -> None:
    sampling.chain_speculative_sampling_triton(**arguments)
    if float(arguments["uniform_samples_for_final_sampling"][0]) == 1.0:
        arguments["predicts"][0] = arguments["target_probs"].shape[-1] - 1


def residual_for_a_missing_draft(**arguments: Any) -> None:
    sampling.chain_speculative_sampling_triton(**arguments)
    if int(arguments["candidates"][0, 1]) < 0:
        arguments["predicts"][0] = 2


def raises(**arguments: Any) -> None:
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize(
    ("name", "function", "case"),
    [
        ("verify_tree_greedy", stride_of_drafts, "case 35"),
        ("verify_tree_greedy", first_child_only, "case 36"),
        ("verify_tree_greedy", nothing_written, "case 35"),
        ("chain_speculative_sampling_triton", last_token_at_coin_one, "case 33: a final coin of 1"),
        ("chain_speculative_sampling_triton", residual_for_a_missing_draft, "case 34"),
        ("tree_speculative_sampling_target_only", raises, "RuntimeError: no kernel image"),
        ("top_k_renorm_prob", lambda probs, top_k: probs, "top 2 of 4"),
    ],
)
def test_wrong_library_falls_back_with_one_message(
    name: str, function: Callable[..., Any], case: str, library: Library
) -> None:
    library.provide(name, function)
    with pytest.warns(RuntimeWarning, match=f"sgl_kernel_npu's {name} fails the self-check on cpu .*{case}") as seen:
        assert call(name, "sgl_kernel_npu") == call(name, "cpu")
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(name, "sgl_kernel_npu") == call(name, "cpu")


def test_missing_library_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    installed._checked.clear()
    monkeypatch.setitem(sys.modules, "sgl_kernel_npu", None)
    with pytest.raises(UnavailableError, match=r"no PyPI wheel.*backend='auto'"):
        call("top_p_renorm_prob", "sgl_kernel_npu")


def test_library_without_the_function(library: Library) -> None:
    with pytest.raises(UnavailableError, match=r"has no sgl_kernel_npu.sample.top_p_renorm_prob"):
        call("top_p_renorm_prob", "sgl_kernel_npu")


def test_own_stand_in_is_not_taken_for_the_library(library: Library) -> None:
    library.package.top_p_renorm_prob = sampling.top_p_renorm_prob  # type: ignore[attr-defined]
    with pytest.raises(UnavailableError, match="own stand-in"):
        call("top_p_renorm_prob", "sgl_kernel_npu")


def test_arguments_are_checked_before_the_library_sees_them(library: Library) -> None:
    library.provide("verify_tree_greedy", sampling.verify_tree_greedy)
    arguments = CASES["verify_tree_greedy"][0].arguments("verify_tree_greedy", CPU)  # type: ignore[union-attr]
    arguments["target_predict"] = arguments["target_predict"].int()
    with pytest.raises(InputError, match="target_predict has dtype"):
        sampling.verify_tree_greedy(**arguments, backend="sgl_kernel_npu")
    assert library.calls == 0


def test_the_library_gets_scratch_and_links_of_its_own(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies in the arguments that a call does not read, wrong in shape or shared with an output."""
    given: list[dict[str, Any]] = []

    def spy(name: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(ARGUMENTS[name], args, strict=False)) | kwargs
            given.append({key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in arguments.items()})
            shared = arguments["draft_probs"].untyped_storage().data_ptr()
            assert all(
                key == "draft_probs" or not isinstance(x, torch.Tensor) or x.untyped_storage().data_ptr() != shared
                for key, x in arguments.items()
            )
            result = getattr(sampling, name)(*args, **kwargs)
            if name == VERIFY[2]:
                arguments["draft_probs"].fill_(7)
            return result

        return function

    batch = random_batch(6, 3, 4, 3, 5)
    coins = (batch.coins, batch.last_coins, batch.target)
    for name in VERIFY[1:]:
        library.provide(name, spy(name))
        wanted, outputs = batch.outputs(), batch.outputs()
        unread = (batch.target, torch.full((2, 2), 99.0), None)
        for extra in unread if name == VERIFY[2] else (batch.draft,):
            links = (batch.children, batch.siblings) if name == VERIFY[2] else (outputs[1], torch.full((9,), 77))
            limits = (1.0, 1.0) if name == VERIFY[2] else (0.1, 0.2)
            before = batch.target.clone()
            rest = (*links, *coins, extra, *limits)
            getattr(sampling, name)(*outputs, batch.candidates, batch.rows, *rest, backend="sgl_kernel_npu")
            getattr(sampling, name)(*wanted, batch.candidates, batch.rows, *rest, backend="cpu")
            assert all(torch.equal(x, y) for x, y in zip(outputs, wanted, strict=True))
            assert torch.equal(batch.target, before)
            last = given[-1]
            if name == VERIFY[2]:
                assert last["draft_probs"].shape == batch.target.shape
                assert not last["draft_probs"].any()
            else:
                assert last["retrive_next_token"].tolist() == [[1, 2, 3, -1]] * 3
                assert last["retrive_next_sibling"].tolist() == [[-1] * 4] * 3
                assert (last["threshold_single"], last["threshold_acc"]) == (1.0, 1.0)
