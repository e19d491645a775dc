"""Cases of the ops that verify and sample.

The handed ones are those of :mod:`dsv4_npu.sampling.self_check`. Random ones use probabilities that are multiples of
1/64 and coins between them, so that sums are exact and every implementation must give the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dsv4_npu import sampling
from dsv4_npu.sampling.self_check import CASES, case_failure
from dsv4_npu.selftest.case import POISON, OpCase

STEPS = 64


@dataclass(frozen=True)
class HandedCase:
    """A case of the table that installed libraries are checked with, called as SGLang calls the function."""

    name: str
    op: str
    case: Any
    slow: bool = False

    def run(self, function: Callable[..., Any], device: torch.device) -> str:
        """What is wrong, in words, or ""."""
        return case_failure(self.op.removeprefix("sampling."), function, self.case, device)


def handed_cases() -> Iterator[HandedCase]:
    """Every case of the table."""
    for op, cases in CASES.items():
        for case in cases:
            yield HandedCase(case.name, f"sampling.{op}", case)


#: The functions of the handed cases: those of :mod:`dsv4_npu.sampling`, which has SGLang's names.
SGLANG_FUNCTIONS: dict[str, Callable[..., Any]] = {f"sampling.{op}": getattr(sampling, op) for op in CASES}


def _probs(rng: torch.Generator, *shape: int) -> torch.Tensor:
    """Rows of multiples of 1/64 that sum to 1; a few entries of most rows are 0."""
    *rows, vocab = shape
    counts = torch.zeros(shape)
    draws = torch.randint(0, vocab, (*rows, STEPS), generator=rng)
    return counts.scatter_add_(-1, draws, torch.ones(draws.shape)) / STEPS


def _coins(rng: torch.Generator, *shape: int) -> torch.Tensor:
    return (torch.randint(0, STEPS, shape, generator=rng) + 0.5) / STEPS


def _outputs(batch: int, drafts: int, width: int) -> dict[str, torch.Tensor]:
    return {
        "predicts": torch.full((batch * drafts,), POISON, dtype=torch.int32),
        "accept_index": torch.full((batch, width), POISON, dtype=torch.int32),
        "accept_token_num": torch.full((batch,), POISON, dtype=torch.int32),
    }


def chain(batch: int, drafts: int, vocab: int, seed: int) -> dict[str, Any]:
    """Arguments of chain sampling; drafts are likely ones, so that walks of every length occur."""
    rng = torch.Generator().manual_seed(seed)
    target = _probs(rng, batch, drafts, vocab)
    candidates = torch.randint(0, vocab, (batch, drafts), generator=rng)
    if batch and drafts > 1:
        candidates[:, 1:] = target[:, :-1].argmax(-1)
    return {
        **_outputs(batch, drafts, drafts),
        "candidates": candidates,
        "retrieve_index": torch.arange(batch * drafts).view(batch, drafts),
        "uniform_samples": _coins(rng, batch, drafts),
        "uniform_samples_for_final_sampling": _coins(rng, batch),
        "target_probs": target,
        "draft_probs": _probs(rng, batch, drafts, vocab).roll(1, 0) if batch else target.clone(),
    }


def tree(batch: int, drafts: int, vocab: int, seed: int) -> dict[str, Any]:
    """Arguments of tree sampling on random trees."""
    rng = torch.Generator().manual_seed(seed)
    made = chain(batch, drafts, vocab, seed)
    child, sibling = _links(rng, batch, drafts)
    del made["draft_probs"]
    return {**made, "retrieve_next_token": child, "retrieve_next_sibling": sibling}


def greedy(batch: int, drafts: int, vocab: int, seed: int) -> dict[str, Any]:
    """Arguments of greedy verification on random trees over few tokens, so that drafts are often right."""
    rng = torch.Generator().manual_seed(seed)
    child, sibling = _links(rng, batch, drafts)
    return {
        **_outputs(batch, drafts, drafts),
        "candidates": torch.randint(0, vocab, (batch, drafts), generator=rng),
        "retrieve_index": torch.arange(batch * drafts).view(batch, drafts),
        "retrieve_next_token": child,
        "retrieve_next_sibling": sibling,
        "target_predict": torch.randint(0, vocab, (batch, drafts), generator=rng),
    }


def _links(rng: torch.Generator, batch: int, drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of random trees; node 0 is the root."""
    child = torch.full((batch, drafts), -1)
    sibling = torch.full((batch, drafts), -1)
    for b in range(batch):
        last: dict[int, int] = {}
        for node in range(1, drafts):
            parent = int(torch.randint(0, node, (1,), generator=rng))
            if parent in last:
                sibling[b, last[parent]] = node
            else:
                child[b, parent] = node
            last[parent] = node
    return child, sibling


