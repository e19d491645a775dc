"""Compressor states on the device: what is cleared when, and C4 rows that leave and enter a request's bank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4_npu import addressing, ops
from dsv4_npu.alloc import Cleanup, KVAllocator
from dsv4_npu.alloc.request import Request
from dsv4_npu.movement import clear_freed_banks
from dsv4_npu.pools import DSV4Pools, StateSlab


@dataclass(frozen=True)
class CapturedRows:
    """C4 rows of the positions before ``end``: ``rows[i]`` is ``[layers, count, width]`` of the i-th C4 state slab."""

    end: int
    rows: tuple[torch.Tensor, ...]


class StateKeeper:
    """Keeps the compressor states of ``pools`` in step with the ownership in ``alloc``."""

    def __init__(self, pools: DSV4Pools, alloc: KVAllocator) -> None:
        self.pools, self.alloc = pools, alloc
        self._c4 = [state for state in (pools.c4_state, pools.index_state) if state.layers]
        self._c128 = [pools.c128_state] if pools.c128_state.layers else []

    def clear_released(self, cleanup: Cleanup) -> None:
        """Empty the banks that a closed row owned, before the row can be given out again."""
        row = torch.tensor([cleanup.row], device=self.pools.device)
        for state in self._c128 + (self._c4 if cleanup.c4_request_bank else []):
            ops.clear_request_states_(state.data, row, state.ring)

    def clear_rejected(self, rows: torch.Tensor, seq_lens: torch.Tensor, accept_lens: torch.Tensor, width: int) -> None:
        """Empty the C128 rows of rejected drafts in every layer, with one launch; tensors ``[bs]`` on the device."""
        for state in self._c128:
            ops.clear_c128_draft_states_(state.data, rows, seq_lens, accept_lens, state.ring, width)

    def before_forward(self, requests: Sequence[Request]) -> None:
        """Empty C4 banks of SWA pages that changed hands, and restore captured C4 rows of freshly admitted requests."""
        clear_freed_banks(self.pools, self.alloc)
        for request in requests:
            if isinstance(request.restore, CapturedRows):
                self._restore(request.row, request.restore)
                request.restore = None

    def _bank_rows(self, state: StateSlab, row: int, end: int) -> torch.Tensor:
        positions = torch.arange(max(0, end - addressing.C4_RATIO), end, device=self.pools.device)
        return addressing.request_state_rows(torch.full_like(positions, row), positions, state.ring)

    def capture(self, row: int, end: int) -> CapturedRows:
        """Copy the overlap rows ``[end - 4, end)`` of a request's bank: the next C4 window reads them."""
        return CapturedRows(end, tuple(s.data[:, self._bank_rows(s, row, end)].clone() for s in self._c4))

    def _restore(self, row: int, captured: CapturedRows) -> None:
        for state, rows in zip(self._c4, captured.rows, strict=True):
            state.data[:, self._bank_rows(state, row, captured.end)] = rows
