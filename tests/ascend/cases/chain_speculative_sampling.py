"""Chain rejection sampling: exact rows, so that every draw has one right answer, up to a real vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4_npu.ops.chain_speculative_sampling import ref, triton

from ..case import Case
from .verify import chain, exact_coins, exact_rows, outcome


def case(batch: int, drafts: int, width: int, vocab: int, support: int = 8, **options: object) -> Case:
    random = torch.Generator().manual_seed(batch * 1000 + drafts * 100 + width * 10 + vocab)
    target = exact_rows((batch, drafts), vocab, random, support)
    # Half of the draft's rows are the target's own, so that drafts are accepted.
    draft = torch.where(
        torch.rand(batch, drafts, 1, generator=random) < 0.5,
        target,
        exact_rows((batch, drafts), vocab, random, support),
    )
    drawn = torch.multinomial(draft.view(-1, vocab), 1, generator=random).view(batch, drafts)
    candidates = torch.cat([torch.zeros(batch, 1, dtype=torch.long), drawn[:, :-1]], 1)
    if drafts > 2:
        candidates[0, 2], candidates[-1, -1] = -1, vocab
    coins, final = exact_coins((batch, drafts), random), exact_coins((batch,), random)
    inputs = (candidates, chain(batch, drafts).index, coins, final, target, draft)
    return Case(
        f"batch {batch}, D {drafts}, width {width}, V {vocab}",
        lambda: outcome(batch, drafts, width, triton.run, *inputs),
        lambda: outcome(batch, drafts, width, ref.chain_speculative_sampling, *inputs),
        **options,  # type: ignore[arg-type]
    )


def cases() -> Iterator[Case]:
    for drafts in range(1, 10):
        yield case(3, drafts, drafts, (2, 3, 2047)[drafts % 3])
    for vocab in (4095, 4096, 4097, 9001):
        yield case(2, 4, 3, vocab, support=40)
    yield case(5, 4, 2, 31, programs=1)
    yield case(257, 3, 3, 17)
    yield case(3, 4, 4, 129280, support=64, production=True)
    yield case(2, 6, 6, 129280, support=64, production=True)
