"""Top-p renormalisation: masses that fall between the steps of exact rows, so that one set of tokens is right."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4_npu.ops.top_p_renorm_prob import ref, triton

from ..case import Case
from .renorm import rows, same_tokens
from .verify import UNIT


def case(batch: int, vocab: int, support: int = 40, **options: object) -> Case:
    random = torch.Generator().manual_seed(batch * 100 + vocab)
    probs = rows(batch, vocab, random, support)
    top_p = (torch.randint(0, UNIT, (batch,), generator=random) + 0.5) / UNIT
    top_p[0], top_p[-1] = 0.0, 1.0
    return Case(
        f"batch {batch}, V {vocab}",
        lambda: {"out": triton.run(probs, top_p)},
        lambda: {"out": ref.top_p_renorm_prob(probs, top_p)},
        agree=same_tokens,
        **options,  # type: ignore[arg-type]
    )


def cases() -> Iterator[Case]:
    for vocab in (1, 2, 3, 2047, 4096, 4097, 9001):
        yield case(5, vocab)
    yield case(3, 100, programs=1)
    yield case(257, 17)
    yield case(4, 129280, support=300, production=True)
