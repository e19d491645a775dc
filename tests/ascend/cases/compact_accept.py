"""Compaction of the accepted tokens and hidden states to the front of each request's block."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4_npu.ops.compact_accept import ref, triton

from ..case import Case, Outputs
from .accept import accepted_rows


def case(
    batch: int, drafts: int, width: int, hidden: int | None, dtype: torch.dtype, index: torch.dtype, **options: object
) -> Case:
    random = torch.Generator().manual_seed(batch * 100 + drafts * 10 + width)
    accept_index, accept_lens = accepted_rows(batch, drafts, width, index, random)
    predict = torch.randint(0, 129280, (batch * drafts,), generator=random).to(torch.int32)
    states = None if hidden is None else torch.randn(batch * drafts, hidden, generator=random).to(dtype)

    def outcome(compact: object) -> Outputs:
        tokens, moved = predict.clone(), None if states is None else states.clone()
        compact(tokens, moved, accept_index, accept_lens)  # type: ignore[operator]
        return {"predict": tokens} if moved is None else {"predict": tokens, "hidden_states": moved}

    return Case(
        f"batch {batch}, D {drafts}, width {width}, hidden {hidden}, {dtype}, {index}",
        lambda: outcome(triton.run),
        lambda: outcome(ref.compact_accept_),
        **options,  # type: ignore[arg-type]
    )


def cases() -> Iterator[Case]:
    for drafts in range(1, 10):
        hidden, dtype = ((6, torch.float32), (12, torch.bfloat16), (7, torch.bfloat16))[drafts % 3]
        yield case(1 + drafts % 3, drafts, 1 + drafts // 2, hidden, dtype, torch.int32)
    yield case(5, 6, 4, None, torch.float32, torch.int64, programs=1)
    yield case(257, 4, 4, 2, torch.float32, torch.int32)
    yield case(2, 8, 8, 4096, torch.bfloat16, torch.int32, production=True)
    yield case(2, 6, 6, 7168, torch.bfloat16, torch.int32, production=True)
