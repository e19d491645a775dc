"""Rows whose offset does not fit 32 bits (case 39): 17 GB, of which a CPU only makes the touched pages real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

#: A row whose offset, times a width of 1024, does not fit 32 bits.
FAR, WIDTH, RING = 4_200_000, 1024, 256


@dataclass(frozen=True)
class FarCase:
    """An op on rows before and behind 2**32 elements."""

    name: str
    op: str
    call: Callable[[Callable[..., Any], torch.device], str]
    slow: bool = False

    def run(self, function: Callable[..., Any], device: torch.device) -> str:
        """What is wrong, in words, or "". Raises MemoryError where the device has no room."""
        return self.call(function, device)


def far_cases() -> Iterator[FarCase]:
    """The ops whose offsets depend on a row."""
    yield FarCase("case 39: the clear of row 4,200,000", "clear_c128_draft_states_", _clear)
    yield FarCase("case 39: the clear of a bank at row 4,200,000", "clear_request_states_", _bank)
    yield FarCase("case 39: a move between rows 7 and 4,200,000", "move_kv_", _move)


def _room(device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(1, FAR + 2 * RING, WIDTH, device=device)
    except RuntimeError as error:
        raise MemoryError(f"no room for 17 GB on {device}") from error


def _said(found: list[list[float]], wanted: list[list[float]]) -> str:
    return "" if found == wanted else f"the rows hold {found}, right is {wanted}"


def _clear(function: Callable[..., Any], device: torch.device) -> str:
    state = _room(device)
    request, slot = divmod(FAR, RING)
    state[0, FAR - 1 : FAR + 2] = 1.0
    request_rows, lengths, accepted = (torch.tensor([x], device=device) for x in (request, slot - 1, 1))
    function(state, request_rows, lengths, accepted, RING, 2)
    rows = state[0, FAR - 1 : FAR + 2, WIDTH // 2 - 1 : WIDTH // 2 + 1].cpu().tolist()
    return _said(rows, [[1.0, 1.0], [0.0, float("-inf")], [1.0, 1.0]])


def _bank(function: Callable[..., Any], device: torch.device) -> str:
    state = _room(device)
    first = FAR // RING * RING
    state[0, first - 1 : first + RING + 1] = 1.0
    function(state, torch.tensor([FAR // RING], device=device), RING)
    ends = [first - 1, first, first + RING - 1, first + RING]
    return _said([state[0, row, :1].cpu().tolist() for row in ends], [[1.0], [0.0], [0.0], [1.0]])


def _move(function: Callable[..., Any], device: torch.device) -> str:
    slab = _room(device).view(1, (FAR + 2 * RING) // 64, 64, 1, WIDTH)
    rows = slab.view(1, -1, WIDTH)
    rows[0, 7], rows[0, FAR] = 1.0, 2.0
    tgt, src = (torch.tensor(x, device=device) for x in ([7, FAR], [FAR, 7]))
    function(slab, tgt, src)
    return _said([rows[0, row, -1:].cpu().tolist() for row in (7, FAR)], [[2.0], [1.0]])
