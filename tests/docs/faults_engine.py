"""Faults that only a computation shows: wrong tokens and logits under a clean audit, and what a forward refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import torch

from dsv4_npu import addressing
from dsv4_npu.compressor import plan as ring_plan
from dsv4_npu.emulation.engine import Engine, RequestRun
from dsv4_npu.emulation.result import audit_verdict, compare, leaks
from dsv4_npu.spec import VerifyResult, accepted_rows, accepted_tokens
from tests.docs.faults import fault, refused
from tests.docs.faults_life import probe
from tests.emulation.harness import Bench, Setting, always, varied

SETTING = Setting(width=6, batch=2, new_tokens=10, context=384, chunk=256, poison=False)


def verdicts(bench: Bench, engine: Engine, runs: list[RequestRun]) -> list[str]:
    """The lines of ``dsv4-npu run`` that matter; nothing if every request equals the oracle."""
    compared = [compare(run, bench.oracle, sampled=False) for run in runs]
    if all(one.identical for one in compared):
        return []
    lines = [
        f"request {one.rid}: identical = {'yes' if one.identical else 'NO'}, first_difference = {one.first_difference}"
        + (f", max_logit_error = {one.max_logit_error:.1e}" if one.max_logit_error > 1e-10 else "")
        for one in compared
    ]
    return [*lines, f"audit: {audit_verdict(engine)}, leaks: {', '.join(leaks(engine)) or 'none'}"]


def run(bench: Bench, lengths: list[int], accept: Callable[[int, int], int], setting: Setting = SETTING) -> list[str]:
    engine = bench.engine(setting, bench.scripted(accept))
    runs = [engine.submit(bench.prompt(length), SETTING.new_tokens) for length in lengths]
    engine.run()
    return verdicts(bench, engine, runs)


@fault("tokens-of-another", "bench")
def _(planted: bool, bench: Bench) -> list[str]:
    def tokens(result: VerifyResult) -> list[list[int]]:
        width = len(result.predict) // len(result.accept_lens)
        return [
            [int(result.predict[row % width if planted else row]) for row in rows] for rows in accepted_rows(result)
        ]

    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("dsv4_npu.emulation.") and vars(module).get("accepted_tokens") is accepted_tokens:
                patches.enter_context(mock.patch.object(module, "accepted_tokens", tokens))
        return run(bench, [20, 40], varied(SETTING.width))


@fault("old-save-rule", "bench")
def _(planted: bool, bench: Bench) -> list[str]:
    real = addressing.save_start

    def old(start: int, end: int, ratio: int, pad: int) -> int:
        return max(start, addressing.floor_to(end, ratio) - (addressing.OVERLAP[ratio] - 1) * ratio)

    with mock.patch.object(ring_plan.addressing, "save_start", old if planted else real):
        return run(bench, [20, 125], always(0), replace(SETTING, width=4))


@fault("clear-missing", "bench")
def _(planted: bool, bench: Bench) -> list[str]:
    engine = bench.engine(replace(SETTING, clear=not planted), bench.scripted(always(2)))
    engine.submit(bench.prompt(125), SETTING.new_tokens)
    while not engine.rounds:
        engine.step()
    return probe("rejected-rows")(engine)


@fault("window-not-mapped", "bench")
def _(planted: bool, bench: Bench) -> list[str]:
    engine = bench.engine(SETTING, bench.scripted(always(2)))
    run = engine.submit(bench.prompt(125), SETTING.new_tokens)
    while not engine.rounds:
        engine.step()
    plan = engine.life.decode_plan

    def freeing(*args: object) -> object:
        step = plan(*args)  # type: ignore[arg-type]
        if planted:
            engine.alloc.free_swa_slots(engine.alloc.slots(run.row, 0, 1).out_full)
        return step

    with mock.patch.object(engine.life, "decode_plan", freeing), torch.no_grad():
        return refused(engine.step)
