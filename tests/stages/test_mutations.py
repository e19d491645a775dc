"""Each rule switched off once: outputs stay the target's, and the proposals show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4_npu.emulation.engine import Engine
from dsv4_npu.emulation.stages import StageRounds
from dsv4_npu.emulation.stages import drafter as module
from dsv4_npu.errors import InputError, OwnershipError
from dsv4_npu.movement import Snapshot, restore_snapshot, take_snapshot
from tests.emulation.harness import Setting
from tests.emulation.test_life import words
from tests.movement.test_model import poison
from tests.stages.harness import SHARED, StageBench, Watched, mixed
from tests.stages.stage_rows import two_rounds

Patch = pytest.MonkeyPatch


def wrong_proposals(watched: Watched) -> bool:
    """Whether a run's proposals differ from the oracle's; its outputs must not."""
    for run in watched.engine.run():
        watched.bench.check(run)
    try:
        for run in watched.engine.finished:
            watched.settle(run)
    except AssertionError:
        return True
    assert watched.compared
    return False


def plain(stages: StageBench, width: int = 4) -> bool:
    watched = stages.own(Setting(width=width, new_tokens=12), mixed(width))
    for length in (5, 126):
        watched.engine.submit(stages.prompt(length), 12)
    return wrong_proposals(watched)


def committed(patch: Patch, change: Callable[..., tuple[Any, ...]]) -> None:
    """Injection gets other arguments: ``(rows, starts, accept_lens, candidates, predict, hidden, bounds)``."""
    real = StageRounds.committed

    def other(self: StageRounds, *given: Any) -> None:
        given = change(*given)
        # What acceptance did not write may be no token at all.
        predict = given[4].clamp(0, self.pools.config.model.vocab_size - 1)
        real(self, *given[:4], predict, *given[5:])

    patch.setattr(StageRounds, "committed", other)


def test_without_a_mutation(stages: StageBench) -> None:
    assert not plain(stages)


def test_no_injection_at_all(stages: StageBench, monkeypatch: Patch) -> None:
    monkeypatch.setattr(StageRounds, "committed", lambda self, *given: None)
    assert plain(stages)


def test_one_accepted_row_is_not_injected(stages: StageBench, monkeypatch: Patch) -> None:
    committed(monkeypatch, lambda r, s, a, *rest: (r, s, (a - 1).clamp_min(1), *rest))
    assert plain(stages)


def test_one_rejected_row_is_taken_for_committed(stages: StageBench, monkeypatch: Patch) -> None:
    """One row too many is written, and the hidden state kept is that of the rejected position.

    The hidden state alone changes the proposals. A rejected row that is only written, with the right hidden state kept,
    changes none, since the next round writes it again before it reads it: only the log of the slab shows it, see
    ``test_rejected_rows_that_are_written_too_are_never_read``.
    """
    committed(monkeypatch, lambda r, s, a, c, *rest: (r, s, (a + 1).clamp_max(c.shape[1]), c, *rest))
    assert plain(stages)


def test_the_hidden_state_of_a_rejected_row_is_kept(stages: StageBench, monkeypatch: Patch) -> None:
    """The committed rows are written and no others; what the next round starts from is one position late."""
    real, keep = StageRounds.committed, StageRounds._keep

    def late(self: StageRounds, *given: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                StageRounds, "_keep", lambda self, r, h, last: keep(self, r, h, (last + 1).clamp_max(h.shape[1] - 1))
            )
            real(self, *given)

    monkeypatch.setattr(StageRounds, "committed", late)
    assert plain(stages)


def test_rejected_rows_are_injected_over_committed_ones(stages: StageBench, monkeypatch: Patch) -> None:
    """The last rows of the window in the place of the first."""

    def last(r: Any, s: Any, a: Any, c: Any, p: Any, h: Any, b: Any) -> tuple[Any, ...]:
        width = c.shape[1]
        index = (torch.arange(width) + width - a[:, None]).clamp_max(width - 1)
        moved = h.gather(1, index[..., None].expand(-1, -1, h.shape[-1]))
        return r, s, a, c.gather(1, index), p.view(c.shape).gather(1, index), moved, b

    committed(monkeypatch, last)
    assert plain(stages)


def test_rejected_rows_that_are_written_too_are_never_read(stages: StageBench, monkeypatch: Patch) -> None:
    """Every round writes them again before it reads them: no proposal differs. The log of the slab shows the writes."""
    real = StageRounds.committed

    def everything(self: StageRounds, r: Any, s: Any, a: Any, c: Any, p: Any, h: Any, b: Any) -> None:
        self._forward(self._embed(c), h, self._plan(r, s, c.shape[1], b))
        real(self, r, s, a, c, p, h, b)

    monkeypatch.setattr(StageRounds, "committed", everything)
    assert not plain(stages)
    with pytest.raises(AssertionError):
        two_rounds(stages.net, stages.spec, stages.kind, 3, 127)


@pytest.mark.parametrize("by", [-1, 1])
def test_injection_into_the_slots_beside(stages: StageBench, monkeypatch: Patch, by: int) -> None:
    committed(monkeypatch, lambda r, s, *rest: (r, s + by, *rest[:-1], rest[-1].row(by)._replace_lengths(rest[-1])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            module.Bounds,
            "_replace_lengths",
            lambda self, other: replace(self, lengths=other.lengths),
            raising=False,
        )
        assert plain(stages)


def test_hidden_states_one_position_late(stages: StageBench, monkeypatch: Patch) -> None:
    def late(r: Any, s: Any, a: Any, c: Any, p: Any, h: Any, b: Any) -> tuple[Any, ...]:
        return r, s, a, c, p, torch.cat((h[:, :1], h[:, :-1]), dim=1), b

    committed(monkeypatch, late)
    assert plain(stages)


def test_tokens_one_position_late(stages: StageBench, monkeypatch: Patch) -> None:
    """The token of the position itself for MTP, the one behind it for DSpark."""

    def late(r: Any, s: Any, a: Any, c: Any, p: Any, h: Any, b: Any) -> tuple[Any, ...]:
        behind = p.view(c.shape).clamp(0, 319).to(c.dtype)
        return r, s, a, behind, c.to(p.dtype).flatten(), h, b

    committed(monkeypatch, late)
    assert plain(stages)


def test_a_prefill_that_injects_one_position_late(stages: StageBench, monkeypatch: Patch) -> None:
    real = StageRounds.prefilled

    def late(self: StageRounds, r: Any, n: Any, c: Any, f: Any, h: Any, p: Any) -> None:
        real(self, r, n, c, f, torch.cat((h[:, :1], h[:, :-1]), dim=1), p)

    monkeypatch.setattr(StageRounds, "prefilled", late)
    assert plain(stages)


def test_a_chunk_that_does_not_know_the_token_behind_it(mtp: StageBench, monkeypatch: Patch) -> None:
    real = StageRounds.prefilled

    def alone(self: StageRounds, r: Any, n: Any, c: Any, f: Any, h: Any, p: Any) -> None:
        real(self, r, n, c, torch.zeros_like(f), h, p)

    monkeypatch.setattr(StageRounds, "prefilled", alone)
    assert plain(mtp)


# -- whole life -------------------------------------------------------------------------------------------------------


def moved(stages: StageBench, change: Callable[[Snapshot], Snapshot]) -> bool:
    """Leave with a snapshot in the middle of the outputs and come back."""
    watched = stages.own(replace(SHARED, prefix_cache=False), mixed(4))
    engine, run = watched.engine, watched.engine.submit(words(1, 131), 12)
    while len(run.outputs) < 5:
        engine.step()
    snapshot = change(take_snapshot(engine.pools, engine.alloc, run.request))
    engine.retract(run)
    poison(engine)
    engine.waiting.remove(run)
    engine.life.readmit(run.request)
    restore_snapshot(engine.pools, engine.life, run.request, snapshot)
    engine.running.append(run)
    return wrong_proposals(watched)


def test_stage_rows_that_do_not_move_along(stages: StageBench) -> None:
    assert not moved(stages, lambda snapshot: snapshot)

    def without(snapshot: Snapshot) -> Snapshot:
        layers = stages.spec.num_layers
        layout = {**snapshot.layout, "swa": [(layers, kind, width) for _, kind, width in snapshot.layout["swa"]]}
        return replace(snapshot, layout=layout, rows={**snapshot.rows, "swa": (snapshot.rows["swa"][0][:layers],)})

    assert moved(stages, without)


def test_a_snapshot_is_not_taken_in_behind_another_token(stages: StageBench) -> None:
    """The last MTP row was made from the token behind it; DSpark rows end with their own token."""
    watched = stages.own(replace(SHARED, prefix_cache=False), mixed(4))
    engine, run = watched.engine, watched.engine.submit(words(1, 131), 12)
    while len(run.outputs) < 5:
        engine.step()
    snapshot = take_snapshot(engine.pools, engine.alloc, run.request)
    tokens = run.request.tokens.tolist()
    assert snapshot.length == len(tokens) - 1
    guest = engine.life.admit("guest", [*tokens[:-1], (tokens[-1] + 1) % 320, 7], 8)
    if stages.kind == "dspark":
        assert restore_snapshot(engine.pools, engine.life, guest, snapshot) == snapshot.length
        return
    with pytest.raises(InputError, match="is none of request 'guest'"):
        restore_snapshot(engine.pools, engine.life, guest, snapshot)


def evicted_for_the_target_alone(stages: StageBench, patch: Patch) -> bool:
    """The target reads ``window - 1`` rows behind its next position; pages before them are freed at once."""

    def early(self: Engine) -> None:
        real(self)
        for run in self.running:
            columns = (self.alloc.committed(run.row) - self.config.model.sliding_window + 1) // self.config.page
            pages = self.alloc.state.block_table[run.row, : max(0, columns)]
            self.alloc.free_swa_slots([int(page) * self.config.page for page in pages if page])

    real = Engine._verify_round
    patch.setattr(Engine, "_verify_round", early)
    watched = stages.own(replace(SHARED, prefix_cache=False, width=2), lambda b, n: 0)
    watched.engine.submit(words(1, 250), 12)
    return wrong_proposals(watched)


def test_eviction_by_what_the_target_reads(mtp: StageBench, monkeypatch: Patch) -> None:
    """An MTP chain begins one position before the target: its window reaches one row further back."""
    with pytest.raises(OwnershipError, match="SWA row of the window"):
        evicted_for_the_target_alone(mtp, monkeypatch)
    monkeypatch.setattr(module, "check_resident", lambda plan, ends: None)
    assert evicted_for_the_target_alone(mtp, monkeypatch)


def test_nothing_is_read_on_pages_that_were_given_back(stages: StageBench) -> None:
    """NaN in all layers of every page that nobody holds, after each round."""
    setting = replace(SHARED, prefix_cache=False, width=6, swa_ratio=0.4, context=500, batch=2)
    watched = stages.own(setting, mixed(6))
    watched.engine.on_round = poison
    for length in (380, 250):
        watched.engine.submit(words(length, length), 12)
    assert not wrong_proposals(watched)


@pytest.mark.parametrize("rule", ["prefix", "session"])
def test_without_the_look_ahead(mtp: StageBench, monkeypatch: Patch, rule: str) -> None:
    """Rows made from a token that is not there any more."""

    def run() -> bool:
        watched = mtp.own(replace(SHARED, batch=1), mixed(4))
        first = watched.engine.submit(words(1, 130), 6, session=rule == "session")
        while not first.finish:
            watched.engine.step()
        watched.settle(first)
        if rule == "prefix":
            watched.engine.submit([*words(1, 130)[:128], 5, 6, 7], 6)
        else:
            watched.engine.resume(first, words(2, 6), 6, keep=watched.engine.alloc.committed(first.row))
        return wrong_proposals(watched)

    assert not run()
    monkeypatch.setattr(module.OwnDrafter, "lookahead", 0)
    assert run()
