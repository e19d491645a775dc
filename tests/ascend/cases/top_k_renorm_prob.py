"""Top-k renormalisation: ties, limits outside the vocabulary, rows without mass."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4_npu.ops.top_k_renorm_prob import ref, triton

from ..case import Case
from .renorm import rows, same_tokens


def case(batch: int, vocab: int, index: torch.dtype, support: int = 40, **options: object) -> Case:
    random = torch.Generator().manual_seed(batch * 100 + vocab)
    probs = rows(batch, vocab, random, support)
    top_k = torch.randint(-1, min(vocab, 50) + 2, (batch,), generator=random).to(index)
    return Case(
        f"batch {batch}, V {vocab}, {index}",
        lambda: {"out": triton.run(probs, top_k)},
        lambda: {"out": ref.top_k_renorm_prob(probs, top_k)},
        agree=same_tokens,
        **options,  # type: ignore[arg-type]
    )


def cases() -> Iterator[Case]:
    for vocab in (1, 2, 3, 2047, 4096, 4097, 9001):
        yield case(5, vocab, torch.int32)
    yield case(3, 100, torch.int64, programs=1)
    yield case(257, 17, torch.int32)
    for index in (torch.int32, torch.int64):
        yield case(3, 129280, index, support=300, production=True)
