"""Every compressor row that the real model reads, compared with what the reader's own history puts there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from dsv4_npu.compressor import reference
from dsv4_npu.emulation import cache
from dsv4_npu.emulation.engine import Engine
from tests.emulation.harness import Bench, Setting

#: ``(layer, branch)``: a compressor of the model.
Where = tuple[int, str]


class WrongRowError(AssertionError):
    """A ring row that was read is neither the reader's, nor its prefix's, nor rightly empty."""


@dataclass
class Reads:
    """Positions read from rings, per compressor; negative ones were empty rows."""

    positions: dict[Where, set[int]] = field(default_factory=dict)

    def of(self, ratio_branch: str, layers: Sequence[int]) -> set[int]:
        """Positions that any of ``layers`` read in a branch."""
        return set().union(*(self.positions.get((layer, ratio_branch), set()) for layer in layers))


def compressors(engine: Engine) -> dict[int, Where]:
    """Which compressor a set of weights belongs to."""
    return {
        id(branch.weights): (layer.layer, name)
        for layer in engine.device.pooled._cache.layers
        for name, branch in layer.branches.items()
    }


@contextmanager
def replaced(compress: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "compress_batch", compress)
        yield


def rows_of(bench: Bench, setting: Setting, history: list[int]) -> dict[Where, torch.Tensor]:
    """State rows ``[positions, width]`` of every compressor, from one forward over a whole history on fresh memory."""
    alone = replace(setting, prefix_cache=False, chunk=len(history), kind="none", width=1, retract="recompute")
    engine = bench.engine(alone, None)
    where, rows = compressors(engine), {}

    def record(state: Any, kv: Any, gate: Any, plan: Any, weights: Any, starts: torch.Tensor) -> torch.Tensor:
        assert starts.tolist() == [0]
        score = gate + weights.ape[torch.arange(kv.shape[1]) % plan.ratio]
        rows[where[id(weights)]] = torch.cat((kv, score), dim=-1)[0]
        return reference.compress_batch(state, kv, gate, plan, weights, starts)

    engine.submit(history, 1)
    with replaced(record):
        engine.run()
    return rows


@contextmanager
def checked(engine: Engine, truth: dict[Where, torch.Tensor]) -> Iterator[Reads]:
    """Check every row that closes a window of the only running request, before its forward computes with it.

    Positions before 0 must be the dummy row and empty; any other one must hold what ``truth`` says of its position.
    """
    where, reads = compressors(engine), Reads()

    def compare(state: Any, kv: Any, gate: Any, plan: Any, weights: Any, starts: torch.Tensor) -> torch.Tensor:
        assert len(starts) == 1
        history, at = plan.prior_rows.shape[1], where[id(weights)]
        used = plan.gather[0, : plan.counts[0]].flatten()
        for index in sorted(set(used[used < history].tolist())):
            position, row = int(starts[0]) - history + index, int(plan.prior_rows[0, index])
            stored, half = state[row], state.shape[-1] // 2
            if position < 0:
                empty = bool((stored[:half] == 0).all() and torch.isneginf(stored[half:]).all())
                if row != plan.dummy or not empty:
                    raise WrongRowError(f"{at}: position {position} is read from row {row}, which is not the empty row")
            elif row == plan.dummy or not torch.allclose(stored, truth[at][position], rtol=0, atol=1e-9):
                raise WrongRowError(f"{at}: position {position} is read from row {row}: not the reader's history")
            reads.positions.setdefault(at, set()).add(position)
        return reference.compress_batch(state, kv, gate, plan, weights, starts)

    with replaced(compare):
        yield reads
