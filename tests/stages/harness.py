"""Engines that draft from stages of their own, watched: every proposal is compared with the linear oracle's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsv4_npu.config import ModelSpec
from dsv4_npu.emulation.device import held
from dsv4_npu.emulation.drafters import Drafts
from dsv4_npu.emulation.engine import Engine, RequestRun
from dsv4_npu.emulation.stages import OwnDrafter, Proposal, build_stages
from dsv4_npu.emulation.stages.linear import Linear
from tests.emulation.harness import Bench, Setting, varied

#: Largest difference between two float64 computations of a draft's logits that is put down to rounding.
TOLERANCE = 1e-9
SHARED = Setting(c128_page=1, width=4, batch=3, new_tokens=10, chunk=128)

Accept = Callable[[int, int], int]


@dataclass(frozen=True)
class Seen:
    """One request's share of a proposal."""

    length: int
    root: int
    tokens: list[int]
    logits: torch.Tensor


class StageBench(Bench):
    """A bench whose engines draft from their own stages."""

    def __init__(self, bench: Bench, kind: str) -> None:
        self.__dict__.update(bench.__dict__)
        self.kind = kind
        self.spec = ModelSpec.load("tiny" if kind == "mtp" else "tiny_dspark")
        self.net = build_stages(self.model, self.spec)
        self.linear = Linear(self.model, self.net, kind, self.spec.sliding_window)

    def own(self, setting: Setting, accept: Accept | None = None, overlap: bool = False) -> Watched:
        """A watched engine; with ``accept`` its drafts are the target's own tokens up to that many."""
        setting = replace(setting, kind="chain" if self.kind == "mtp" else "dspark")
        engine = self.engine(setting, OwnDrafter(self.net, self.kind))  # type: ignore[arg-type]
        engine.options = replace(engine.options, overlap=overlap)
        return Watched(self, engine, accept)


class Watched:
    """An engine and every proposal that its stages made."""

    def __init__(self, bench: StageBench, engine: Engine, accept: Accept | None) -> None:
        self.bench, self.engine, self.accept = bench, engine, accept
        self.seen: dict[RequestRun, list[Seen]] = {}
        self.compared = 0
        assert engine.device.stages is not None
        self.stages = engine.device.stages
        self.stages.watch = self._see
        if accept is not None:
            self._propose = self.stages.propose
            self.stages.propose = self._steered  # type: ignore[method-assign]

    def _runs(self, rows: torch.Tensor) -> list[RequestRun]:
        by_row = {run.row: run for run in self.engine.running}
        return [by_row[row] for row in held(rows).tolist()]

    def _see(self, proposal: Proposal) -> None:
        runs = self._runs(proposal.rows)
        parts = zip(
            runs,
            proposal.starts.tolist(),
            proposal.roots.tolist(),
            proposal.tokens.tolist(),
            proposal.logits,
            strict=True,
        )
        for run, *rest in parts:
            self.seen.setdefault(run, []).append(Seen(*rest))

    def _steered(self, rows: torch.Tensor, starts: torch.Tensor, *rest: Any) -> Drafts:
        """The stages' own drafts, exchanged for the target's next tokens up to a given length."""
        assert self.accept is not None
        tokens = held(self._propose(rows, starts, *rest).tokens).clone()
        for b, (run, length) in enumerate(zip(self._runs(rows), held(starts).tolist(), strict=True)):
            done, keep = length + 1 - len(run.prompt), min(self.accept(b, length), tokens.shape[1])
            right = self.bench.oracle.greedy(run.prompt, done + tokens.shape[1]).tokens[done:]
            tokens[b, :keep] = torch.tensor(right[:keep], dtype=torch.int64)
            for at in range(keep, keep + 1 if keep < len(right) else keep):
                tokens[b, at] = (right[at] + 1) % self.bench.spec.vocab_size
        return Drafts(tokens.to(rows.device))

    def settle(self, run: RequestRun) -> None:
        """Compare the proposals for a request with the oracle's, along its history as it is now."""
        history = run.request.tokens.tolist()
        for one in self.seen.pop(run, []):
            # A round that ran past the end of its request drafted behind tokens that are no history.
            if one.length < len(history):
                assert one.root == history[one.length]
                want = self.bench.linear.logits(history, one.length, len(one.tokens))
                error = float((one.logits - want).abs().max())
                where = f"request {run.rid}, draft behind {one.length} positions"
                assert error <= TOLERANCE, f"{where}: logits differ by {error}"
                assert one.tokens == want.argmax(-1).tolist(), where
                self.compared += 1

    def finish(self) -> list[RequestRun]:
        """Run to the end: outputs the target's, proposals the linear oracle's, nothing left over."""
        runs = self.engine.run()
        for run in runs:
            if run.finish != "abort":
                self.bench.check(run)
                self.settle(run)
        assert self.compared, "no proposal was compared"
        self.engine.alloc.audit()
        if self.engine.life.cache is not None:
            self.engine.life.cache.clear()
        self.engine.alloc.audit()
        assert not any(used for used, _, _ in self.engine.alloc.usage().values()), self.engine.alloc.usage()
        return runs


def mixed(width: int) -> Accept:
    """Every acceptance length in turn, different for the requests of a batch."""
    return varied(width)
