"""Switch one rule off and the comparison with the oracle must fail; the clear is proved at state level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dsv4_npu import addressing
from dsv4_npu.alloc import KVAllocator
from dsv4_npu.compressor import plan as ring_plan
from dsv4_npu.compressor import reference
from dsv4_npu.emulation import forward
from dsv4_npu.emulation import states as states_module
from dsv4_npu.emulation.engine import Engine
from dsv4_npu.errors import Dsv4NpuError
from tests.emulation.harness import Bench, Setting, always, varied

LENGTHS = [3, 117, 125, 127, 130, 246, 254]


def caught(run: Callable[[], Any]) -> bool:
    """Whether a run is found to be wrong: by the oracle, or by a check of ours on the way."""
    try:
        run()
    except (AssertionError, Dsv4NpuError):
        return True
    return False


def mutated(bench: Bench, width: int = 6, lengths: list[int] = LENGTHS, **changes: Any) -> bool:
    setting = Setting(width=width, new_tokens=18, **changes)
    return caught(lambda: bench.run(setting, lengths, bench.scripted(varied(width))))


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_unmutated_runs_are_right(bench: Bench, platform: str) -> None:
    assert not mutated(bench, platform=platform)
    assert not mutated(bench, platform=platform, poison=False)


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_old_save_rule(bench: Bench, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    def old(start: int, end: int, ratio: int, pad: int) -> int:
        return max(start, addressing.floor_to(end, ratio) - (addressing.OVERLAP[ratio] - 1) * ratio)

    monkeypatch.setattr(ring_plan.addressing, "save_start", old)
    assert mutated(bench, platform=platform, poison=False)


def test_ring_address_off_by_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # A shift of both writes and reads is a renaming of rows: it shows because the clear keeps the right address.
    monkeypatch.setattr(addressing, "request_state_rows", lambda row, at, ring: row * ring + (at + 1) % ring)
    assert mutated(bench)


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_ring_modulus_off_by_one(bench: Bench, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(addressing, "request_state_rows", lambda row, at, ring: row * ring + at % (ring // 2))
    monkeypatch.setattr(
        addressing, "swa_state_rows", lambda swa, page, ring, dummy: swa // page * ring + swa % (ring // 2)
    )
    assert mutated(bench, platform=platform)


def test_c4_halves_swapped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = reference._window_sum

    def swapped(rows: torch.Tensor, ratio: int) -> torch.Tensor:
        if ratio == 4:
            kv, score = rows.chunk(2, dim=-1)
            rows = torch.cat((kv.roll(kv.shape[-1] // 2, -1), score.roll(kv.shape[-1] // 2, -1)), dim=-1)
        return real(rows, ratio)

    monkeypatch.setattr(reference, "_window_sum", swapped)
    assert mutated(bench)


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_dummy_row_not_reset(bench: Bench, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(reference, "reset_dummy_row", lambda state, dummy: None)
    # Prompts shorter than a C4 window read the dummy row when their first window closes in a verify.
    assert mutated(bench, platform=platform, batch=2)


def test_c128_sidecar_of_the_wrong_request(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = addressing.c128_slots
    monkeypatch.setattr(
        addressing,
        "c128_slots",
        lambda table, rows, entries, page: real(table, rows[:1].expand_as(rows), entries, page),
    )
    assert mutated(bench, lengths=[125, 254, 130])


def test_reads_after_writes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = forward.plan_ring

    def late(ratio: int, *args: Any, **kwargs: Any) -> Any:
        plan = real(ratio, *args, **kwargs)
        if ratio == 4 and plan.windows:
            # Rows that this batch will overwrite are read as they will be: what reading after writing sees.
            saved = set(plan.save_rows.flatten().tolist()) - {plan.dummy}
            hit = torch.tensor([[int(r) in saved for r in row] for row in plan.prior_rows.tolist()])
            object.__setattr__(plan, "prior_rows", torch.where(hit, plan.dummy, plan.prior_rows))
        return plan

    monkeypatch.setattr(forward, "plan_ring", late)
    assert mutated(bench, width=10, platform="a5")


def test_commit_of_one_row_too_many(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = KVAllocator.commit_batch

    def longer(self: KVAllocator, rows: Any, lens: Any) -> None:
        real(self, rows, np.minimum(lens + 1, self.state.allocated[rows]))

    monkeypatch.setattr(KVAllocator, "commit_batch", longer)
    assert mutated(bench)


def test_window_eviction_by_the_speculative_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def early(self: Engine, row: int) -> None:
        # The committed end plus the reserve: what an eviction that forgets about rejection would use.
        alloc = self.alloc
        pages = (alloc.committed(row) + 2 * 128 - 128) // 128
        held = alloc.state.block_table[row, : min(pages, alloc.committed(row) // 128)]
        alloc.free_swa_slots([int(p) * 128 for p in held if p])

    real = Engine._verify_round

    def round_then_evict(self: Engine) -> None:
        real(self)
        for request in self.running:
            early(self, request.row)

    monkeypatch.setattr(Engine, "_verify_round", round_then_evict)
    assert mutated(bench)


def rejected_rows_are_empty(engine: Engine) -> None:
    """After a commit the rows at offsets [accept, D) are the empty row in every C128 layer, those below are not."""
    state = engine.pools.c128_state
    last = engine.last_round
    assert last is not None
    for row, length, accepted in zip(last.rows, last.seq_lens, last.accept_lens, strict=True):
        if row not in {r.row for r in engine.running}:
            continue
        for offset in range(engine.config.verify_width):
            at = int(row) * state.ring + (int(length) + offset) % state.ring
            stored = state.data[:, at]
            empty = bool((stored[:, : state.half] == 0).all() and torch.isneginf(stored[:, state.half :]).all())
            assert empty == (offset >= accepted), f"row {row}, offset {offset}, accepted {accepted}"


@pytest.mark.parametrize("kind", ["chain", "dspark"])
@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_rejected_c128_rows_are_empty_after_every_commit(bench: Bench, platform: str, kind: str) -> None:
    setting = Setting(platform=platform, kind=kind, width=6, new_tokens=18)
    bench.run(setting, LENGTHS, bench.scripted(varied(6)), on_round=rejected_rows_are_empty)


def test_without_the_clear_rejected_rows_stay(bench: Bench) -> None:
    setting = Setting(width=6, clear=False)
    with pytest.raises(AssertionError, match="offset"):
        bench.run(setting, LENGTHS, bench.scripted(always(1)), on_round=rejected_rows_are_empty)


def test_a_clear_that_starts_one_row_early_takes_an_accepted_row(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = states_module.ops.clear_c128_draft_states_

    def early(state: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor, accept: torch.Tensor, *rest: int) -> None:
        real(state, rows, lens, (accept - 1).clamp_min(1), *rest)

    monkeypatch.setattr(states_module.ops, "clear_c128_draft_states_", early)
    with pytest.raises(AssertionError, match="offset"):
        bench.run(Setting(width=6), LENGTHS, bench.scripted(always(2)), on_round=rejected_rows_are_empty)
