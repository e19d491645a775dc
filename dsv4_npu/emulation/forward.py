"""One forward's addresses: computed once per batch, used by every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dsv4_npu import addressing
from dsv4_npu.compressor import RingPlan, most_windows, plan_ring, plan_ring_on_device
from dsv4_npu.compressor.plan import StateRows
from dsv4_npu.errors import OwnershipError
from dsv4_npu.pools import DSV4Pools

#: ``(ratio, ring, state rows, dummy) -> plan`` of the batch at hand.
RingPlanner = Callable[[int, int, StateRows, int], RingPlan]


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
        positions: int64 ``[B, q]``.
        start_positions: int64 ``[B]``.
        mask: ``[B, 1, q, window − 1 + q]`` additive, over the SWA rows that :meth:`PoolLayer.update` returns.
        swa_new: int64 ``[B, q]``; SWA slots of the new rows, -1 for padding.
        swa_window: int64 ``[B, window − 1 + q]``; SWA slots of positions ``start − window + 1 ..``, -1 where unread.
        rings: plan per ratio.
        entries: compressed entries per ratio.
    """

    positions: torch.Tensor
    start_positions: torch.Tensor
    mask: torch.Tensor
    swa_new: torch.Tensor
    swa_window: torch.Tensor
    rings: dict[int, RingPlan]
    entries: dict[int, Entries]


@dataclass(frozen=True)
class Bounds:
    """What the host knows of a batch whose starts are on the device: it decides shapes and nothing else.

    ``lows``, ``highs``: bounds of each request's start, both included. ``lengths``: rows per request.
    """

    lows: Sequence[int]
    highs: Sequence[int]
    lengths: Sequence[int]

    @property
    def width(self) -> int:
        """q, the padded number of rows per request."""
        return max(self.lengths)

    @property
    def longest(self) -> int:
        """The most positions that a request has after the batch."""
        return max(high + length for high, length in zip(self.highs, self.lengths, strict=True))

    def row(self, offset: int) -> Bounds:
        """The bounds of the single row ``start + offset`` of each request."""
        return Bounds([low + offset for low in self.lows], [high + offset for high in self.highs], [1] * len(self.lows))

    def windows(self, ratio: int) -> int:
        """The most windows of ``ratio`` that a request closes."""
        return max(most_windows(ratio, *one) for one in zip(self.lows, self.highs, self.lengths, strict=True))


def plan_batch(
    pools: DSV4Pools, tables: Tables, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
) -> BatchPlan:
    """All addresses of the batch ``[start, start + length)`` per request, from lengths that the host knows.

    It looks at the tables to see that every row which will be read is mapped, so it is for tables on a CPU only.

    Raises:
        OwnershipError: a row that the batch must read or write has no slot.
    """
    device = tables.block_table.device
    row, start, length = (torch.tensor(one, dtype=torch.int64, device=device) for one in (rows, starts, lengths))
    width = max(lengths)

    def ring(ratio: int, size: int, state_rows: StateRows, dummy: int) -> RingPlan:
        return plan_ring(ratio, size, starts, lengths, width, state_rows, dummy, device)

    longest = max(s + n for s, n in zip(starts, lengths, strict=True))
    plan = _plan(pools, tables, row, start, start + length, width, longest, ring)
    check_resident(plan, start + length)
    return plan


def plan_batch_on_device(
    pools: DSV4Pools,
    tables: Tables,
    rows: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor | int,
    bounds: Bounds,
) -> BatchPlan:
    """All addresses of the batch ``[start, start + length)`` per request, from int64 ``[B]`` tensors on the device.

    The host reads nothing: it gives ``bounds``, from which the shapes follow.
    """
    ends = starts + lengths

    def ring(ratio: int, size: int, state_rows: StateRows, dummy: int) -> RingPlan:
        windows = bounds.windows(ratio)
        return plan_ring_on_device(ratio, size, starts, ends, bounds.width, windows, state_rows, dummy)

    return _plan(pools, tables, rows, starts, ends, bounds.width, bounds.longest, ring)


