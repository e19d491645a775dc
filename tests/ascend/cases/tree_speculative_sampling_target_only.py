"""Target-only sampling: trees with duplicate siblings, chains, both thresholds; exact rows as in the chain's cases."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4_npu.ops.tree_speculative_sampling_target_only import ref, triton

from ..case import Case
from .verify import Tree, chain, exact_coins, exact_rows, outcome, random_tree


def case(
    batch: int,
    drafts: int,
    width: int,
    vocab: int,
    support: int = 4,
    *,
    tree: bool = True,
    thresholds: tuple[float, float] = (1.0, 1.0),
    **options: object,
) -> Case:
    random = torch.Generator().manual_seed(batch * 1000 + drafts * 100 + width * 10 + vocab)
    links: Tree = random_tree(batch, drafts, random) if tree else chain(batch, drafts)
    target = exact_rows((batch, drafts), vocab, random, support)
    candidates = torch.zeros(batch, drafts, dtype=torch.long)
    for b in range(batch):
        for parent in range(drafts):
            node = int(links.child[b, parent])
            while node >= 0:
                candidates[b, node] = torch.multinomial(target[b, parent], 1, generator=random)
                node = int(links.sibling[b, node])
    if drafts > 2:
        candidates[0, 2], candidates[-1, -1] = -1, vocab
    coins, final = exact_coins((batch, drafts), random), exact_coins((batch,), random)
    inputs = (candidates, links.index, links.child, links.sibling, coins, final, target, *thresholds)
    return Case(
        f"batch {batch}, D {drafts}, width {width}, V {vocab}, {'tree' if tree else 'chain'}, thresholds {thresholds}",
        lambda: outcome(batch, drafts, width, triton.run, *inputs),
        lambda: outcome(batch, drafts, width, ref.tree_speculative_sampling_target_only, *inputs),
        **options,  # type: ignore[arg-type]
    )


def cases() -> Iterator[Case]:
    for drafts in range(1, 10):
        yield case(3, drafts, 1 + drafts // 2, (2, 3, 2047)[drafts % 3])
    for vocab in (4095, 4096, 4097, 9001):
        yield case(2, 5, 3, vocab, support=3)
    yield case(3, 6, 4, 50, thresholds=(0.25, 0.5))
    yield case(3, 6, 4, 50, thresholds=(0.0, 1.0))
    yield case(5, 6, 3, 31, programs=1)
    yield case(257, 4, 4, 17)
    yield case(3, 4, 4, 129280, support=8, tree=False, production=True)
    yield case(2, 8, 8, 129280, support=8, production=True)
