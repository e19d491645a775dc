"""A point at which an op's Triton launcher is compared with its oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One call of a launcher.

    ``actual`` calls ``<op>/triton.py``'s launcher on CPU tensors and returns everything that it may have changed or
    made; ``expected`` computes the same with ``ref.py``. ``production`` marks shapes as they are served: their compiled
    kernels are rows of the table. ``execute=False`` compiles such a shape only (where it is too large for a CPU loop).
    ``agree`` replaces bit-for-bit equality where the mathematics allows a neighbour; it returns what disagrees, in
    words, or None.
    """

    label: str
    actual: Callable[[], Outputs]
    expected: Callable[[], Outputs]
    production: bool = False
    execute: bool = True
    programs: int = 40
    agree: Callable[[Outputs, Outputs], str | None] | None = None


@contextmanager
def untouched() -> Iterator[None]:
    """Within it torch.empty leaves memory alone, so that a huge tensor costs only the pages that are used."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before


def equal(actual: Outputs, expected: Outputs) -> str | None:
    """Bit-for-bit equality (NaN equals NaN): what disagrees, in words."""
    if actual.keys() != expected.keys():
        return f"outputs {sorted(actual)} instead of {sorted(expected)}"
    for name, want in expected.items():
        got = actual[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"{name}: {got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}"
        same = (got == want) | ((got != got) & (want != want))
        if not bool(same.all()):
            place = tuple((~same).nonzero()[0].tolist())
            return f"{name}{list(place)}: {got[place].item()} instead of {want[place].item()}"
    return None
