"""Greedy verification: trees and chains of 1 to 9 nodes, narrow accept_index, many requests."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4_npu.ops.verify_tree_greedy import ref, triton

from ..case import Case
from .verify import Tree, chain, outcome, random_tree


def case(batch: int, drafts: int, width: int, *, tree: bool, tokens: int = 3, **options: object) -> Case:
    random = torch.Generator().manual_seed(batch * 100 + drafts * 10 + width)
    links: Tree = random_tree(batch, drafts, random) if tree else chain(batch, drafts)
    candidates = torch.randint(0, tokens, (batch, drafts), generator=random)
    targets = torch.randint(0, tokens, (batch, drafts), generator=random)
    inputs = (candidates, links.index, links.child, links.sibling, targets)
    return Case(
        f"batch {batch}, D {drafts}, width {width}, {'tree' if tree else 'chain'}, {tokens} tokens",
        lambda: outcome(batch, drafts, width, triton.run, *inputs),
        lambda: outcome(batch, drafts, width, ref.verify_tree_greedy, *inputs),
        **options,  # type: ignore[arg-type]
    )


def cases() -> Iterator[Case]:
    for drafts in range(1, 10):
        yield case(1 + drafts % 3, drafts, 1 + drafts // 2, tree=True)
        yield case(3, drafts, drafts, tree=False)
    yield case(2, 4, 3, tree=False, tokens=1)
    yield case(5, 6, 2, tree=True, tokens=1, programs=1)
    yield case(257, 4, 4, tree=False)
    yield case(64, 8, 8, tree=True, production=True)
    yield case(64, 6, 6, tree=False, production=True)
