"""Inputs of the verify and sampling cases: trees, poisoned outputs, and probabilities whose sums have no rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..case import Outputs

UNIT = 1 << 12
POISON = -77


@dataclass(frozen=True)
class Tree:
    """``retrieve_index``, ``retrieve_next_token`` and ``retrieve_next_sibling``, each [batch, D] int64."""

    index: torch.Tensor
    child: torch.Tensor
    sibling: torch.Tensor


def chain(batch: int, drafts: int) -> Tree:
    child = torch.arange(1, drafts + 1).repeat(batch, 1)
    child[:, -1] = -1
    return Tree(torch.arange(batch * drafts).view(batch, drafts), child, torch.full((batch, drafts), -1))


def random_tree(batch: int, drafts: int, random: torch.Generator) -> Tree:
    """Trees in which the parent of node n is any node before it."""
    child, sibling = torch.full((batch, drafts), -1), torch.full((batch, drafts), -1)
    for b in range(batch):
        last: dict[int, int] = {}
        for node in range(1, drafts):
            parent = int(torch.randint(0, node, (), generator=random))
            if parent in last:
                sibling[b, last[parent]] = node
            else:
                child[b, parent] = node
            last[parent] = node
    return Tree(torch.arange(batch * drafts).view(batch, drafts), child, sibling)


def outputs(batch: int, drafts: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``predicts``, ``accept_index`` and ``accept_token_num`` full of what nobody may rely on."""
    return (
        torch.full((batch * drafts,), POISON, dtype=torch.int32),
        torch.full((batch, width), POISON, dtype=torch.int32),
        torch.full((batch,), POISON, dtype=torch.int32),
    )


def outcome(batch: int, drafts: int, width: int, call: Callable[..., None], *inputs: object) -> Outputs:
    written = outputs(batch, drafts, width)
    call(*written, *inputs)
    return dict(zip(("predicts", "accept_index", "accept_token_num"), written, strict=True))


def exact_rows(shape: tuple[int, ...], vocab: int, random: torch.Generator, support: int = 64) -> torch.Tensor:
    """Probability rows [*shape, vocab] of multiples of 1 / UNIT with sum 1: float32 sums of them are exact.

    So a draw has one right answer, whatever the order in which an implementation adds. ``support`` bounds the number of
    tokens that have any probability; they lie anywhere in the row.
    """
    rows = torch.zeros(*shape, vocab)
    for row in rows.view(-1, vocab):
        tokens = torch.randint(0, vocab, (support,), generator=random)
        picks = tokens[torch.randint(0, support, (UNIT,), generator=random)]
        row += torch.bincount(picks, minlength=vocab) / UNIT
    return rows


def exact_coins(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """Coins in [0, 1] of few bits, so that coin times mass is exact too; every fourth is one of the two ends."""
    coins = (torch.randint(-43, 300, shape, generator=random) / 256).clamp(0, 1)
    return coins.float()
