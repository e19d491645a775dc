"""The clear of rejected C128 rows: widths, rings, ragged accept lengths, the real row of 1024 floats."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4_npu.ops.clear_c128_draft_states import ref, triton

from ..case import Case, Outputs


def case(layers: int, batch: int, ring: int, width: int, drafts: int, index: torch.dtype, **options: object) -> Case:
    random = torch.Generator().manual_seed(layers * 1000 + batch * 10 + drafts)
    rows = ring * (batch + 2) + 1
    state = torch.randn(layers, rows, width, generator=random)
    requests = (1 + torch.randperm(batch + 1, generator=random)[:batch]).to(index)
    seq_lens = torch.randint(0, 5000, (batch,), generator=random).to(index)
    accepted = torch.randint(1, drafts + 1, (batch,), generator=random).to(index)

    def outcome(clear: object) -> Outputs:
        changed = state.clone()
        clear(changed, requests, seq_lens, accepted, ring, drafts)  # type: ignore[operator]
        return {"state": changed}

    return Case(
        f"layers {layers}, batch {batch}, ring {ring}, width {width}, D {drafts}, {index}",
        lambda: outcome(triton.run),
        lambda: outcome(ref.clear_c128_draft_states_),
        **options,  # type: ignore[arg-type]
    )


def cases() -> Iterator[Case]:
    for drafts in range(1, 10):
        yield case(1 + drafts % 3, 1 + drafts % 4, 16, (2, 6, 24)[drafts % 3], drafts, torch.int64)
    yield case(3, 5, 7, 10, 4, torch.int32, programs=1)
    yield case(1, 257, 8, 4, 3, torch.int32)
    yield case(2, 3, 256, 1024, 8, torch.int32, production=True)
    yield case(2, 3, 256, 1024, 8, torch.int64, production=True)
