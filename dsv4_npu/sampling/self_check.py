"""Tiny inputs on which published verify kernels have given wrong answers, with the right ones.

A case is one call. Its outputs start poisoned, so that what a kernel leaves unwritten shows. The numbers in the names
are those of the project's list of cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

POISON = -77
WRONG = "wrong answer"
COIN_BELOW_ONE = 1 - 2**-24


@dataclass(frozen=True)
class Case:
    """Inputs of one call and its right outputs. ``bonus`` holds the allowed last tokens of each request."""

    name: str
    candidates: list[list[int]]
    accept_index: list[list[int]]
    bonus: list[set[int]]
    target: list[list[list[float]]]
    draft: list[list[list[float]]] | None = None
    children: list[list[int]] | None = None
    siblings: list[list[int]] | None = None
    coins: list[list[float]] | None = None
    last_coins: list[float] | None = None
    target_predict: list[list[int]] | None = None

    def arguments(self, op: str, device: torch.device) -> dict[str, Any]:
        """The keyword arguments of SGLang's call of ``op``, outputs poisoned."""
        bs, drafts = len(self.candidates), len(self.candidates[0])
        chain = [[*range(1, drafts), -1]] * bs
        arguments: dict[str, Any] = {
            "predicts": torch.full((bs * drafts,), POISON, dtype=torch.int32),
            "accept_index": torch.full((bs, len(self.accept_index[0])), POISON, dtype=torch.int32),
            "accept_token_num": torch.full((bs,), POISON, dtype=torch.int32),
            "candidates": torch.tensor(self.candidates),
            "retrive_index": torch.arange(bs * drafts).view(bs, drafts),
            "retrive_next_token": torch.tensor(self.children or chain),
            "retrive_next_sibling": torch.tensor(self.siblings or [[-1] * drafts] * bs),
        }
        if op == "verify_tree_greedy":
            arguments["target_predict"] = torch.tensor(self.target_predict)
        else:
            target = torch.tensor(self.target, dtype=torch.float32)
            arguments["uniform_samples"] = torch.tensor(self.coins or [[0.5] * drafts] * bs)
            arguments["uniform_samples_for_final_sampling"] = torch.tensor(self.last_coins or [0.5] * bs)
            arguments["target_probs"] = target
            arguments["draft_probs"] = torch.tensor(self.draft) if self.draft else torch.zeros_like(target)
            arguments.update(threshold_single=1.0, threshold_acc=1.0, deterministic=True)
        return {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in arguments.items()}

    def holds(self, predicts: list[int], accept_index: list[list[int]], accept_token_num: list[int]) -> bool:
        """Whether these outputs are right: the whole of accept_index, the accepted tokens and an allowed bonus."""
        if accept_index != self.accept_index:
            return False
        drafts = len(self.candidates[0])
        tokens = [token for request in self.candidates for token in request]
        for b, index in enumerate(accept_index):
            rows = [row for row in index if row >= 0]
            follows = [tokens[row] for row in rows[1:]]
            if accept_token_num[b] != len(rows) - 1 or [predicts[row] for row in rows[:-1]] != follows:
                return False
            if predicts[rows[-1]] not in self.bonus[b] or not all(row // drafts == b for row in rows):
                return False
        return True


@dataclass(frozen=True)
class RenormCase:
    """One renormalisation: probabilities, limits and the result."""

    name: str
    probs: list[list[float]]
    limits: list[float]
    result: list[list[float]] = field(default_factory=list)


def _one_hot(*tokens: int, vocab: int) -> list[list[float]]:
    return [[float(t == token) for t in range(vocab)] for token in tokens]


_ALL_MATCH = Case(
    "case 35: a row of accept_index is as wide as the buffer, not D",
    candidates=[[0, 1, 2, 3], [0, 3, 2, 1]],
    accept_index=[[0, 1, 2], [4, 5, 6]],
    bonus=[{3}, {1}],
    target=[_one_hot(1, 2, 3, 0, vocab=4), _one_hot(3, 2, 1, 0, vocab=4)],
    draft=[_one_hot(1, 2, 3, 0, vocab=4), _one_hot(3, 2, 1, 0, vocab=4)],
    target_predict=[[1, 2, 3, 0], [3, 2, 1, 0]],
)
_SIBLING = Case(
    "case 36: the second sibling and its child are followed",
    candidates=[[0, 1, 2, 3]],
    accept_index=[[0, 2, 3]],
    bonus=[{9}],
    children=[[1, -1, 3, -1]],
    siblings=[[-1, 2, -1, -1]],
    target=[_one_hot(2, 0, 3, 9, vocab=10)],
    target_predict=[[2, 0, 3, 9]],
)
_ZERO_TARGET = Case(
    "case 33: a draft of target probability 0 is rejected at coin 0",
    candidates=[[0, 0]],
    accept_index=[[0, -1]],
    bonus=[{1}],
    target=[[[0.0, 1.0], [0.5, 0.5]]],
    draft=[[[1.0, 0.0], [0.5, 0.5]]],
    coins=[[0.0, 0.0]],
    last_coins=[0.0],
)
_COIN_ONE = Case(
    "case 33: a final coin of 1 gives a token of positive probability",
    candidates=[[0, 2]],
    accept_index=[[0, -1]],
    bonus=[{1}],
    target=[[[0.25, 0.75, 0.0], [0.25, 0.75, 0.0]]],
    draft=[[[0.25, 0.25, 0.5], [0.25, 0.75, 0.0]]],
    last_coins=[1.0],
)
_NO_DRAFT = Case(
    "case 34: a candidate of -1 is no draft; the target's row itself is sampled",
    candidates=[[5, -1]],
    accept_index=[[0, -1]],
    bonus=[{1}],
    target=[[[0.0, 0.6, 0.4, 0.0], [0.0, 0.0, 0.0, 1.0]]],
    draft=[[[0.0, 0.9, 0.1, 0.0], [0.0, 0.0, 0.0, 1.0]]],
)
CASES: dict[str, tuple[Case | RenormCase, ...]] = {
    "verify_tree_greedy": (_ALL_MATCH, _SIBLING),
    "chain_speculative_sampling_triton": (
        _ALL_MATCH,
        _ZERO_TARGET,
        Case(
            "case 33: a draft of draft probability 0 is rejected",
            candidates=[[0, 0]],
            accept_index=[[0, -1]],
            bonus=[{0}],
            target=[[[0.5, 0.5], [0.5, 0.5]]],
            draft=[[[0.0, 1.0], [0.5, 0.5]]],
        ),
        _COIN_ONE,
        Case(
            "case 33: a residual that rounds to zero falls back to the target's row",
            candidates=[[0, 1]],
            accept_index=[[0, -1]],
            bonus=[{0, 1}],
            target=[[[0.5, 0.49999991, 0.0], [0.5, 0.5, 0.0]]],
            draft=[[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]],
            coins=[[1.0, 1.0]],
            last_coins=[COIN_BELOW_ONE],
        ),
        _NO_DRAFT,
    ),
    "tree_speculative_sampling_target_only": (_ALL_MATCH, _SIBLING, _ZERO_TARGET, _COIN_ONE, _NO_DRAFT),
    "top_k_renorm_prob": (RenormCase("top 2 of 4", [[0.1, 0.2, 0.3, 0.4]], [2], [[0.0, 0.0, 3 / 7, 4 / 7]]),),
    "top_p_renorm_prob": (RenormCase("top 0.6 of 4", [[0.1, 0.2, 0.3, 0.4]], [0.6], [[0.0, 0.0, 3 / 7, 4 / 7]]),),
}


def _right(op: str, function: Callable[..., Any], case: Case | RenormCase, device: torch.device) -> bool:
    if isinstance(case, RenormCase):
        limits = torch.tensor(case.limits, dtype=torch.int32 if op == "top_k_renorm_prob" else torch.float32)
        result = function(torch.tensor(case.probs, device=device), limits.to(device))
        return bool(torch.allclose(result.cpu(), torch.tensor(case.result), atol=1e-5))
    arguments = case.arguments(op, device)
    function(**arguments)
    outputs = (arguments[name].cpu().tolist() for name in ("predicts", "accept_index", "accept_token_num"))
    return case.holds(*outputs)


def first_failure(op: str, function: Callable[..., Any], device: torch.device) -> str | None:
    """The first case on which ``function`` answers wrongly or raises, in words; None if it passes all.

    ``op`` is a name in :data:`CASES`; ``function`` is called as SGLang calls it. Waits for the device.
    """
    for case in CASES[op]:
        failure = case_failure(op, function, case, device)
        if failure:
            return case.name if failure == WRONG else f"{case.name} ({failure})"
    return None


def case_failure(op: str, function: Callable[..., Any], case: Case | RenormCase, device: torch.device) -> str:
    """What is wrong with ``function``'s answer to one case, in words; "" if it is right. Waits for the device."""
    try:
        return "" if _right(op, function, case, device) else WRONG
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
