"""The plan of a batch whose lengths only the device knows: the same rows as :func:`plan_ring`, without the host."""

from __future__ import annotations

import torch

from dsv4_npu import addressing
from dsv4_npu.compressor.plan import RingPlan, StateRows


def plan_ring_on_device(
    ratio: int,
    ring: int,
    starts: torch.Tensor,
    ends: torch.Tensor,
    width: int,
    windows: int,
    state_rows: StateRows,
    dummy: int,
) -> RingPlan:
    """Plan one batch ``[start, end)`` per request; nothing is read from the device.

    Args:
        ratio, ring, width, state_rows, dummy: as for :func:`~dsv4_npu.compressor.plan.plan_ring`.
        starts, ends: int64 ``[B]`` on the device.
        windows: E, at least the windows that any request closes; the host knows a bound
            (:func:`most_windows`), and surplus ones are computed from the first row and mean nothing.

    Returns:
        A plan whose ``counts`` and ``first_entry`` are empty: only the device knows them.
    """
    overlap, device = addressing.OVERLAP[ratio], starts.device
    history = overlap * ratio - 1
    start, end = starts[:, None], ends[:, None]
    first = start // ratio
    counts = end // ratio - first

    prior = start - history + torch.arange(history, device=device)
    needed = (prior >= 0) & (prior >= (first - (overlap - 1)) * ratio) & (counts > 0)

    step = torch.arange(windows, device=device)
    entry = first + step
    begin = (entry - (overlap - 1)) * ratio - (start - history)
    gather = begin[:, :, None] + torch.arange(overlap * ratio, device=device)
    gather = torch.where((step < counts)[:, :, None], gather, 0)

    pad = addressing.write_pad(ring, ratio)
    keep_from = torch.minimum(end // ratio * ratio - (overlap - 1) * ratio, end - pad)
    new = start + torch.arange(width, device=device)
    saved = (new >= keep_from) & (new < end)

    def to_rows(positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return torch.where(valid, state_rows(torch.where(valid, positions, 0)), dummy)

    return RingPlan(
        ratio=ratio,
        width=width,
        windows=windows,
        counts=(),
        first_entry=(),
        prior_rows=to_rows(prior, needed),
        gather=gather,
        entry_positions=entry * ratio,
        save_rows=to_rows(new, saved),
        dummy=dummy,
    )


def most_windows(ratio: int, lowest: int, highest: int, length: int) -> int:
    """The most windows that ``length`` rows from a start in ``[lowest, highest]`` close."""
    return min((highest + length) // ratio - lowest // ratio, -(-length // ratio))
