"""What a run found: per request, per family, and whether it equals the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from dsv4_npu.emulation.agreement import RankReport
from dsv4_npu.emulation.costs import StepCosts
from dsv4_npu.emulation.engine import Engine, RequestRun
from dsv4_npu.emulation.native import NativeComparison, PlainDecode, compare_native
from dsv4_npu.emulation.oracle import Oracle
from dsv4_npu.emulation.parking import ParkingCounts
from dsv4_npu.emulation.stages.check import DraftComparison
from dsv4_npu.errors import AuditError

#: Largest difference between two float64 computations of one logit that is put down to rounding.
LOGIT_TOLERANCE = 1e-10


@dataclass(frozen=True)
class RequestResult:
    """One request compared with the oracle; over native rows with a plain decode (``native``).

    ``simulated``: how much was accepted was made up, and so its outputs and its histogram say nothing.
    ``identical``, ``max_logit_error``: None where nothing was compared.
    """

    rid: int
    prompt_tokens: int
    cached_tokens: int
    outputs: list[int]
    finish: str
    rounds: int
    accept_histogram: dict[int, int]
    identical: bool | None
    first_difference: int | None
    max_logit_error: float | None
    min_margin: float
    native: NativeComparison | None = None
    simulated: bool = False

    @property
    def mean_accept(self) -> float:
        """Mean rows accepted per verify."""
        return sum(k * v for k, v in self.accept_histogram.items()) / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class FamilyUsage:
    """Pages of one allocator family, and the bytes of the slabs that it indexes."""

    name: str
    used: int
    peak: int
    total: int
    bytes: int


@dataclass(frozen=True)
class RunResult:
    """A whole run. ``ok`` only if no request differs from the reference, the audit is clean and every page came back.

    ``reference``: what outputs are compared with; over native rows a plain decode over the same rows, where a
    difference at a choice that the rows do not settle is reported and no failure.
    ``device``: what decode steps cost on the emulated device; None on a CPU.
    ``retractions``: how often a request gave its pages back; ``parking``: what became of their snapshots.
    ``drafts``: of a run whose drafts come from the model's own stages: its proposals, compared.
    ``ranks``: of a run on several tensor-parallel ranks, each of which must have the same history and be in order.
    """

    label: str
    requests: list[RequestResult]
    families: list[FamilyUsage]
    audit: str
    leaked: list[str]
    rounds: int
    seconds: float
    device: StepCosts | None = None
    reference: str = "the oracle"
    parking: ParkingCounts | None = None
    retractions: int = 0
    drafts: DraftComparison | None = None
    ranks: list[RankReport] = field(default_factory=list)

    @property
    def identical(self) -> bool | None:
        """Whether every request equals ``reference``; None if none differs and some were not compared."""
        found = {r.identical for r in self.requests}
        return False if False in found else None if None in found else True

    @property
    def max_logit_error(self) -> float:
        """The largest logit difference of the requests that were compared; 0 without any."""
        return max((r.max_logit_error for r in self.requests if r.max_logit_error is not None), default=0.0)

    @property
    def ok(self) -> bool:
        """Identical as far as compared, audited and without leaks."""
        agreed = all(rank.same_history and rank.ok for rank in self.ranks)
        drafted = self.drafts is None or not self.drafts.wrong
        same = self.identical is not False
        return same and self.audit == "clean" and not self.leaked and agreed and drafted

    @property
    def simulated(self) -> bool:
        """Whether acceptance was simulated."""
        return any(r.simulated for r in self.requests)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {**asdict(self), "identical": self.identical, "simulated": self.simulated, "ok": self.ok}


def compare(request: RequestRun, oracle: Oracle, sampled: bool, plain: PlainDecode | None = None) -> RequestResult:
    """Compare outputs and logits with the oracle, or over native rows with the plain decode ``plain``.

    A greedy run must choose the oracle's tokens. A run that samples cannot, so the oracle is forced along its tokens
    and the logits behind every choice must agree.
    """
    native = None
    if plain is None:
        differ, error, margin = _differences(request, oracle, sampled)
    else:
        native = compare_native(request, plain, oracle)
        differ, error, margin = native.unexplained, native.max_logit_error, native.min_margin
    return RequestResult(
        rid=request.rid,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.cached,
        outputs=list(request.outputs),
        finish=request.finish,
        rounds=request.rounds,
        accept_histogram=dict(sorted(request.accepts.items())),
        identical=not differ and error <= LOGIT_TOLERANCE,
        first_difference=differ[0] if differ else None,
        max_logit_error=error,
        min_margin=margin,
        native=native,
    )


def _differences(request: RequestRun, oracle: Oracle, sampled: bool) -> tuple[list[int], float, float]:
    """Outputs that are not the oracle's, the largest logit difference before and at them, the smallest margin."""
    count = len(request.outputs)
    logits = torch.stack(request.logits)
    if sampled:
        wanted_tokens, wanted = request.outputs, oracle.forced(request.prompt, request.outputs)
        top = wanted.topk(2, dim=-1).values
        margin = float((top[:, 0] - top[:, 1]).min())
    else:
        run = oracle.greedy(request.prompt, count)
        wanted_tokens, wanted, margin = run.tokens, run.logits, float(run.margins().min())
    differ = [i for i in range(count) if wanted_tokens[i] != request.outputs[i]]
    # Behind a wrong token the histories differ, so logits are compared up to it.
    upto = differ[0] + 1 if differ else count
    return differ, float((logits[:upto] - wanted[:upto]).abs().max()), margin


