"""The clear of rejected C128 rows: widths, rings, ragged accept lengths, the real row of 1024 floats."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4_npu.ops.clear_c128_draft_states import ref, triton

from ..case import Case, Outputs, untouched


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


def far_row() -> Case:
    """Rows beyond 2**31 elements, in memory that nobody touches otherwise."""
    ring, width, requests, lengths = 256, 1024, torch.tensor([8202]), torch.tensor([1000])
    first = 8202 * ring + 1000 % ring

    def outcome(clear: object) -> Outputs:
        with untouched():
            state = torch.empty(1, 8203 * ring + 1, width)
        state[0, first - 1 : first + 5] = 7.0
        clear(state, requests, lengths, torch.tensor([2]), ring, 4)  # type: ignore[operator]
        return {"around": state[0, first - 1 : first + 5].clone()}

    return Case(
        f"row {first} of width {width}",
        lambda: outcome(triton.run),
        lambda: outcome(ref.clear_c128_draft_states_),
    )


def cases() -> Iterator[Case]:
    for drafts in range(1, 10):
        yield case(1 + drafts % 3, 1 + drafts % 4, 16, (2, 6, 24)[drafts % 3], drafts, torch.int64)
    yield case(3, 5, 7, 10, 4, torch.int32, programs=1)
    yield case(1, 257, 8, 4, 3, torch.int32)
    yield far_row()
    yield case(2, 3, 256, 1024, 8, torch.int32, production=True)
    yield case(2, 3, 256, 1024, 8, torch.int64, production=True)
