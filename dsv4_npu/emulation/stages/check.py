"""Every proposal of a run compared with the linear oracle's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4_npu.emulation.requests import RequestRun
from dsv4_npu.emulation.stages.drafter import Proposal
from dsv4_npu.emulation.stages.linear import Linear

#: Largest difference between two float64 computations of a draft's logits that is put down to rounding.
DRAFT_TOLERANCE = 1e-9


@dataclass(frozen=True)
class DraftComparison:
    """What a run's proposals are against a drafter that rebuilds its memory at every round.

    Attributes:
        proposals: compared, one per request and round.
        wrong: those with another token, or with a logit that differs by more than rounding.
        max_logit_error: the largest difference of a logit.
    """

    proposals: int
    wrong: int
    max_logit_error: float

    def __str__(self) -> str:
        verdict = "all equal" if not self.wrong else f"{self.wrong} of them DIFFER from"
        return (
            f"{self.proposals} proposals from the stages' own rows: {verdict} those of a drafter that rebuilds its "
            f"rows at every round (largest logit difference {self.max_logit_error:.1e})"
        )


class DraftWatch:
    """Collects proposals while an engine runs; :meth:`compare` looks at them when the histories are known.

    ``running``: the engine's running requests, as it changes them.
    """

    def __init__(self, linear: Linear, running: Sequence[RequestRun]) -> None:
        self.linear, self.running = linear, running
        self._seen: list[tuple[RequestRun, int, torch.Tensor, torch.Tensor]] = []

    def see(self, proposal: Proposal) -> None:
        """Keep a proposal with the requests that it was made for."""
        by_row = {run.row: run for run in self.running}
        for row, start, tokens, logits in zip(
            proposal.rows.tolist(), proposal.starts.tolist(), proposal.tokens, proposal.logits, strict=True
        ):
            self._seen.append((by_row[row], start, tokens, logits))

    def compare(self) -> DraftComparison:
        """Compare all that was collected; a round behind a request's last token drafted behind no history."""
        proposals, wrong, worst = 0, 0, 0.0
        for run, length, tokens, logits in self._seen:
            history = run.request.tokens.tolist()
            if length >= len(history):
                continue
            want = self.linear.logits(history, length, len(tokens))
            error = float((logits - want).abs().max())
            proposals += 1
            # NaN compares as false, so it counts as wrong.
            wrong += not error <= DRAFT_TOLERANCE or not torch.equal(tokens, want.argmax(-1))
            worst = max(worst, error)
        return DraftComparison(proposals, wrong, worst)