def _one_hot(kind: Callable[..., dict[str, Any]], vocab: int, token: int) -> dict[str, Any]:
    """A target that puts everything on one token: it must be drawn whatever the coin."""
    made = kind(3, 2, vocab, 1)
    target = torch.zeros(3, 2, vocab)
    target[:, :, token] = 1.0
    made["target_probs"] = target
    made["candidates"] = torch.full((3, 2), (token + 1) % vocab)
    made["uniform_samples_for_final_sampling"] = torch.tensor([0.0, 0.5, 1.0])
    return made


def _uniform(kind: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """64 requests over 4 equal tokens, final coins spread evenly, no drafts."""
    made = kind(STEPS, 1, 4, 2)
    made["target_probs"] = torch.full((STEPS, 1, 4), 0.25)
    made["uniform_samples_for_final_sampling"] = (torch.arange(STEPS) + 0.5) / STEPS
    return made


def _renorm(probs: torch.Tensor, name: str, limits: list[float], dtype: torch.dtype) -> dict[str, Any]:
    return {"probs": probs.clone(), name: torch.tensor(limits, dtype=dtype)}


def sampling_cases() -> Iterator[OpCase]:
    """Random and edge cases against ref.py."""
    kinds: dict[str, Callable[..., dict[str, Any]]] = {
        "chain_speculative_sampling": chain,
        "tree_speculative_sampling_target_only": tree,
    }
    for op, kind in kinds.items():
        for vocab in (2049, 3001):
            for token in sorted({0, 2047, 2048, vocab - 1}):
                name = f"case 38: the only token of positive probability is {token} of {vocab}"
                yield OpCase(name, op, partial(_one_hot, kind, vocab, token), {"predicts": [token, POISON] * 3})
        name = "case 37: evenly spread coins draw four equal tokens equally often"
        right = sorted(list(range(4)) * (STEPS // 4))
        yield OpCase(name, op, partial(_uniform, kind), {"predicts": right})
        for batch, drafts, vocab in ((9, 4, 1000), (5, 6, 129), (0, 4, 50)):
            name = f"{batch} requests, D {drafts}, V {vocab}" if batch else "no requests are no work"
            yield OpCase(name, op, partial(kind, batch, drafts, vocab, 7))
        yield OpCase("V 129280, D 4", op, partial(kind, 4, 4, 129280, 8), slow=True)
    for batch, drafts in ((33, 5), (4, 1), (0, 4)):
        name = f"{batch} trees of {drafts} nodes" if batch else "no requests are no work"
        yield OpCase(name, "verify_tree_greedy", partial(greedy, batch, drafts, 3, 9))
    name = "case 40: 4096 requests of 8 rows stay within the grid's limit"
    yield OpCase(name, "verify_tree_greedy", partial(greedy, 4096, 8, 3, 10), slow=True)
    rng = torch.Generator().manual_seed(11)
    for vocab in (50, 2049):
        probs, name = _probs(rng, 7, vocab), f"7 rows of {vocab}"
        most: list[float] = [1, 2, 3, 5, 8, 0, 10**6]
        mass = [0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0]
        yield OpCase(name, "top_k_renorm_prob", partial(_renorm, probs, "top_k", most, torch.int64))
        yield OpCase(name, "top_p_renorm_prob", partial(_renorm, probs, "top_p", mass, torch.float32))
