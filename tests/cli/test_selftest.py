"""The self-test: it passes here, it names the cases of broken ops, and no emulation passes as hardware."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_npu import ops
from dsv4_npu.budget import budget_of
from dsv4_npu.cli import main
from dsv4_npu.emulation import device as emulated
from dsv4_npu.errors import UnavailableError
from dsv4_npu.selftest import checks, command, timing
from dsv4_npu.selftest.case import FUNCTIONS
from dsv4_npu.selftest.sampling_cases import SGLANG_FUNCTIONS

CPU = torch.device("cpu")
torch.set_num_threads(1)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_everything_passes_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    small = ["--model", "tiny", "--tokens", "65536", "--max-running", "4"]
    assert main(["selftest", "--no-timings", "--json", str(out), *small]) == 0
    report = json.loads(out.read_text())
    text = capsys.readouterr().out
    assert (report["device"], report["hardware"], report["emulated"]) == ("cpu", False, False)
    assert report["verdict"] == {
        "cases": len(report["results"]),
        "passed": len(report["results"]),
        "failed": 0,
        "skipped": 0,
    }
    assert {one["op"] for one in report["results"]} == {*FUNCTIONS, *SGLANG_FUNCTIONS, "compressor", "pools"}
    assert report["versions"]["torch"] == torch.__version__
    assert "please send it back" in text
    assert "EMULATED" not in text


def test_the_handed_cases_are_there() -> None:
    numbers = {int(found[1]) for one in checks.table() if (found := re.match(r"case (\d+):", one.name))}
    assert numbers >= {7, 8, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42}
    names = [(one.op, one.name) for one in checks.table()]
    assert len(names) == len(set(names))


def test_every_case_sees_an_op_that_does_nothing() -> None:
    """Each case but those without work fails when its op leaves everything as it was."""

    def nothing(*args: Any, **named: Any) -> Any:
        return None

    blind = {one.op: {"no requests are no work", "no pairs are no work"} for one in checks.table()}
    blind["clear_c128_draft_states_"] |= {"all accepted: nothing is cleared"}
    for result in checks.run_cases(CPU, False, dict.fromkeys({**FUNCTIONS, **SGLANG_FUNCTIONS}, nothing)):
        if result.case not in blind[result.op]:
            assert result.outcome == "failed", result


def sequential_move(slab: torch.Tensor, tgt: torch.Tensor, src: torch.Tensor) -> None:
    rows = slab.view(slab.shape[0], -1, slab.shape[4])
    for target, source in zip(tgt.flatten().tolist(), src.flatten().tolist(), strict=True):
        rows[:, target] = rows[:, source]


def kept_root_cleared(**named: Any) -> None:
    named["accept_lens"] = named["accept_lens"] - 1
    ops.clear_c128_draft_states_(**named, backend="ref")


def unchecked_clear(**named: Any) -> None:
    ops.clear_c128_draft_states_(**named, write_pad=200, backend="ref")


def no_siblings(**named: Any) -> None:
    named["retrieve_next_sibling"] = torch.full_like(named["retrieve_next_sibling"], -1)
    ops.verify_tree_greedy(**named)


def coin_one_breaks(**named: Any) -> None:
    ops.chain_speculative_sampling(**named)
    last = named["uniform_samples_for_final_sampling"] == 1.0
    named["predicts"].view(last.shape[0], -1)[last, 0] = named["target_probs"].shape[2] - 1


def width_is_drafts(**named: Any) -> None:
    """The row stride of accept_index taken for D."""
    named["accept_index"].fill_(-1)
    rows = named["retrive_index"][:, : named["accept_index"].shape[1]]
    named["accept_index"].view(-1)[: rows.numel()] = rows.flatten().to(torch.int32)


def far_rows_wrap(state: torch.Tensor, req_pool_indices: torch.Tensor, ring_size: int) -> None:
    rows = req_pool_indices * ring_size
    ops.clear_request_states_(state, torch.where(rows * 1024 >= 2**31, 0, req_pool_indices), ring_size)


@pytest.mark.parametrize(
    ("op", "broken", "case"),
    [
        ("move_kv_", sequential_move, "case 42: upwards over its own sources"),
        ("move_kv_", sequential_move, "case 42: a swap"),
        ("clear_c128_draft_states_", kept_root_cleared, "all accepted: nothing is cleared"),
        ("clear_c128_draft_states_", unchecked_clear, "case 7: a width above the pad"),
        ("clear_request_states_", far_rows_wrap, "case 39: the clear of a bank at row 4,200,000"),
        ("verify_tree_greedy", no_siblings, "33 trees of 5 nodes"),
        (
            "chain_speculative_sampling",
            coin_one_breaks,
            "case 38: the only token of positive probability is 2047 of 3001",
        ),
        (
            "sampling.verify_tree_greedy",
            width_is_drafts,
            "case 35: a row of accept_index is as wide as the buffer, not D",
        ),
    ],
)
def test_a_broken_op_fails_by_the_name_of_its_case(op: str, broken: Callable[..., Any], case: str) -> None:
    cases = [one for one in checks.table() if one.op == op]
    assert {r.outcome for r in checks.run_cases(CPU, False, None, cases)} == {"passed"}
    failed = {r.case: r.detail for r in checks.run_cases(CPU, False, {op: broken}, cases) if r.outcome == "failed"}
    assert failed[case]


def test_a_broken_op_is_in_the_report_and_in_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "FUNCTIONS", {**FUNCTIONS, "move_kv_": sequential_move})
    out = tmp_path / "out.json"
    assert main(["selftest", "--ops", "move", "--json", str(out)]) == 1
    report = json.loads(out.read_text())
    assert report["verdict"]["failed"] >= 2
    assert "FAILED move_kv_: case 42: a swap: slab is " in capsys.readouterr().out


def test_a_case_that_raises_or_has_no_room_stops_nothing() -> None:
    def raising(**_: Any) -> None:
        raise RuntimeError("no such kernel")

    def full(*_: Any) -> None:
        raise MemoryError("no room for 17 GB")

    cases = [one for one in checks.table() if one.op == "clear_request_states_"]
    assert {r.detail for r in checks.run_cases(CPU, False, {"clear_request_states_": raising}, cases[:2])} == {
        "raised RuntimeError: no such kernel"
    }
    (far,) = (one for one in cases if "case 39" in one.name)
    (result,) = checks.run_cases(CPU, False, {"clear_request_states_": full}, [far])
    assert (result.outcome, result.detail) == ("skipped", "no room for 17 GB")


def test_slow_cases_are_skipped_in_the_interpreter() -> None:
    cases = [one for one in checks.table() if one.slow]
    assert cases
    assert {r.outcome for r in checks.run_cases(CPU, True, None, cases)} == {"skipped"}


def test_a_compressor_that_loses_rows_fails() -> None:
    results = list(checks.probe_compressors(lambda batch: None, CPU))
    assert {one.outcome for one in results} == {"failed"}
    assert all("was not saved" in one.detail for one in results)


def test_pools_of_other_sizes_than_the_budgets_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    ((config, _), *_) = command._planned(options("--platform", "a3", "--model", "tiny", "--max-running", "2"))
    sizes = checks.PoolSizes(8, 8, 4, 2)
    for device in ("cpu", "meta"):
        assert checks.build_pools(config, sizes, device).outcome == "passed"
    bigger = budget_of(config, checks.PoolSizes(9, 8, 4, 2))
    monkeypatch.setattr(checks, "budget_of", lambda config, sizes: bigger)
    result = checks.build_pools(config, sizes, "meta")
    assert (result.outcome, "the budget says" in result.detail) == ("failed", True)


def test_timings_cover_every_op_with_the_bytes_of_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SERIES", 1e-4)
    monkeypatch.setattr(timing, "REPEATS", 1)
    monkeypatch.setattr(timing, "VOCAB", 1000)
    found = {one.op: one for one in timing.timings(CPU, 1e9, batch=2)}
    assert set(found) == set(FUNCTIONS)
    assert all(one.call_us > 0 and one.floor_us == pytest.approx(one.bytes / 1e3) for one in found.values())
    # V4-Flash, 20 layers of 4096-byte rows, three rejected rows of two requests
    assert found["clear_c128_draft_states_"].bytes == 20 * 4096 * 3 * 2
    assert timing.copy_bandwidth(CPU, 2**16) > 0


def test_the_emulated_device_is_named_everywhere(tmp_path: Path) -> None:
    script = "import sys; from dsv4_npu.cli import main; sys.exit(main(sys.argv[1:]))"
    out = tmp_path / "out.json"
    words = ["selftest", "--device", "npu:0", "--ops", "fill", "clear_request", "--json", str(out)]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert (report["emulated"], report["hardware"], report["timings"]) == (True, False, [])
    assert report["device"] == f"npu:0 ({command.EMULATED})"
    assert done.stdout.count(command.EMULATED) == 2


def test_a_broken_torch_npu_is_not_emulated_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_npu.py").write_text("raise OSError('libhccl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(emulated, "is_active", lambda: False)
    monkeypatch.setattr(emulated, "activate", lambda: pytest.fail("the emulation was taken instead"))
    with pytest.raises(UnavailableError, match=r"torch_npu is installed but cannot be imported \(OSError: libhccl"):
        command.find_target("npu:0")
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    (tmp_path / "torch_npu.py").write_text("")
    monkeypatch.setattr(torch, "npu", None, raising=False)
    with pytest.raises(UnavailableError, match="sees no device"):
        command.find_target("npu")


def test_a_real_npu_is_named_and_planned_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        """What torch_npu puts into torch.npu, as far as it is asked."""

        is_available = staticmethod(lambda: True)
        set_device = staticmethod(lambda device: None)
        get_device_name = staticmethod(lambda device: "Ascend950PR_9589")

    monkeypatch.setattr(emulated, "is_active", lambda: False)
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch, "npu", Backend, raising=False)
    monkeypatch.setattr(torch, "device", lambda name: name)
    target = command.find_target("npu:1")
    assert (target.device, target.hardware, target.emulated, target.kind) == ("npu:1", True, False, "a5")
    assert command.kind_of("Ascend910_9382") == "a3"
    assert command.kind_of("Ascend910B3") == "a2"
    assert command.kind_of("Ascend310P") is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "cuda"], "'cuda': cpu, npu or npu:0 is needed"),
        (["--ops", "nothing"], "--ops nothing: no op begins so"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: the folder"),
        (["--tokens", "5"], "--tokens = 5"),
        (["--fraction", "2"], "--fraction: '2': a number above 0, up to 1"),
    ],
)
def test_wrong_options_are_named(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["selftest", *words])
    except SystemExit as error:
        status = int(str(error.code))
    assert status == 2
    assert told in capsys.readouterr().err
