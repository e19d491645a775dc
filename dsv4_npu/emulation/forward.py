"""One forward's addresses: computed once per batch, used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4_npu import addressing
from dsv4_npu.compressor import RingPlan, plan_ring
from dsv4_npu.errors import OwnershipError
from dsv4_npu.pools import DSV4Pools


@dataclass(frozen=True)
class Tables:
    """The device mirrors of the host's ownership tables: int32, as in :mod:`dsv4_npu.addressing`."""

    block_table: torch.Tensor
    full_to_swa: torch.Tensor
    c128_table: torch.Tensor


@dataclass(frozen=True)
class Entries:
    """Compressed entries of one ratio: which the batch reads, and where it writes its new ones."""

    read_slots: torch.Tensor
    valid: torch.Tensor
    new_slots: torch.Tensor


@dataclass(frozen=True)
class BatchPlan:
    """Every address of one batch of ``B`` requests with ``q`` rows each (shorter requests are padded at the end).

    Attributes:
        rows: request row of each request; starts, lengths: host ints.
        positions: int64 ``[B, q]``.
        start_positions: int64 ``[B]``.
        mask: ``[B, 1, q, window − 1 + q]`` additive, over the SWA rows that :meth:`PoolLayer.update` returns.
        swa_new: int64 ``[B, q]``; SWA slots of the new rows, -1 for padding.
        swa_window: int64 ``[B, window − 1 + q]``; SWA slots of positions ``start − window + 1 ..``, -1 where unread.
        rings: plan per ratio.
        entries: compressed entries per ratio.
    """

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    positions: torch.Tensor
    start_positions: torch.Tensor
    mask: torch.Tensor
    swa_new: torch.Tensor
    swa_window: torch.Tensor
    rings: dict[int, RingPlan]
    entries: dict[int, Entries]


def plan_batch(
    pools: DSV4Pools,
    tables: Tables,
    rows: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    *,
    check_resident: bool = True,
) -> BatchPlan:
    """All addresses of the batch ``[start, start + length)`` per request.

    ``check_resident`` verifies on the host that every row that will be read is mapped; it reads device tables, so it is
    for CPU tables only.

    Raises:
        OwnershipError: a row that the batch must read or write has no slot.
    """
    config = pools.config
    page, window, device = config.page, config.model.sliding_window, tables.block_table.device
    width = max(lengths)
    row = torch.tensor(rows, dtype=torch.int64, device=device)[:, None]
    start = torch.tensor(starts, dtype=torch.int64, device=device)
    end = start + torch.tensor(lengths, dtype=torch.int64, device=device)
    positions = start[:, None] + torch.arange(width, device=device)

    def swa_at(at: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        full = addressing.full_slots(tables.block_table, row, torch.where(valid, at, 0), page)
        return torch.where(valid, addressing.swa_slots(full, tables.full_to_swa, page), -1)

    live = positions < end[:, None]
    swa_new = swa_at(positions, live)
    seen = start[:, None] - (window - 1) + torch.arange(window - 1 + width, device=device)
    readable = (seen >= 0) & (seen < end[:, None])
    swa_window = swa_at(seen, readable)
    near = (seen[:, None, :] <= positions[:, :, None]) & (seen[:, None, :] > positions[:, :, None] - window)
    mask = torch.zeros(near.shape, dtype=torch.float64, device=device)
    mask = mask.masked_fill(~(near & readable[:, None, :]), float("-inf"))[:, None]

    def c4_state(states_ring: int, dummy: int, at: torch.Tensor) -> torch.Tensor:
        swa = swa_at(at, torch.ones_like(at, dtype=torch.bool)) if pools.c4_state_by_page else at
        return pools.c4_state_rows(row, at, swa, states_ring, dummy)

    rings, entries = {}, {}
    if pools.c4_index:
        state = pools.c4_state
        rings[4] = plan_ring(
            4, state.ring, starts, lengths, width, lambda at: c4_state(state.ring, state.dummy, at), state.dummy, device
        )
        entries[4] = _entries(4, rings[4], starts, lengths, device, lambda e: _c4_slots(tables, row, e, page))
    if pools.c128_index:
        state = pools.c128_state
        rings[128] = plan_ring(
            128,
            state.ring,
            starts,
            lengths,
            width,
            lambda at: addressing.request_state_rows(row, at, state.ring),
            state.dummy,
            device,
        )
        entries[128] = _entries(
            128,
            rings[128],
            starts,
            lengths,
            device,
            lambda e: addressing.c128_slots(tables.c128_table, row, e, config.c128_page_size),
        )
    if check_resident:
        _check_resident("SWA row", swa_new, live)
        _check_resident("SWA row of the window", swa_window, readable)
        for ratio, entry in entries.items():
            _check_resident(f"C{ratio} entry", entry.read_slots, entry.valid)
    return BatchPlan(
        tuple(rows), tuple(starts), tuple(lengths), positions, start, mask, swa_new, swa_window, rings, entries
    )


def _c4_slots(tables: Tables, row: torch.Tensor, entries: torch.Tensor, page: int) -> torch.Tensor:
    closing = entries * addressing.C4_RATIO + addressing.C4_RATIO - 1
    full = addressing.full_slots(tables.block_table, row, closing, page)
    return torch.where(full >= page, addressing.c4_slots(full), -1)


def _entries(ratio: int, ring: RingPlan, starts: Sequence[int], lengths: Sequence[int], device: torch.device, slots):  # type: ignore[no-untyped-def]
    held = [(s + n) // ratio for s, n in zip(starts, lengths, strict=True)]
    index = torch.arange(max(held), device=device)
    valid = index < torch.tensor(held, device=device)[:, None]
    read = torch.where(valid, slots(torch.where(valid, index, 0)), -1)
    step = torch.arange(ring.windows, device=device)
    made = step < torch.tensor(ring.counts, device=device)[:, None]
    new = torch.tensor(ring.first_entry, device=device)[:, None] + step
    return Entries(read, valid, torch.where(made, slots(torch.where(made, new, 0)), -1))


def _check_resident(what: str, slots: torch.Tensor, needed: torch.Tensor) -> None:
    missing = (slots < 0) & needed
    if bool(missing.any()):
        b, column = missing.nonzero()[0].tolist()
        raise OwnershipError(f"{what}: request {b} of the batch has no slot at index {column}: its page is not mapped")
