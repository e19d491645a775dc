"""Which ring rows a batch reads, which windows it closes, which of its own rows it saves.

A plan depends on lengths that the host knows and on state rows that ``addressing`` computes on the device, so making
one never reads a device tensor. One plan serves all layers of one ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dsv4_npu import addressing
from dsv4_npu.errors import InputError

#: ``(positions [B, n] int64 on the device) -> state rows [B, n]``; only rows of positions >= 0 are used.
StateRows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class RingPlan:
    """Index tensors of one batch for one ratio. ``H = overlap · ratio − 1`` rows of history, ``q`` new rows a request.

    Attributes:
        ratio: 4 or 128.
        width: q, the padded number of new rows per request.
        windows: E, the most windows that one request closes.
        counts: windows closed per request (host; empty in a plan made on the device).
        first_entry: index of the first entry that each request closes (likewise).
        prior_rows: int64 ``[B, H]``; state rows of positions ``start − H .. start − 1``, the dummy row where a position
            is negative or not part of a window that this batch closes.
        gather: int64 ``[B, E, overlap · ratio]``; rows of ``[prior | new]`` that make up each window.
        entry_positions: int64 ``[B, E]``; position of each window's first token (its rotary position).
        save_rows: int64 ``[B, q]``; state row that each new row is saved to, the dummy row where it is not saved.
        dummy: the dummy state row.
    """

    ratio: int
    width: int
    windows: int
    counts: tuple[int, ...]
    first_entry: tuple[int, ...]
    prior_rows: torch.Tensor
    gather: torch.Tensor
    entry_positions: torch.Tensor
    save_rows: torch.Tensor
    dummy: int


def plan_ring(
    ratio: int,
    ring: int,
    starts: Sequence[int],
    lengths: Sequence[int] | None,
    width: int,
    state_rows: StateRows,
    dummy: int,
    device: torch.device | str = "cpu",
) -> RingPlan:
    """Plan one batch ``[start, start + length)`` per request.

    Args:
        ratio: 4 or 128.
        ring: rows of a bank.
        starts, lengths: host lengths per request; a length may be shorter than ``width`` (the rest is padding). None
            means that every request fills the width.
        width: q, rows per request in the tensors that will be compressed.
        state_rows: maps positions ``[B, n]`` to state rows; rows of negative positions are replaced by ``dummy``.
        dummy: the dummy state row, which holds the empty row.

    Raises:
        InputError: lengths outside ``0..width`` or negative starts.
    """
    lengths = [width] * len(starts) if lengths is None else lengths
    if len(starts) != len(lengths):
        raise InputError(f"starts has {len(starts)} entries and lengths {len(lengths)}; the same number is needed")
    for b, (first_new, length) in enumerate(zip(starts, lengths, strict=True)):
        if first_new < 0 or not 0 <= length <= width:
            raise InputError(
                f"request {b}: start = {first_new}, length = {length}; start >= 0 and 0 <= length <= {width}"
            )
    overlap = addressing.OVERLAP[ratio]
    history = overlap * ratio - 1
    start: npt.NDArray[np.int64] = np.asarray(starts, dtype=np.int64)
    end: npt.NDArray[np.int64] = start + np.asarray(lengths, dtype=np.int64)
    first: npt.NDArray[np.int64] = start // ratio
    counts: npt.NDArray[np.int64] = end // ratio - first
    windows = int(counts.max(initial=0))

    prior = start[:, None] - history + np.arange(history)
    oldest = (first - (overlap - 1)) * ratio
    needed = (prior >= 0) & (prior >= oldest[:, None]) & (counts[:, None] > 0)

    entry = first[:, None] + np.arange(windows)
    begin = (entry - (overlap - 1)) * ratio - (start[:, None] - history)
    gather = begin[:, :, None] + np.arange(overlap * ratio)
    gather[np.arange(windows)[None, :] >= counts[:, None]] = 0

    pad = addressing.write_pad(ring, ratio)
    keep_from = np.asarray(
        [addressing.save_start(s, e, ratio, pad) for s, e in zip(start.tolist(), end.tolist(), strict=True)],
        dtype=np.int64,
    )
    new = start[:, None] + np.arange(width)
    saved = (new >= keep_from[:, None]) & (new < end[:, None])

    def to_rows(positions: npt.NDArray[np.int64], valid: npt.NDArray[np.bool_]) -> torch.Tensor:
        rows = state_rows(torch.from_numpy(np.where(valid, positions, 0)).to(device))
        mask = torch.from_numpy(valid).to(device)
        return torch.where(mask, rows, torch.full_like(rows, dummy))

    return RingPlan(
        ratio=ratio,
        width=width,
        windows=windows,
        counts=tuple(int(c) for c in counts),
        first_entry=tuple(int(f) for f in first),
        prior_rows=to_rows(prior, needed),
        gather=torch.from_numpy(gather).to(device),
        entry_positions=torch.from_numpy(entry * ratio).to(device),
        save_rows=to_rows(new, saved),
        dummy=dummy,
    )