def check_resident(plan: BatchPlan, ends: torch.Tensor) -> None:
    """Raise OwnershipError where a row that ``plan`` reads or writes has no slot; it looks at the values.

    ``ends``: int64 ``[B]``, positions of each request after the batch.
    """
    window = plan.swa_window.shape[1] - plan.swa_new.shape[1]
    seen = plan.start_positions[:, None] - window + torch.arange(plan.swa_window.shape[1])
    _check("SWA row", plan.swa_new, plan.positions < ends[:, None])
    _check("SWA row of the window", plan.swa_window, (seen >= 0) & (seen < ends[:, None]))
    for ratio, entry in plan.entries.items():
        _check(f"C{ratio} entry", entry.read_slots, entry.valid)


def _check(what: str, slots: torch.Tensor, needed: torch.Tensor) -> None:
    missing = (slots < 0) & needed
    if bool(missing.any()):
        b, column = missing.nonzero()[0].tolist()
        raise OwnershipError(f"{what}: request {b} of the batch has no slot at index {column}: its page is not mapped")


def _plan(
    pools: DSV4Pools,
    tables: Tables,
    rows: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    width: int,
    longest: int,
    plan_ring_of: RingPlanner,
) -> BatchPlan:
    config = pools.config
    page, window, device = config.page, config.model.sliding_window, rows.device
    row = rows[:, None]
    positions = start[:, None] + torch.arange(width, device=device)

    def swa_at(at: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        full = addressing.full_slots(tables.block_table, row, torch.where(valid, at, 0), page)
        return torch.where(valid, addressing.swa_slots(full, tables.full_to_swa, page), -1)

    swa_new = swa_at(positions, positions < end[:, None])
    seen = start[:, None] - (window - 1) + torch.arange(window - 1 + width, device=device)
    readable = (seen >= 0) & (seen < end[:, None])
    swa_window = swa_at(seen, readable)
    near = (seen[:, None, :] <= positions[:, :, None]) & (seen[:, None, :] > positions[:, :, None] - window)
    mask = torch.zeros(near.shape, dtype=torch.float64, device=device)
    mask = mask.masked_fill(~(near & readable[:, None, :]), float("-inf"))[:, None]

    rings, entries = {}, {}
    if pools.c4_index:
        c4 = pools.c4_state

        def c4_rows(at: torch.Tensor) -> torch.Tensor:
            swa = swa_at(at, torch.ones_like(at, dtype=torch.bool)) if pools.c4_state_by_page else at
            return pools.c4_state_rows(row, at, swa, c4.ring, c4.dummy)

        rings[4] = plan_ring_of(4, c4.ring, c4_rows, c4.dummy)
        entries[4] = _entries(rings[4], start, end, longest, lambda e: _c4_slots(tables, row, e, page))
    if pools.c128_index:
        c128 = pools.c128_state
        rings[128] = plan_ring_of(
            128, c128.ring, lambda at: addressing.request_state_rows(row, at, c128.ring), c128.dummy
        )
        entries[128] = _entries(
            rings[128],
            start,
            end,
            longest,
            lambda e: addressing.c128_slots(tables.c128_table, row, e, config.c128_page_size),
        )
    return BatchPlan(positions, start, mask, swa_new, swa_window, rings, entries)


def _c4_slots(tables: Tables, row: torch.Tensor, entries: torch.Tensor, page: int) -> torch.Tensor:
    closing = entries * addressing.C4_RATIO + addressing.C4_RATIO - 1
    full = addressing.full_slots(tables.block_table, row, closing, page)
    return torch.where(full >= page, addressing.c4_slots(full), -1)


def _entries(
    ring: RingPlan,
    start: torch.Tensor,
    end: torch.Tensor,
    longest: int,
    slots: Callable[[torch.Tensor], torch.Tensor],
) -> Entries:
    ratio, device = ring.ratio, start.device
    held, first = (end // ratio)[:, None], (start // ratio)[:, None]
    index = torch.arange(longest // ratio, device=device)
    valid = index < held
    new = first + torch.arange(ring.windows, device=device)
    made = new < held
    return Entries(
        torch.where(valid, slots(torch.where(valid, index, 0)), -1),
        valid,
        torch.where(made, slots(torch.where(made, new, 0)), -1),
    )