def family_usage(engine: Engine) -> list[FamilyUsage]:
    """Pages and bytes per allocator family; compressor states are listed with the owner of their banks."""
    pools, usage = engine.pools, engine.alloc.usage()
    by_page = pools.c4_state_by_page
    c4_states = pools.c4_state.nbytes + pools.index_state.nbytes
    rows = [
        ("FULL (index space; C4 and indexer rows)", "FULL", pools.c4.nbytes + pools.index.nbytes),
        ("SWA" + (" (with C4 states)" if by_page else ""), "SWA", pools.swa.nbytes + (c4_states if by_page else 0)),
        ("C128", "C128", pools.c128.nbytes),
        (
            "request rows (C128 states" + ("" if by_page else ", C4 states") + ")",
            "ROW",
            pools.c128_state.nbytes + (0 if by_page else c4_states),
        ),
    ]
    return [FamilyUsage(name, *usage[key], size) for name, key, size in rows]


def leaks(engine: Engine) -> list[str]:
    """Families that still hold pages or rows after everything, the prefix cache too, was released."""
    if engine.life.cache is not None:
        engine.life.cache.clear()
    return [f"{name}: {used} of {total}" for name, (used, _, total) in engine.alloc.usage().items() if used]


def audit_verdict(engine: Engine) -> str:
    """``clean``, or what the audit found."""
    try:
        engine.alloc.audit()
    except AuditError as error:
        return str(error)
    return "clean"


def summarise(
    engine: Engine,
    requests: Sequence[RequestRun],
    oracle: Oracle,
    label: str,
    sampled: bool,
    seconds: float,
    plain: PlainDecode | None = None,
    drafts: DraftComparison | None = None,
) -> RunResult:
    """Compare a finished run with the oracle, or with ``plain``, and collect its numbers."""
    return RunResult(
        label=label,
        requests=[compare(r, oracle, sampled, plain) for r in requests],
        families=family_usage(engine),
        audit=audit_verdict(engine),
        leaked=leaks(engine),
        rounds=engine.rounds,
        seconds=seconds,
        device=None if engine.options.device == "cpu" else StepCosts.of(engine.costs),
        reference="the oracle" if plain is None else "a plain decode over the same rows",
        parking=None if engine.parking is None else engine.parking.counts,
        retractions=sum(r.retractions for r in requests),
        drafts=drafts,
    )
