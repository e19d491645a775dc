"""From host page ids to device slots: one batch of requests that grow, without a look at the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dsv4_npu import ops
from dsv4_npu.sglang.late_reads import to_device

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class Growth(NamedTuple):
    """Requests that grow from ``old`` to ``new`` units; ``new_pages`` of them each, on pages of ``page`` units."""

    old: I64
    new: I64
    page: int
    new_pages: I64

    @classmethod
    def of(cls, old: I64, new: I64, page: int) -> Growth:
        """Lengths that do not grow need nothing."""
        new = np.maximum(old, new)
        return cls(old, new, page, -(-new // page) - -(-old // page))

    @property
    def total(self) -> int:
        """New pages of all requests."""
        return int(self.new_pages.sum())


def page_tables(growth: Growth, pages: I32, last: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Per request the pages that its new units lie on: the partly filled last page, if there is one, then new ones.

    ``pages``: host ids of the new pages, requests joined. ``last``: device ids of the last pages ``[bs]``, read only
    where a request has a partly filled page; None when none has. Returns int32 ``[bs, columns]`` on the device.
    """
    tail = growth.old % growth.page > 0
    counts = growth.new_pages
    batch = len(counts)
    table = np.zeros((batch, max(1, int((counts + tail).max(initial=0)))), np.int32)
    starts = np.cumsum(counts) - counts
    at = np.repeat(np.arange(batch), counts)
    table[at, np.arange(len(pages)) + np.repeat(tail - starts, counts)] = pages
    out = to_device(table, device)
    if last is None or not tail.any():
        return out
    if tail.all():
        out[:, 0] = last
        return out
    rows = to_device(np.flatnonzero(tail), device)
    out[:, 0].index_copy_(0, rows, last[rows].to(torch.int32))
    return out


def slots_of(growth: Growth, tables: list[torch.Tensor], unit: int = 1) -> list[torch.Tensor]:
    """Slots (int64) of the new units of each request, joined, by each of ``tables``.

    With ``unit`` the slots of every unit-th position, those that close a window of ``unit`` positions.
    """
    page = growth.page // unit
    old, new = growth.old // unit, growth.new // unit
    numbers = np.stack((np.arange(len(old)), growth.old % growth.page // unit, new - old))
    rows, starts, lengths = to_device(numbers, tables[0].device).unbind()
    total = int(numbers[2].sum())
    if not total:
        return [torch.empty(0, dtype=torch.int64, device=table.device) for table in tables]
    return [ops.extend_slots(table, rows, starts, lengths, page, total, table.shape[1])[0] for table in tables]
