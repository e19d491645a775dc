"""A request's memory to the host and back, found from SGLang's slots instead of our tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsv4_npu import addressing, movement
from dsv4_npu.errors import InputError, OwnershipError
from dsv4_npu.movement.rows import parts

if TYPE_CHECKING:
    from dsv4_npu.sglang.kv_pool import KVPool

Rows = dict[str, tuple[torch.Tensor, ...]]


def read_request(pool: KVPool, slots: torch.Tensor, row: int) -> Rows:
    """Copies on the host of what a request of ``len(slots)`` tokens reads when it goes on, family by family."""
    found = _places(pool, slots, row)
    return {
        name: tuple(part.index_select(1, found[name]).to("cpu") for part in parts(slab))
        for name, slab in pool.slabs.families().items()
    }


def load_request(pool: KVPool, rows: Rows, slots: torch.Tensor, row: int) -> None:
    """Store copies where the request lies now; raises InputError for copies of another length or layout."""
    found = _places(pool, slots, row)
    for name, slab in pool.slabs.families().items():
        for part, values in zip(parts(slab), rows[name], strict=True):
            if values.shape != (part.shape[0], found[name].numel(), part.shape[2]):
                raise InputError(
                    f"rows of family {name!r} have shape {tuple(values.shape)}: "
                    f"{(part.shape[0], found[name].numel(), part.shape[2])} is needed for {slots.numel()} tokens"
                )
            part.index_copy_(1, found[name], values.to(part.device))


def _places(pool: KVPool, slots: torch.Tensor, row: int) -> dict[str, torch.Tensor]:
    """Rows of each slab, by the one description of what belongs to a request (``movement.describe``)."""
    config, device = pool.config, pool.slabs.device
    spans = movement.describe(config, slots.numel())
    at = {name: torch.arange(span.start, span.stop, device=device) for name, span in spans.items()}
    full = slots.to(device, torch.int64)

    def swa(positions: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = pool.full_to_swa_index_mapping[full[positions]]
        if bool((found <= 0).any()):
            raise OwnershipError(f"row {row}: positions of the window before {slots.numel()} have no SWA page")
        return found

    def c4_state() -> torch.Tensor:
        positions, ring = at["c4 state"], config.ring(addressing.C4_RATIO)
        if config.platform.c4_state_owner == "request":
            return addressing.request_state_rows(torch.full_like(positions, row), positions, ring)
        return addressing.swa_state_rows(swa(positions), config.page, ring, dummy=-1)

    columns = addressing.pages_for(spans["c128"].stop, config.c128_page_size)
    pages = torch.from_numpy(pool.sidecar.prefix(row, 0, columns)).to(device, torch.int64)
    c128 = pages[at["c128"] // config.c128_page_size] * config.c128_page_size + at["c128"] % config.c128_page_size
    c4 = addressing.c4_slots(full[at["c4"] * addressing.C4_RATIO + addressing.C4_RATIO - 1])
    states = c4_state()
    ring = config.ring(addressing.C128_RATIO)
    return {
        "swa": swa(at["swa"]),
        "c4": c4,
        "c4 indexer": c4,
        "c128": c128,
        "c4 state": states,
        "c4 indexer state": states,
        "c128 state": addressing.request_state_rows(torch.full_like(at["c128 state"], row), at["c128 state"], ring),
    }
