"""Batches for the verify ops, and runs of them on poisoned outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsv4_npu import ops

POISON = -77


@dataclass(frozen=True)
class Target:
    """An implementation and where its tensors live."""

    backend: str
    device: str

    @property
    def kind(self) -> str:
        if self.device == "cuda":
            return "cuda"
        return {"cpu": "cpp", "triton": "interpreter", "ref": "ref"}[self.backend]


@dataclass(frozen=True)
class Batch:
    """The inputs of every verify op for one batch; ``width`` is accept_index's."""

    width: int
    candidates: torch.Tensor
    rows: torch.Tensor
    children: torch.Tensor
    siblings: torch.Tensor
    coins: torch.Tensor
    last_coins: torch.Tensor
    target: torch.Tensor
    draft: torch.Tensor
    target_predict: torch.Tensor
    threshold_single: float = 1.0
    threshold_acc: float = 1.0

    @property
    def shape(self) -> tuple[int, int, int]:
        bs, drafts, vocab = self.target.shape
        return bs, drafts, vocab

    def inputs(self, op: str) -> tuple[Any, ...]:
        """The op's arguments after the three outputs."""
        tree = (self.candidates, self.rows, self.children, self.siblings)
        coins = (self.coins, self.last_coins, self.target)
        return {
            "verify_tree_greedy": (*tree, self.target_predict),
            "chain_speculative_sampling": (*tree[:2], *coins, self.draft),
            "tree_speculative_sampling_target_only": (*tree, *coins, self.threshold_single, self.threshold_acc),
        }[op]

    def outputs(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        bs, drafts, _ = self.shape
        sizes = ((bs * drafts,), (bs, self.width), (bs,))
        predicts, index, number = (torch.full(size, POISON, dtype=torch.int32, device=device) for size in sizes)
        return predicts, index, number


@dataclass(frozen=True)
class Result:
    """The outputs of one run as lists."""

    predicts: list[int]
    accept_index: list[list[int]]
    accept_token_num: list[int]


def move(values: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    return tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in values)


def run_function(function: Callable[..., Any], op: str, batch: Batch, device: str = "cpu") -> Result:
    outputs = batch.outputs(device)
    function(*outputs, *move(batch.inputs(op), device))
    predicts, index, number = (x.cpu().tolist() for x in outputs)
    return Result(predicts, index, number)


def run(target: Target, op: str, batch: Batch) -> Result:
    def function(*arguments: Any) -> None:
        getattr(ops, op)(*arguments, backend=target.backend)

    return run_function(function, op, batch, target.device)


def chain_links(bs: int, drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
    children = torch.tensor([[*range(1, drafts), -1]] * bs, dtype=torch.int64).reshape(bs, drafts)
    return children, torch.full((bs, drafts), -1)


def random_tree(rng: torch.Generator, bs: int, drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Links of a random tree per request; a child comes after its parent and siblings in ascending order."""
    children = torch.full((bs, drafts), -1)
    siblings = torch.full((bs, drafts), -1)
    for b in range(bs):
        newest: dict[int, int] = {}
        for node in range(1, drafts):
            parent = int(torch.randint(0, node, (), generator=rng))
            if parent in newest:
                siblings[b, newest[parent]] = node
            else:
                children[b, parent] = node
            newest[parent] = node
    return children, siblings


def dyadic_rows(rng: torch.Generator, *shape: int) -> torch.Tensor:
    """Rows of few-bit numbers that sum to 1: every sum, product and comparison in float32 is exact, ties are common."""
    *lead, vocab = shape
    rows = [
        torch.bincount(torch.randint(0, vocab, (16,), generator=rng), minlength=vocab)
        for _ in range(int(torch.tensor(lead).prod()))
    ]
    stacked = torch.stack(rows) if rows else torch.zeros(0, vocab)
    return (stacked.to(torch.float32) / 16).reshape(shape)


def smooth_rows(rng: torch.Generator, *shape: int) -> torch.Tensor:
    """Rows with a few likely tokens; positive entries are too large for float32 sums to jump over one."""
    raw = torch.rand(shape, generator=rng) + 0.5
    raw[torch.rand(shape, generator=rng) < 0.2] = 0
    raw[..., :3] += torch.rand((*shape[:-1], min(3, shape[-1])), generator=rng) * shape[-1] / 4
    return raw / raw.sum(-1, keepdim=True)


def random_batch(seed: int, bs: int, drafts: int, width: int, vocab: int, exact: bool = True) -> Batch:
    """A batch with a random tree, likely and missing drafts, and coins that include both ends."""
    rng = torch.Generator().manual_seed(seed)
    rows = dyadic_rows if exact else smooth_rows
    children, siblings = random_tree(rng, bs, drafts)

    def coins(*shape: int) -> torch.Tensor:
        if exact:
            return torch.randint(0, 9, shape, generator=rng).to(torch.float32) / 8
        drawn = torch.rand(shape, generator=rng)
        return torch.where(drawn < 0.1, torch.floor(drawn * 20), drawn)

    likely = torch.randint(-1, min(vocab, 4) + 1, (bs, drafts), generator=rng)
    return Batch(
        width=width,
        candidates=likely,
        rows=torch.arange(bs * drafts).view(bs, drafts),
        children=children,
        siblings=siblings,
        coins=coins(bs, drafts),
        last_coins=coins(bs),
        target=rows(rng, bs, drafts, vocab),
        draft=rows(rng, bs, drafts, vocab),
        target_predict=torch.randint(0, min(vocab, 3), (bs, drafts), generator=rng),
        threshold_single=[1.0, 0.5, 0.25, 0.0][seed % 4] if exact else 0.9,
        threshold_acc=[1.0, 0.5, 1.0, 0.0][(seed // 4) % 4] if exact else 0.8,
    )


def with_chain(batch: Batch) -> Batch:
    children, siblings = chain_links(*batch.candidates.shape)
    return replace(batch, children=children, siblings=siblings)
