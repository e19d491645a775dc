"""Where trees of drafts come from: the EAGLE-like head, or a script that knows what the target will say."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dsv4_npu.emulation.trees.head import EagleHead
from dsv4_npu.spec.trees import TreeSpec


@dataclass(frozen=True)
class TreeDrafts:
    """Trees of one round: ``tokens``, ``parents`` int64 ``[bs, D]``; node 0 is the root, parent -1: root or unused."""

    tokens: torch.Tensor
    parents: torch.Tensor


class TreeDrafter(Protocol):
    """Proposes one tree per request. ``needs_history``: it looks at prompt + outputs, which the host then passes."""

    name: str
    needs_history: bool

    def propose(self, states: torch.Tensor, roots: torch.Tensor, histories: Sequence[Sequence[int]]) -> TreeDrafts:
        """Trees for a batch: the head's ``states [bs, H]``, ``roots`` int64 ``[bs]``, ``histories`` with outputs."""


class EagleTrees:
    """What the head finds most likely."""

    name = "eagle"
    needs_history = False

    def __init__(self, head: EagleHead, spec: TreeSpec) -> None:
        self.head, self.spec = head, spec

    def propose(self, states: torch.Tensor, roots: torch.Tensor, histories: Sequence[Sequence[int]]) -> TreeDrafts:
        """See :class:`TreeDrafter`."""
        del histories
        return TreeDrafts(*self.head.propose(states, roots, self.spec))


class ScriptedTrees:
    """Random trees of random shape that hold the target's own tokens along a random path, and wrong ones beside it.

    The path ends at any node, so every accept length and every set of accepted rows comes up; accepted rows are seldom
    contiguous. Trees may have fewer than D nodes, and siblings the same token.

    Args:
        continuation: ``(history, count) -> the target's next tokens``.
        spec: ``topk`` children per node at most, ``steps`` levels, D nodes.
        vocab: vocabulary size.
        seed: of the shapes; the same history gets the same tree.
    """

    name = "scripted"
    needs_history = True

    def __init__(
        self, continuation: Callable[[Sequence[int], int], list[int]], spec: TreeSpec, vocab: int, seed: int = 0
    ) -> None:
        self.continuation, self.spec, self.vocab, self.seed = continuation, spec, vocab, seed

    def propose(self, states: torch.Tensor, roots: torch.Tensor, histories: Sequence[Sequence[int]]) -> TreeDrafts:
        """See :class:`TreeDrafter`."""
        del states
        trees = [self._one(history) for history in histories]
        tokens = torch.tensor([tokens for tokens, _ in trees], dtype=torch.int64).view(-1, self.spec.width)
        parents = torch.tensor([parents for _, parents in trees], dtype=torch.int64).view(-1, self.spec.width)
        tokens[:, 0] = roots
        return TreeDrafts(tokens, parents)

    def _one(self, history: Sequence[int]) -> tuple[list[int], list[int]]:
        spec = self.spec
        draw = random.Random(f"{self.seed} {len(history)} {history[-1]}")
        parents, depth, children = [-1], [0], [0]
        for _ in range(spec.width - 1):
            open_nodes = [j for j in range(len(parents)) if depth[j] < spec.steps and children[j] < spec.topk]
            if not open_nodes or draw.random() < 0.05:
                break
            parent = draw.choice(open_nodes)
            children[parent] += 1
            parents.append(parent)
            depth.append(depth[parent] + 1)
            children.append(0)
        node = draw.randrange(len(parents))
        path = set()
        while node > 0:
            path.add(node)
            node = parents[node]
        right = self.continuation(history, spec.steps) if spec.steps else []
        tokens = [history[-1]]
        for j in range(1, len(parents)):
            wanted = right[depth[j] - 1]
            tokens.append(wanted if j in path else (wanted + draw.randrange(1, self.vocab)) % self.vocab)
        unused = spec.width - len(parents)
        return tokens + [-1] * unused, parents + [-1] * unused
