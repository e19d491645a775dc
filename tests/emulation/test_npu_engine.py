"""The engine on the emulated npu device: the oracle's output, and what a decode step may cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dsv4_npu import ops
from dsv4_npu.alloc.mirrors import Mirrors
from dsv4_npu.budget import sizes_for_tokens
from dsv4_npu.cli import main
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec
from dsv4_npu.emulation import device as emulated
from dsv4_npu.emulation.device import NpuTensor, held
from dsv4_npu.emulation.drafters import EarlyExitDrafter
from dsv4_npu.emulation.engine import Engine, EngineOptions
from dsv4_npu.emulation.rounds import DeviceRounds
from dsv4_npu.emulation.states import StateKeeper
from dsv4_npu.emulation.stream import EVENTS, STREAM, Event, Events
from dsv4_npu.emulation.transfer import HostCopy
from dsv4_npu.errors import AuditError, InputError, UnavailableError
from tests.emulation.harness import Bench

pytest.importorskip("triton", reason="the emulated npu device runs kernels under Triton's interpreter")

#: The launches of every round of a chain, whatever the batch and the number of layers.
KERNELS = {
    "verify_tree_greedy_kernel": 1,
    "clear_c128_draft_states_kernel": 1,
    "fill_bonus_tokens_kernel": 1,
    "gather_accepted_slots_kernel": 1,
}


#: Prompt lengths and new tokens of a run in which most steps change no page.
STEADY = ((20, 6), 10)


@pytest.fixture(scope="module", autouse=True)
def npu() -> None:
    try:
        emulated.activate()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def nothing_pending() -> None:
    """A test that failed halfway leaves copies behind."""
    STREAM._pending.clear()


def build(
    bench: Bench,
    platform: str = "a3",
    kind: str = "chain",
    width: int = 4,
    on_round: Callable[[Engine], None] | None = None,
    **options: Any,
) -> Engine:
    """An engine on the device, with NaN in every row that nobody wrote."""
    config = CacheConfig(
        bench.spec,
        PlatformSpec.load(platform),
        SpeculationSpec(kind, width - 1),  # type: ignore[arg-type]
        page_size=128,
        c128_page_size=2,
        context_len=320,
        request_rows=2,
        kv_row="fp64",
        indexer_row="fp64",
        emulated_kernels=True,
    )
    chosen = EngineOptions(**({"batch": 2, "chunk": 101, "device": "npu"} | options))
    sizes = sizes_for_tokens(config, 2 * config.width, 1.0)
    engine = Engine(bench.model, config, sizes, EarlyExitDrafter() if width > 1 else None, chosen, on_round)
    for slab in (engine.pools.swa, engine.pools.c4, engine.pools.index, engine.pools.c128):
        slab.data.fill_(float("nan"))
    return engine


def serve(bench: Bench, engine: Engine, lengths: tuple[int, ...] = (126, 6), new_tokens: int = 8) -> Engine:
    for length in lengths:
        engine.submit(bench.prompt(length), new_tokens)
    for run in engine.run():
        bench.check(run)
    engine.alloc.audit()
    assert engine.life.cache is not None
    engine.life.cache.clear()
    assert not any(used for used, _, _ in engine.alloc.usage().values())
    return engine


CASES = [
    {"platform": "a3"},
    {"platform": "a5", "overlap": True},
    {"platform": "a3", "kind": "dspark", "width": 6, "overlap": True},
    {"platform": "a5", "kind": "dspark", "width": 6},
    {"platform": "a3", "accept": "rejection", "width": 3, "overlap": True},
    {"platform": "a5", "kind": "none", "width": 1, "overlap": True},
]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_output_is_the_oracles(bench: Bench, index: int) -> None:
    engine = serve(bench, build(bench, **CASES[index]), (126, 3), 7)  # type: ignore[arg-type]
    assert isinstance(engine.pools.swa.data, NpuTensor)
    assert isinstance(engine.alloc.mirrors.tables, NpuTensor)
    assert all(not step.reads for step in engine.costs)
    overlap = engine.options.overlap
    assert {step.copies_out for step in engine.costs} == {1}
    assert sum(step.stalls for step in engine.costs) == (0 if overlap else len(engine.costs))


def test_sampling_at_a_temperature_reads_the_oracles_memory(bench: Bench) -> None:
    engine = build(bench, "a5", width=3, accept="rejection", temperature=0.7, overlap=True)
    for length in (126, 6):
        engine.submit(bench.prompt(length), 8)
    for run in engine.run():
        want = bench.oracle.forced(run.prompt, run.outputs)
        torch.testing.assert_close(torch.stack(run.logits), want, rtol=0, atol=1e-10)
    assert all(not step.reads for step in engine.costs)


def steady_steps(engine: Engine) -> list[Events]:
    """Steps to which nothing was sent: the same batch as before, and no page changed hands."""
    return [step for step in engine.costs if not step.copies_in]


def check_steady_steps(engine: Engine) -> None:
    """What a steady decode step costs on the device."""
    steps = steady_steps(engine)
    assert len(steps) >= 3
    for step in steps:
        assert sum(step.reads.values()) == 0, "the host read from the device"
        assert step.copies_out == 1, "one asynchronous copy takes everything"
        assert step.launches == KERNELS


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("platform", "kind", "width"), [("a3", "chain", 4), ("a5", "dspark", 6)])
def test_a_steady_decode_step_reads_nothing(bench: Bench, platform: str, kind: str, width: int, overlap: bool) -> None:
    check_steady_steps(serve(bench, build(bench, platform, kind, width, overlap=overlap), *STEADY))


def layered(bench: Bench, ratios: list[int], folder: Any) -> Bench:
    """The tiny model with other layers."""
    raw = {**bench.spec.raw, "name": "layered", "num_hidden_layers": len(ratios), "compress_ratios": [*ratios, 0]}
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    return Bench(ModelSpec.load(str(path)))


@pytest.mark.parametrize("ratios", [[0, 128], [128, 4, 128, 128, 0, 128]], ids=["one layer", "four layers"])
@pytest.mark.parametrize("kind", ["chain", "dspark"])
def test_one_clear_per_verify_whatever_the_number_of_layers(
    bench: Bench, tmp_path: Any, ratios: list[int], kind: str
) -> None:
    other = layered(bench, ratios, tmp_path)
    engine = serve(other, build(other, "a3", kind, 4), (5,), 5)
    assert engine.pools.c128_state.layers == ratios.count(128)
    assert engine.costs
    for step in engine.costs:
        assert step.launches["clear_c128_draft_states_kernel"] == 1


# -- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_tables_are_sent_once_where_they_changed_and_not_otherwise(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    engine = build(bench, "a5", overlap=overlap)
    mirrors, state = engine.alloc.mirrors, engine.alloc.state
    sent: list[np.ndarray[Any, Any]] = [state.tables.copy()]
    seen: list[tuple[bool, int]] = []
    real = Mirrors.flush

    def flush(self: Mirrors) -> int:
        changed = not np.array_equal(state.tables, sent[-1])
        before = EVENTS.copy()
        count = real(self)
        seen.append((changed, EVENTS.since(before).copies_in))
        sent.append(state.tables.copy())
        assert np.array_equal(held(mirrors.tables).numpy(), state.tables)
        return count

    monkeypatch.setattr(Mirrors, "flush", flush)
    serve(bench, engine, (126, 6, 3))
    assert len(seen) == len(engine.costs) + 3, "one flush before every forward: three of them are prefills"
    assert {copies for changed, copies in seen if changed} == {1}
    assert {copies for changed, copies in seen if not changed} == {0}
    steps = [step.copies_in for step in engine.costs]
    assert max(steps) <= 3, "the tables, the rows of another batch, the bank of a row that was closed"
    assert 0 in steps


# -- mutations: what the checks above see -----------------------------------------------------------------------------


def test_a_read_in_the_step_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = DeviceRounds._accept

    def curious(self: DeviceRounds, *args: Any) -> Any:
        result = real(self, *args)
        assert result.accept_lens.max().item() >= 1
        return result

    monkeypatch.setattr(DeviceRounds, "_accept", curious)
    engine = serve(bench, build(bench), *STEADY)
    with pytest.raises(AssertionError, match="the host read from the device"):
        check_steady_steps(engine)


def test_a_clear_per_layer_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def by_layer(self: StateKeeper, rows: torch.Tensor, lens: torch.Tensor, accept: torch.Tensor, width: int) -> None:
        for state in self._c128:
            for layer in range(state.layers):
                part = state.data[layer : layer + 1]
                ops.clear_c128_draft_states_(part, rows, lens, accept, state.ring, width)

    monkeypatch.setattr(StateKeeper, "clear_rejected", by_layer)
    other = layered(bench, [128, 128], tmp_path)
    engine = serve(other, build(other), (5,), 5)
    assert {step.launches["clear_c128_draft_states_kernel"] for step in engine.costs} == {2}


def test_an_outcome_that_is_looked_at_too_early_is_wrong(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "synchronize", lambda self: None)
    with pytest.raises(InputError, match=r"no token could be drawn|accept_lens = -\d+"):
        serve(bench, build(bench))


def test_a_blocking_copy_of_the_outcome_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = HostCopy.__init__

    def blocking(self: HostCopy, parts: Any) -> None:
        real(self, parts)
        self._host.copy_(torch.cat([part.flatten().to(torch.int64) for part in parts]))

    monkeypatch.setattr(HostCopy, "__init__", blocking)
    engine = serve(bench, build(bench), *STEADY)
    with pytest.raises(AssertionError, match="the host read from the device"):
        check_steady_steps(engine)


def flushes_without_a_wait(engine: Engine) -> None:
    """Four changes of the tables, each sent before the copy of the one before it can be known to have run."""
    alloc = engine.alloc
    row = alloc.open("one")
    for pages in range(1, 5):
        with alloc.transaction() as plan:
            plan.extend(row, 64 * pages)
            plan.commit(slots=False)
        alloc.flush()
        alloc.launch()
    torch.npu.synchronize()  # type: ignore[attr-defined]


def test_a_staging_buffer_that_is_reused_before_its_copy_has_run_is_seen(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes_without_a_wait(build(bench))
    real = Mirrors._take_buffer
    only: list[Any] = []

    def same(self: Mirrors, entries: int) -> Any:
        only.append(only[0] if only else real(self, entries))
        return only[0]

    monkeypatch.setattr(Mirrors, "_take_buffer", same)
    with pytest.raises(AuditError, match="was changed before its asynchronous copy had run"):
        flushes_without_a_wait(build(bench))


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_what_a_step_costs(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text("A short one.\n\nAnother.", encoding="utf-8")
    options = ["--prompts", str(prompts), "--max-new-tokens", "6", "--device", "npu", "--overlap", "--json", str(out)]
    assert main(["run", *options]) == 0
    text = capsys.readouterr().out
    assert "device npu (emulated), overlap" in text
    (run,) = json.loads(out.read_text())["runs"]
    lines = {line["event"].strip(): line for line in run["device"]["lines"]}
    assert lines["blocking reads"]["total"] == 0
    assert lines["clear_c128_draft_states"]["total"] == run["device"]["steps"] == run["rounds"]
    assert lines["copies to the device"]["steady"] == 0
    assert lines["with nothing enqueued behind"]["total"] == 0


@pytest.mark.parametrize("drafter", ["ngram", "scripted"])
def test_the_command_refuses_overlap_with_drafters_that_need_the_history(
    drafter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--overlap", "--drafter", drafter]) == 2
    assert f"--overlap with --drafter {drafter}" in capsys.readouterr().err
