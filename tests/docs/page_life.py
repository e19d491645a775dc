"""The second part of the walkthrough: what happens to one C128 page, a line for each moment."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from dsv4_npu.alloc import FamilyCounts
from dsv4_npu.alloc.audit_view import AuditView
from dsv4_npu.alloc.state import C128, STATE_NAMES
from dsv4_npu.emulation.cache import PooledModel
from dsv4_npu.emulation.engine import Engine, RequestRun
from tests.docs.pages import table
from tests.docs.recorder import PROMPT, Recorder


class PageLife:
    """The states of one C128 page, one line a moment."""

    def __init__(self, engine: Engine, page: int) -> None:
        self.engine, self.page = engine, page
        self.rows: list[list[object]] = []
        self.note("before the round")

    def note(self, moment: str) -> None:
        alloc = self.engine.alloc
        alloc.audit()
        state = alloc.state
        self.rows.append(
            [
                len(self.rows) + 1,
                moment,
                STATE_NAMES[state.page_state[C128][self.page]],
                int(state.c128_count[self.page]),
                AuditView(alloc, True).holders_of(C128, self.page),
            ]
        )

    def expect(self, state: str, count: int) -> None:
        assert self.rows[-1][2:4] == [state, count], self.rows[-1]

    def table(self) -> str:
        return table(["", "moment", "state", "count", "named by"], self.rows)


def through_the_cache(recorder: Recorder, run: RequestRun, neighbour: RequestRun, page: PageLife) -> None:
    engine, alloc, bench = recorder.engine, recorder.engine.alloc, recorder.bench
    cache = engine.life.cache
    assert cache is not None
    page.expect("held", 2)
    shared = [*run.prompt, *run.outputs[:2]]
    second = recorder.submit([*shared, *bench.prompt(20)], 12)
    recorder.step()
    assert second.cached == len(shared) == cache.granule
    assert alloc.state.c128_table[second.row, 0] == page.page
    page.note("prefix hit")
    page.expect("held", 3)
    while not run.finish:
        recorder.step()
    page.note("first finish")
    page.expect("held", 2)
    while not second.finish:
        recorder.step()
    page.note("second finish")
    page.expect("held", 1)
    assert not neighbour.finish
    forward = PooledModel.forward

    def evicting(model: PooledModel, *args: Any) -> torch.Tensor:
        assert alloc.epochs.in_flight == 1
        while alloc.state.c128_count[page.page]:
            assert cache.evict(FamilyCounts(0, 0, 1))
        page.note("eviction")
        page.expect("quarantined", 0)
        assert page.page not in alloc.state.free_list[C128][: alloc.state.free(C128)]
        return forward(model, *args)

    with mock.patch.object(PooledModel, "forward", evicting):
        recorder.step()
    page.note("forward done")
    page.expect("free", 0)
    third = recorder.submit(bench.prompt(PROMPT), 5)
    while not third.rounds:
        recorder.step()
    page.note("third request")
    page.expect("held", 2)
    assert page.page in alloc.state.c128_table[third.row]
    for one in engine.run():
        bench.check(one)
    cache.clear()
    alloc.audit()
    assert not any(used for used, _, _ in alloc.usage().values())
