"""Wrong memory, on purpose: each of these must change what the engine says, or be noted by its audit.

Tables are spoilt in decodes only: rows that were written and read through the same wrong page would be right again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dsv4_npu.emulation.forward import Tables

if TYPE_CHECKING:
    from dsv4_npu.sglang.engine_forward import EngineForward, Piece, Tamper


def wrong_c128_page() -> Tamper:
    """The first sidecar column of every request names the page beside its own."""

    def tamper(_forward: EngineForward, tables: Tables, _rows: Sequence[int], piece: Piece) -> Tables:
        if max(piece.lengths) > 1:
            return tables
        sidecar = tables.c128_table.clone()
        sidecar[:, 0] = torch.where(sidecar[:, 0] > 1, sidecar[:, 0] - 1, sidecar[:, 0] + 1)
        return replace(tables, c128_table=sidecar)

    return tamper


def shifted_swa() -> Tamper:
    """Every FULL page reads the SWA page of its neighbour."""

    def tamper(_forward: EngineForward, tables: Tables, _rows: Sequence[int], piece: Piece) -> Tables:
        if max(piece.lengths) > 1:
            return tables
        return replace(tables, full_to_swa=tables.full_to_swa.roll(1))

    return tamper


def doubled_full_page() -> Tamper:
    """The second FULL page of every request is read twice, the first one never.

    Exchanging them would change nothing: entries carry their positions, so attention does not see their order.
    """

    def tamper(_forward: EngineForward, tables: Tables, _rows: Sequence[int], piece: Piece) -> Tables:
        if max(piece.lengths) > 1:
            return tables
        pages = tables.block_table.clone()
        pages[:, 0] = pages[:, 1]
        return replace(tables, block_table=pages)

    return tamper


def _empty(data: torch.Tensor, half: int) -> None:
    data[..., :half] = 0.0
    data[..., half:] = float("-inf")


def no_overlap_rows() -> Tamper:
    """A request that starts behind a cached prefix finds the C4 states of the prefix's last page empty."""
    seen: set[tuple[int, int]] = set()

    def tamper(forward: EngineForward, tables: Tables, rows: Sequence[int], piece: Piece) -> Tables:
        page = forward.tables.page
        for row, start in zip(rows, piece.starts, strict=True):
            if start and start % forward.cut == 0 and (row, start) not in seen:
                seen.add((row, start))
                full = tables.block_table[row, (start - 1) // page]
                bank = int(tables.full_to_swa[full])
                for state in (forward.pools.c4_state, forward.pools.index_state):
                    _empty(state.data[:, bank * state.ring : (bank + 1) * state.ring], state.half)
        return tables

    return tamper


def no_c128_state() -> Tamper:
    """The C128 states of every request are empty before each forward."""

    def tamper(forward: EngineForward, tables: Tables, rows: Sequence[int], _piece: Piece) -> Tables:
        state = forward.pools.c128_state
        for row in rows:
            _empty(state.data[:, row * state.ring : (row + 1) * state.ring], state.half)
        return tables

    return tamper


TAMPERS: dict[str, Callable[[], Tamper]] = {
    make.__name__: make for make in (wrong_c128_page, shifted_swa, doubled_full_page, no_overlap_rows, no_c128_state)
}
