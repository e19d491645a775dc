"""Device mirrors of the host tables: one asynchronous copy and one scatter per flush, and never a read back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4_npu.alloc.epochs import Epochs
from dsv4_npu.alloc.ledger import Ledger
from dsv4_npu.alloc.state import N_DIRTY, LedgerState

#: Staging buffers that may wait for epochs before the host waits for the device.
MAX_BUFFERS = 64
MIN_ENTRIES = 1024


@dataclass
class _Staging:
    """One host buffer (int64, indices then values) and the first epoch launched after its copy was enqueued."""

    buffer: torch.Tensor
    epoch: int


class Mirrors:
    """``block_table`` int32 ``[rows + 1, columns]``, ``full_to_swa`` int32 ``[FULL pages + 1]`` and ``c128_table``
    int32 ``[rows + 1, sidecar columns]`` on ``device``; 0 is an empty entry.

    All three are views of one tensor, so a flush is one copy and one scatter whatever changed. A staging buffer is
    written again only when the first epoch launched after its copy is done: the copy has run by then.
    """

    def __init__(self, ledger: Ledger, state: LedgerState, epochs: Epochs, device: torch.device) -> None:
        self._ledger, self._state, self._epochs = ledger, state, epochs
        self.device = device
        self.tables = torch.zeros(len(state.tables), dtype=torch.int32, device=device)
        self.block_table = self.tables[: state.swa_base].view(state.block_table.shape)
        self.full_to_swa = self.tables[state.swa_base : state.c128_base]
        self.c128_table = self.tables[state.c128_base :].view(state.c128_table.shape)
        self.copies = 0
        self._rotation: list[_Staging] = []

    def flush(self) -> int:
        """Bring the mirrors up to date; returns the number of entries sent, 0 (and no copy) when nothing changed."""
        count = int(self._state.counters[N_DIRTY])
        if not count:
            return 0
        staging = self._take_buffer(2 * count)
        host = staging.buffer[: 2 * count]
        numbers = host.numpy()
        self._ledger.collect(numbers[:count], numbers[count:])
        sent = host.to(self.device, non_blocking=True)
        self.tables.index_put_((sent[:count],), sent[count:].to(torch.int32))
        self.copies += 1
        return count

    def _take_buffer(self, entries: int) -> _Staging:
        upcoming, horizon = self._epochs.launched + 1, self._epochs.horizon
        rotation = self._rotation
        staging = next((one for one in rotation if one.epoch < horizon), None)
        if staging is None and len(rotation) >= MAX_BUFFERS:
            staging = rotation[0]
            if staging.buffer.is_pinned():
                torch.accelerator.synchronize(self.device)
        if staging is None:
            staging = _Staging(_host_buffer(entries, self.device), upcoming)
        else:
            rotation.remove(staging)
            if staging.buffer.numel() < entries:
                staging.buffer = _host_buffer(entries, self.device)
        staging.epoch = upcoming
        rotation.append(staging)
        return staging


def _host_buffer(entries: int, device: torch.device) -> torch.Tensor:
    """Pinned where the device has pinned memory; a copy from other memory has read it when ``to`` returns."""
    size = max(MIN_ENTRIES, 1 << (entries - 1).bit_length())
    if device.type not in ("cpu", "meta"):
        try:
            return torch.empty(size, dtype=torch.int64, pin_memory=True)
        except (RuntimeError, NotImplementedError):
            pass
    return torch.empty(size, dtype=torch.int64)
