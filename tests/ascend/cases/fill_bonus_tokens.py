"""The bonus token of each request."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4_npu.ops.fill_bonus_tokens import ref, triton

from ..case import Case, Outputs
from .accept import POISON, accepted_rows


def case(batch: int, drafts: int, width: int, index: torch.dtype, token: torch.dtype, **options: object) -> Case:
    random = torch.Generator().manual_seed(batch * 100 + drafts * 10 + width)
    accept_index, accept_lens = accepted_rows(batch, drafts, width, index, random)
    predict = torch.randint(0, 129280, (batch * drafts,), generator=random).to(torch.int32)

    def outcome(fill: object) -> Outputs:
        bonus = torch.full((batch,), POISON, dtype=token)
        fill(bonus, predict, accept_index, accept_lens)  # type: ignore[operator]
        return {"bonus": bonus}

    return Case(
        f"batch {batch}, D {drafts}, width {width}, {index}, {token}",
        lambda: outcome(triton.run),
        lambda: outcome(ref.fill_bonus_tokens_),
        **options,  # type: ignore[arg-type]
    )


def cases() -> Iterator[Case]:
    for drafts in range(1, 10):
        yield case(1 + drafts % 3, drafts, 1 + drafts // 2, torch.int32, torch.int64)
    yield case(257, 4, 4, torch.int64, torch.int32, programs=3)
    yield case(64, 6, 6, torch.int32, torch.int32, production=True)
    yield case(64, 6, 6, torch.int32, torch.int64, production=True)
