"""Slots and block tables of ragged batches, page sizes that are no powers of two, empty requests."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4_npu.ops.extend_slots import ref, triton

from ..case import Case


def case(batch: int, page: int, columns: int, longest: int, index: torch.dtype, **options: object) -> Case:
    random = torch.Generator().manual_seed(batch * 1000 + page * 10 + columns)
    table = torch.randint(1, 1 << 20, (batch + 3, columns + 2), generator=random).to(torch.int32)
    requests = torch.randperm(batch + 3, generator=random)[:batch].to(index)
    lengths = torch.randint(0, min(longest, columns * page) + 1, (batch,), generator=random)
    starts = (torch.rand(batch, generator=random) * (columns * page - lengths + 1)).long()
    total = int(lengths.sum())
    inputs = (table, requests, starts.to(index), lengths.to(index), page, total, columns)
    return Case(
        f"batch {batch}, page {page}, columns {columns}, up to {longest} tokens, {index}",
        lambda: dict(zip(("slots", "tables"), triton.run(*inputs), strict=True)),
        lambda: dict(zip(("slots", "tables"), ref.extend_slots(*inputs), strict=True)),
        **options,  # type: ignore[arg-type]
    )


def cases() -> Iterator[Case]:
    for batch, page, columns, longest in ((1, 1, 1, 1), (2, 3, 4, 12), (3, 5, 2, 3), (5, 16, 3, 40), (4, 7, 9, 63)):
        yield case(batch, page, columns, longest, torch.int64)
    yield case(300, 4, 2, 6, torch.int32)
    yield case(3, 16, 3, 48, torch.int32, programs=1)
    yield case(64, 128, 3, 6, torch.int32, production=True)
    yield case(3, 128, 20, 2500, torch.int64, production=True)
