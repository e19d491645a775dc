"""The clear of a whole request bank."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4_npu.ops.clear_request_states import ref, triton

from ..case import Case, Outputs


def case(layers: int, batch: int, ring: int, width: int, index: torch.dtype, **options: object) -> Case:
    random = torch.Generator().manual_seed(layers * 1000 + batch * 10 + ring)
    state = torch.randn(layers, ring * (batch + 2) + 1, width, generator=random)
    requests = (1 + torch.randperm(batch + 1, generator=random)[:batch]).to(index)

    def outcome(clear: object) -> Outputs:
        changed = state.clone()
        clear(changed, requests, ring)  # type: ignore[operator]
        return {"state": changed}

    return Case(
        f"layers {layers}, batch {batch}, ring {ring}, width {width}, {index}",
        lambda: outcome(triton.run),
        lambda: outcome(ref.clear_request_states_),
        **options,  # type: ignore[arg-type]
    )


def cases() -> Iterator[Case]:
    for batch, ring, width in ((1, 1, 2), (2, 16, 6), (3, 17, 10), (5, 33, 24), (257, 8, 4)):
        yield case(1 + batch % 3, batch, ring, width, torch.int64)
    yield case(2, 3, 8, 6, torch.int32, programs=1)
    for width, ring in ((2048, 16), (512, 16), (1024, 256)):
        yield case(2, 2, ring, width, torch.int32, production=True)
    yield case(2, 2, 16, 2048, torch.int64, production=True)
