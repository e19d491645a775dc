"""What a run with trees found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from dsv4_npu.emulation.oracle import Oracle
from dsv4_npu.emulation.requests import RequestRun
from dsv4_npu.emulation.result import FamilyUsage, RequestResult, RunResult, compare
from dsv4_npu.emulation.trees.engine import TreeEngine
from dsv4_npu.errors import AuditError


def summarise_trees(
    engine: TreeEngine, requests: Sequence[RequestRun], oracle: Oracle, label: str, seconds: float
) -> RunResult:
    """Compare a finished run with the oracle and collect its numbers.

    Simulated drafts become the history, so their logits must be the oracle's along them. Simulated fixed tokens are
    not what the KV was computed from: there is nothing to compare, so audit and leaks alone decide.
    """
    options = engine.options
    try:
        engine.alloc.audit()
        verdict = "clean"
    except AuditError as error:
        verdict = str(error)
    usage = engine.alloc.usage()
    if options.accept == "simulated":
        follows = options.simulated_tokens == "drafts"
        found = [replace(compare(r, oracle, True), simulated=True) if follows else _made_up(r) for r in requests]
    else:
        found = [compare(r, oracle, options.sampled) for r in requests]
    return RunResult(
        label=label,
        requests=found,
        families=[
            FamilyUsage(
                "FULL (latent rows)" if engine.pool.values is None else "FULL (keys and values)",
                *usage["FULL"],
                engine.pool.usage_bytes(),
            ),
            FamilyUsage("request rows (states of the draft head)", *usage["ROW"], engine.device.states.nbytes),
        ],
        audit=verdict,
        leaked=[f"{name}: {used} of {total}" for name, (used, _, total) in usage.items() if used],
        rounds=engine.rounds,
        seconds=seconds,
    )


def _made_up(request: RequestRun) -> RequestResult:
    top = torch.stack(request.logits).topk(2, dim=-1).values
    return RequestResult(
        rid=request.rid,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.cached,
        outputs=list(request.outputs),
        finish=request.finish,
        rounds=request.rounds,
        accept_histogram=dict(sorted(request.accepts.items())),
        identical=None,
        first_difference=None,
        max_logit_error=None,
        min_margin=float((top[:, 0] - top[:, 1]).min()),
        simulated=True,
    )
