"""From host page ids to slots: one batch of requests that grow, without a look at the device.

New pages are known on the host; where a request's last page lies is known to the device alone. On a device the slots
are computed there, by the kernel that turns page tables into slots. On a CPU the device's memory is the host's, and
slots are joined from runs of consecutive ones.
"""

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
    total: int

    @classmethod
    def of(cls, old: I64, new: I64, page: int) -> Growth:
        """Lengths that do not grow need nothing."""
        new = np.maximum(old, new)
        new_pages = -(-new // page) - -(-old // page)
        return cls(old, new, page, new_pages, int(new_pages.sum()))


class Runs(NamedTuple):
    """Runs of consecutive slots: ``lengths[i]`` of them from ``starts[i]`` on."""

    starts: I64
    lengths: I64

    def slots(self) -> torch.Tensor:
        """All slots, joined (int64)."""
        ends = np.cumsum(self.lengths)
        total = int(ends[-1]) if len(ends) else 0
        found = np.repeat(self.starts - (ends - self.lengths), self.lengths)
        found += _count(total)
        return torch.from_numpy(found)

    def every(self, unit: int) -> Runs:
        """The slots that close a window of ``unit`` positions, as slots of pages that are ``unit`` times smaller."""
        first = self.starts // unit
        return Runs(first, (self.starts + self.lengths) // unit - first)


def runs_of(growth: Growth, pages: I32, before: I64) -> Runs:
    """The new units of each request: the rest of its last page, from slot ``before + 1`` on, then new pages.

    ``pages``: ids of the new pages, requests joined. ``before``: slot of the last old unit, read only where the last
    page is partly filled.
    """
    page, new_pages = growth.page, growth.new_pages
    filled = growth.old % page
    if growth.total == 0:
        return Runs(before + 1, growth.new - growth.old)
    if not filled.any():
        lengths = np.full(growth.total, page)
        grown = new_pages > 0
        lengths[(np.cumsum(new_pages) - 1)[grown]] -= -growth.new[grown] % page
        return Runs(pages * np.int64(page), lengths)
    first = np.where(filled > 0, np.minimum(page - filled, growth.new - growth.old), 0)
    counts = 1 + new_pages
    heads = np.cumsum(counts) - counts
    starts = np.empty(len(counts) + growth.total, np.int64)
    lengths = np.full(len(starts), page)
    fresh = np.ones(len(starts), bool)
    fresh[heads] = False
    starts[heads] = before + 1
    starts[fresh] = pages.astype(np.int64) * page
    lengths[heads] = first
    grown = new_pages > 0
    over = -growth.new[grown] % page
    lengths[(heads + new_pages)[grown]] -= over
    return Runs(starts, lengths)


def page_tables(growth: Growth, pages: I32, last: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Per request the pages that its new units lie on: the partly filled last page, if there is one, then new ones.

    ``last``: ids of the last pages ``[bs]`` on the device, read only where a request has a partly filled page; None
    when none has. Returns int32 ``[bs, columns]`` on the device.
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


def slots_of(growth: Growth, tables: torch.Tensor, unit: int = 1) -> torch.Tensor:
    """Slots (int64) of the new units of each request, joined, by :func:`page_tables`.

    With ``unit`` the slots of every unit-th position, those that close a window of ``unit`` positions.
    """
    page = growth.page // unit
    old, new = growth.old // unit, growth.new // unit
    numbers = np.stack((np.arange(len(old)), growth.old % growth.page // unit, new - old))
    total = int(numbers[2].sum())
    if not total:
        return torch.empty(0, dtype=torch.int64, device=tables.device)
    rows, starts, lengths = to_device(numbers, tables.device).unbind()
    return ops.extend_slots(tables, rows, starts, lengths, page, total, tables.shape[1])[0]


_counted = np.arange(1 << 14)


def _count(total: int) -> I64:
    """``arange(total)``; kept, because each batch asks for it."""
    global _counted
    if total > len(_counted):
        _counted = np.arange(1 << (total - 1).bit_length())
    return _counted[:total]
