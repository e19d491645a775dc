"""No compressor row and no stage row of a rejected draft is ever read: by logs of reads and writes, exhaustively."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4_npu import addressing
from dsv4_npu.emulation import cache
from dsv4_npu.emulation.engine import Engine
from dsv4_npu.emulation.stages import StageRounds
from tests.emulation.harness import Setting
from tests.stages.harness import StageBench, mixed
from tests.stages.order import LOST, RIGHT, UNACCEPTED, Case, explore, old_rule
from tests.stages.stage_rows import two_rounds
from tests.stages.tables import DOC, MEASURED, OWN, RINGS, deviations, filled, ring_line, share_line, stage_line, tables

QUICK = [Case(4, 6), Case(4, 10), Case(4, 3, "page"), Case(128, 6), Case(128, 10, clear=True)]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_under_the_pad_rule_every_row_read_is_right(case: Case) -> None:
    result = explore(case)
    assert set(result.reads) == {RIGHT}
    assert result.entries.sum() > result.wrong.sum() == 0


def test_the_old_rule_reads_rows_of_rejected_drafts() -> None:
    assert set(explore(Case(4, 6, old=True)).reads) == {RIGHT, UNACCEPTED, LOST}
    assert set(explore(Case(128, 4, old=True)).reads) == {RIGHT, UNACCEPTED, LOST}
    assert set(explore(Case(4, 4, old=True)).reads) == {RIGHT}


def test_the_clear_turns_them_into_nothing_and_mends_no_entry() -> None:
    without, with_clear = (explore(Case(128, 4, old=True, clear=clear)) for clear in (False, True))
    assert without.reads[UNACCEPTED]
    assert set(with_clear.reads) == {RIGHT, LOST}
    assert without.share() == pytest.approx(with_clear.share(), abs=1e-9)


def test_beyond_the_bound_the_pad_rule_reads_them_too() -> None:
    assert explore(Case(4, 11)).reads[UNACCEPTED]


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=pytest.mark.slow if one.width == 11 else ()) for one in MEASURED], ids=str
)
def test_shares_agree_with_the_measured_ones(case: Case) -> None:
    """C128: one window a run. C4: the sample's runs were short, and the first window of a run is always right."""
    share = explore(case).share()
    assert deviations(case, share, 1.0 if case.ratio == 128 else 6 / 7) < 3


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
@pytest.mark.parametrize("width", [2, 5])
def test_stages_read_committed_rows_and_their_own(mtp: StageBench, dspark: StageBench, kind: str, width: int) -> None:
    bench = {"mtp": mtp, "dspark": dspark}[kind]
    found: Counter[str] = Counter()
    for length in (1, 127, 128, 255):
        found += two_rounds(bench.net, bench.spec, kind, width, length)
    assert found["rejected"] == 0
    assert found["committed"] > 0 < found[OWN]


def test_without_injection_stages_read_rows_of_rejected_drafts(stages: StageBench, monkeypatch: Any) -> None:
    """Case 48 the other way round: the log must see it."""
    real = StageRounds.committed

    def half(self: StageRounds, rows: Any, starts: Any, accept: Any, *rest: Any) -> None:
        real(self, rows, starts, torch.ones_like(accept), *rest)

    monkeypatch.setattr(StageRounds, "committed", half)
    monkeypatch.setattr("tests.stages.stage_rows.expect", lambda *given: None)
    assert two_rounds(stages.net, stages.spec, stages.kind, 4, 126)["rejected"]


# -- the log of a whole engine ----------------------------------------------------------------------------------------


class EngineLog:
    """Every ring row that an engine's compressors read: is it the accepted row of the position that is meant?"""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rows: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.accepted: dict[tuple[int, int], int] = {}
        self.found: Counter[str] = Counter()
        self.number = 0

    def compress(self, real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def logged(state: torch.Tensor, kv: torch.Tensor, gate: torch.Tensor, plan: Any, *rest: Any) -> torch.Tensor:
            history, starts, slab = plan.prior_rows.shape[1], rest[1].tolist(), state.data_ptr()
            requests = self.engine.life._steps[max(self.engine.life._steps)].requests
            for b, (request, start) in enumerate(zip(requests, starts, strict=True)):
                for at, row in enumerate(plan.prior_rows[b].tolist()):
                    if plan.windows and row != plan.dummy:
                        self._read(slab, row, start - history + at, id(request))
            for b, (request, start) in enumerate(zip(requests, starts, strict=True)):
                for at, row in enumerate(plan.save_rows[b].tolist()):
                    if row != plan.dummy:
                        self.rows[slab, row] = (start + at, id(request), self.number)
            return real(state, kv, gate, plan, *rest)

        return logged

    def _read(self, slab: int, row: int, position: int, request: int) -> None:
        held = self.rows.get((slab, row))
        if held is None or held[:2] != (position, request):
            self.found["lost"] += 1
        else:
            end = self.accepted.get((request, held[2]), 0)
            self.found["right" if position < end else "unaccepted"] += 1

    def noted(self, step: Any, tokens: Any) -> None:
        for request, start, end in zip(step.requests, step.starts.tolist(), step.ends.tolist(), strict=True):
            run = tokens.get(request, ())
            self.accepted[id(request), self.number] = start + len(run) if step.kind == "decode" else end
        self.number += 1


def engine_log(stages: StageBench, patch: pytest.MonkeyPatch, setting: Setting) -> Counter[str]:
    watched = stages.own(setting, mixed(setting.width))
    log = EngineLog(watched.engine)
    life = watched.engine.life
    real = life.learn

    def learn(step: Any, tokens: Any) -> Any:
        log.noted(step, tokens)
        return real(step, tokens)

    patch.setattr(life, "learn", learn)
    patch.setattr(cache, "compress_batch", log.compress(cache.compress_batch))
    for length in (5, 126):
        watched.engine.submit(stages.prompt(length), 14)
    watched.engine.run()
    return log.found


@pytest.mark.parametrize(
    ("platform", "clear"),
    [
        ("a3", True),
        ("a5", False),
        pytest.param("a3", False, marks=pytest.mark.slow),
        pytest.param("a5", True, marks=pytest.mark.slow),
    ],
)
def test_a_whole_engine_reads_right_rows_alone(
    dspark: StageBench, monkeypatch: pytest.MonkeyPatch, platform: str, clear: bool
) -> None:
    setting = Setting(platform=platform, width=6, clear=clear)
    assert set(engine_log(dspark, monkeypatch, setting)) == {"right"}


def test_a_whole_engine_under_the_old_rule(dspark: StageBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addressing, "save_start", old_rule)
    found = engine_log(dspark, monkeypatch, Setting(width=6, poison=False))
    assert found["unaccepted"]
    assert found["right"]


# -- the page ---------------------------------------------------------------------------------------------------------


def test_lines_of_the_page(mtp: StageBench, dspark: StageBench) -> None:
    made = {"mtp": (mtp.net, mtp.spec), "dspark": (dspark.net, dspark.spec)}
    text = DOC.read_text(encoding="utf-8")
    lines = [
        ring_line(name, width, old) for name in RINGS for width, old in ((2, False), (4, True)) if "SWA" not in name
    ]
    lines += [ring_line("C4 of an SWA page (A2, A3)", 1, False), share_line(Case(4, 5, old=True))]
    lines += [stage_line(kind, 2, made) for kind in made]
    missing = [line for line in lines if line not in text]
    assert not missing, f"{DOC.name} lacks {missing}: python -m tests.stages"


@pytest.mark.slow
def test_the_whole_page() -> None:
    text = DOC.read_text(encoding="utf-8")
    assert filled(text, tables()) == text
