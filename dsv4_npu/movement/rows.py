"""Copies of rows between slabs and host memory, as bits: a copy changes nothing, whatever the rows hold."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from dsv4_npu import ops
from dsv4_npu.alloc.allocator import KVAllocator
from dsv4_npu.errors import InputError
from dsv4_npu.movement.belongings import describe, locate
from dsv4_npu.pools import DSV4Pools, RowSlab, StateSlab

#: Integers of each element size: a row is copied as these, whatever its type.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Rows of each family: one ``[layers, n, width]`` integer tensor per tensor of the slab (rows, then scales).
Rows = Mapping[str, tuple[torch.Tensor, ...]]

#: What two sides must agree on: per family and tensor of its slab, ``(layers, element type, width)``.
Layout = dict[str, list[tuple[int, str, int]]]


def parts(slab: RowSlab | StateSlab) -> list[torch.Tensor]:
    """The slab's tensors as ``[layers, rows, width]`` views of integers of the element's size."""
    return [t.view(BITS[t.element_size()]).flatten(1, -2) for t in slab.tensors()]


def layout_of(pools: DSV4Pools) -> Layout:
    """The row layout of every family of ``pools``."""
    return {
        name: [(t.shape[0], str(t.dtype).removeprefix("torch."), t.shape[-1]) for t in slab.tensors()]
        for name, slab in pools.families().items()
    }


def check_layout(theirs: Layout, pools: DSV4Pools) -> None:
    """Raise InputError unless rows of layout ``theirs`` fit ``pools``: only the number of draft stages may differ."""
    ours, target = layout_of(pools), pools.config.model.num_layers
    for name, mine in ours.items():
        given = theirs.get(name, [])
        same = [one[1:] for one in given] == [one[1:] for one in mine]
        for here, there in zip(mine, given, strict=False):
            layers_fit = there[0] >= target if name == "swa" else there[0] == here[0]
            same = same and layers_fit
        if not same:
            raise InputError(
                f"rows of family {name!r} are {given} (layers, type, width) and the pools hold {mine}: "
                "only rows of the same model and format can be taken in"
            )


def check_rows(pools: DSV4Pools, length: int, rows: Rows) -> None:
    """Raise InputError unless ``rows`` are as many and as wide as what belongs to a request at ``length``."""
    spans = describe(pools.config, length)
    for name, slab in pools.families().items():
        shapes = [tuple(t.shape[1:]) for t in rows[name]]
        if shapes != [(spans[name].size, part.shape[-1]) for part in parts(slab)]:
            raise InputError(f"rows of family {name!r} have shapes {shapes}: {spans[name].size} rows are needed")


def read_rows(pools: DSV4Pools, alloc: KVAllocator, row: int, length: int) -> dict[str, tuple[torch.Tensor, ...]]:
    """Host copies of everything that belongs to request ``row`` at ``length``; later writes do not reach them.

    Raises OwnershipError for a hole and InputError beyond the committed length.
    """
    if length > alloc.committed(row):
        raise InputError(f"row {row}: {length} positions, {alloc.committed(row)} are committed: the rest is no history")
    found = locate(alloc, pools.config, row, length)
    copies = {}
    for name, slab in pools.families().items():
        at = torch.from_numpy(found[name]).to(pools.device)
        copies[name] = tuple(part.index_select(1, at).to("cpu") for part in parts(slab))
    return copies


def write_rows(pools: DSV4Pools, alloc: KVAllocator, row: int, length: int, rows: Rows, shared: int = 0) -> None:
    """Store ``rows`` (all that belongs to a request at ``length``) where request ``row`` has its own slots.

    The first ``shared`` positions are somebody else's and stay untouched. Banks of pages that changed hands are
    emptied first, so that nothing empties them afterwards. Draft stages that ``rows`` lacks become zeros: what their
    rows held belonged to another request.

    Raises InputError for rows of another shape and OwnershipError for a hole; nothing is written then.
    """
    check_rows(pools, length, rows)
    whole, own = describe(pools.config, length), describe(pools.config, length, shared)
    found = locate(alloc, pools.config, row, length, shared)
    clear_freed_banks(pools, alloc)
    for name, slab in pools.families().items():
        at, skipped = torch.from_numpy(found[name]).to(pools.device), own[name].start - whole[name].start
        for part, values in zip(parts(slab), rows[name], strict=True):
            layers = min(len(part), len(values))
            part[:layers].index_copy_(1, at, values[:layers, skipped:].to(pools.device))
            if layers < len(part):
                part[layers:].index_fill_(1, at, 0)


def clear_freed_banks(pools: DSV4Pools, alloc: KVAllocator) -> None:
    """Empty the C4 banks of SWA pages that were freed since this was done last (A2/A3)."""
    pages = alloc.drain_freed_swa()
    if not len(pages) or not pools.c4_state_by_page:
        return
    banks = torch.from_numpy(np.unique(pages).astype(np.int64)).to(pools.device, non_blocking=True)
    for state in (pools.c4_state, pools.index_state):
        if state.layers:
            ops.clear_request_states_(state.data, banks, state.ring)
