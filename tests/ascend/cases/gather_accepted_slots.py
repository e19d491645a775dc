"""Source and target slots of the accepted rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4_npu.ops.gather_accepted_slots import ref, triton

from ..case import Case
from .accept import accepted_rows


def case(batch: int, drafts: int, width: int, index: torch.dtype, slot: torch.dtype, **options: object) -> Case:
    random = torch.Generator().manual_seed(batch * 100 + drafts * 10 + width)
    accept_index, accept_lens = accepted_rows(batch, drafts, width, index, random)
    slots = (torch.randperm(batch * drafts, generator=random) + 128).to(slot)
    return Case(
        f"batch {batch}, D {drafts}, width {width}, {index}, {slot}",
        lambda: dict(zip(("tgt", "src"), triton.run(slots, accept_index, accept_lens), strict=True)),
        lambda: dict(zip(("tgt", "src"), ref.gather_accepted_slots(slots, accept_index, accept_lens), strict=True)),
        **options,  # type: ignore[arg-type]
    )


def cases() -> Iterator[Case]:
    for drafts in range(1, 10):
        yield case(1 + drafts % 3, drafts, 1 + drafts // 2, torch.int32, torch.int64)
    yield case(257, 4, 4, torch.int64, torch.int32, programs=3)
    yield case(64, 6, 6, torch.int32, torch.int32, production=True)
    yield case(64, 8, 8, torch.int32, torch.int64, production=True)
