"""What belongs to a request at length n: by logical position, and where these positions lie now.

This is the one description that snapshots, transfers and buffer lists are made from. A request that goes on at
length n reads exactly this of what is already there:

- SWA rows of the positions ``(n - window, n)``, target layers and draft stages alike;
- C4 entries and indexer entries ``[0, n // 4)``; C128 entries ``[0, n // 128)``;
- compressor rows that the next windows still need: C4 (attention and indexer) from the window before the open one,
  C128 from the open window (:meth:`~dsv4_npu.alloc.rollback.RingRule.live`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dsv4_npu import addressing
from dsv4_npu.alloc.allocator import KVAllocator
from dsv4_npu.alloc.export import require_whole
from dsv4_npu.alloc.rollback import RingRule
from dsv4_npu.config import CacheConfig
from dsv4_npu.errors import InputError

I64 = npt.NDArray[np.int64]


class Span(NamedTuple):
    """Positions, or indices of compressed entries, ``[start, stop)``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many there are."""
        return self.stop - self.start


def describe(config: CacheConfig, length: int, shared: int = 0) -> dict[str, Span]:
    """What belongs to a request of ``length`` positions of history, by the names of ``DSV4Pools.families``.

    ``swa`` and the states count positions, ``c4``, ``c4 indexer`` and ``c128`` entries. With ``shared`` leading
    positions that somebody else owns (a cached prefix, a multiple of the page and of the C128 group), only what the
    request owns itself. Families without layers are empty.

    Raises:
        InputError: a negative length, or a shared prefix that is longer.
    """
    if not 0 <= shared <= length:
        raise InputError(f"length = {length}, shared = {shared}: 0 <= shared <= length is needed")
    c4, c128 = addressing.C4_RATIO, addressing.C128_RATIO
    window_start = max(0, length - config.model.sliding_window + 1)
    c4_start, _ = RingRule(c4, config.ring(c4), config.platform.c4_state_owner).live(length)
    c128_start, _ = RingRule(c128, config.ring(c128), "request").live(length)
    if config.platform.c4_state_owner == "swa_page":
        c4_start = max(c4_start, shared)
    spans = {
        "swa": Span(max(window_start, shared), length),
        "c4": Span(addressing.compressed_len(shared, c4), addressing.compressed_len(length, c4)),
        "c128": Span(addressing.compressed_len(shared, c128), addressing.compressed_len(length, c128)),
        "c4 state": Span(c4_start, length),
        "c128 state": Span(c128_start, length),
    }
    spans |= {"c4 indexer": spans["c4"], "c4 indexer state": spans["c4 state"]}
    for name in spans:
        if (name.startswith("c4") and not config.model.layers_of(c4)) or (
            name.startswith("c128") and not config.model.layers_of(c128)
        ):
            spans[name] = Span(0, 0)
    return spans


def swa_tail(config: CacheConfig, length: int) -> int:
    """How many of the last positions need their SWA page: the window, and the C4 rows in the banks of SWA pages."""
    spans = describe(config, length)
    return length - min(spans["swa"].start, spans["c4 state"].start if spans["c4 state"].size else length)


def locate(alloc: KVAllocator, config: CacheConfig, row: int, length: int, shared: int = 0) -> dict[str, I64]:
    """Rows of each family's slab that hold :func:`describe` for request ``row``, in the order of the positions.

    From the host's tables. Slots for ``swa``, ``c4``, ``c4 indexer`` and ``c128``; state rows for the states.

    Raises:
        InputError: positions that the row has no room for.
        OwnershipError: a hole: an evicted window, an empty column. It never becomes a slot of the dummy page.
    """
    alloc.rid_of(row)
    if length > alloc.allocated(row):
        raise InputError(f"row {row}: {length} positions, {alloc.allocated(row)} are allocated")
    spans = describe(config, length, shared)
    page, tables = config.page, alloc.state
    block_table, full_to_swa = torch.from_numpy(tables.block_table), torch.from_numpy(tables.full_to_swa)

    def whole(family: str, slots: torch.Tensor, unit: int) -> torch.Tensor:
        require_whole(family, np.asarray(torch.div(slots, unit, rounding_mode="floor")))
        return slots

    def full(positions: torch.Tensor) -> torch.Tensor:
        return whole("FULL", addressing.full_slots(block_table, torch.full_like(positions, row), positions, page), page)

    def swa(positions: torch.Tensor) -> torch.Tensor:
        return whole("SWA", addressing.swa_slots(full(positions), full_to_swa, page), page)

    def by_request(ratio: int, positions: torch.Tensor) -> torch.Tensor:
        return addressing.request_state_rows(torch.full_like(positions, row), positions, config.ring(ratio))

    def c4_state(positions: torch.Tensor) -> torch.Tensor:
        if config.platform.c4_state_owner == "request":
            return by_request(addressing.C4_RATIO, positions)
        return addressing.swa_state_rows(swa(positions), page, config.ring(addressing.C4_RATIO), dummy=-1)

    def c128(entries: torch.Tensor) -> torch.Tensor:
        rows = torch.full_like(entries, row)
        slots = addressing.c128_slots(torch.from_numpy(tables.c128_table), rows, entries, config.c128_page_size)
        return whole("C128", slots, config.c128_page_size)

    at = {name: torch.arange(span.start, span.stop) for name, span in spans.items()}
    c4 = addressing.c4_slots(full(at["c4"] * addressing.C4_RATIO + addressing.C4_RATIO - 1))
    states = c4_state(at["c4 state"])
    found = {
        "swa": swa(at["swa"]),
        "c4": c4,
        "c4 indexer": c4,
        "c128": c128(at["c128"]),
        "c4 state": states,
        "c4 indexer state": states,
        "c128 state": by_request(addressing.C128_RATIO, at["c128 state"]),
    }
    return {name: rows.numpy() for name, rows in found.items()}
