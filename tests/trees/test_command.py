"""``run`` with trees and with ranks: exit status, files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4_npu.alloc import KVAllocator
from dsv4_npu.cli import main
from dsv4_npu.emulation.trees.engine import TreeEngine
from dsv4_npu.emulation.trees.model import TINY
from dsv4_npu.errors import AuditError

PROMPTS = "Two books, one harbour.\n\nThe miller opens the lower gate first.\n"


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text(PROMPTS, encoding="utf-8")
    return str(path)


def run(prompts: str, *options: str, model: str = "tiny-llama", new: int = 8) -> int:
    return main(["run", "--model", model, "--prompts", prompts, "--max-new-tokens", str(new), *options])


def test_numbers_of_a_run(prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    kinds = ["--spec", "tree", "--spec", "chain", "--spec", "none"]
    assert run(prompts, *kinds, "--draft-tokens", "3", "--page-size", "5", "--json", str(out)) == 0
    assert "identical = yes" in capsys.readouterr().out
    runs = json.loads(out.read_text())["runs"]
    assert [one["label"] for one in runs] == [
        "tiny-llama, tree topk=4 steps=3 D=4, eagle drafts",
        "tiny-llama, chain D=4, eagle drafts",
        "tiny-llama, none",
    ]
    assert [(one["ok"], one["simulated"], one["audit"], one["leaked"]) for one in runs] == [
        (True, False, "clean", [])
    ] * 3
    outputs = [[request["outputs"] for request in one["requests"]] for one in runs]
    assert outputs[0] == outputs[1] == outputs[2]
    assert runs[0]["families"][0]["name"] == "FULL (keys and values)"


def test_scripted_trees_and_a_llama_from_a_file(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**TINY, "num_key_value_heads": 4}))
    assert run(prompts, "--drafter", "scripted", "--topk", "2", "--steps", "4", model=str(config)) == 0
    assert "D=10, scripted drafts" in " ".join(capsys.readouterr().out.split())


FIXED, DRAFTS = ["--simulated-length", "2"], ["--spec", "chain", "--simulated-tokens", "drafts"]


@pytest.mark.parametrize("options", [FIXED, DRAFTS])
def test_simulated_runs_say_so(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """Made-up tokens are compared with nothing; drafts that became the history have the oracle's logits."""
    out = tmp_path / "out.json"
    assert run(prompts, "--accept", "simulated", *options, "--json", str(out)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "simulated acceptance: lengths and tokens are made up" in shown
    assert "identical = " not in shown
    assert "yes" not in shown
    (one,) = json.loads(out.read_text())["runs"]
    assert one["simulated"]
    assert "simulated acceptance (" in one["label"]
    assert all(request["simulated"] for request in one["requests"])
    compared = options is DRAFTS
    assert one["ok"]
    assert one["identical"] is (True if compared else None)
    for request in one["requests"]:
        assert request["identical"] is (True if compared else None)
        assert (request["max_logit_error"] is not None) == compared
        if compared:
            assert request["max_logit_error"] < 1e-10
    # Two cells of each of the two requests, one of the summary.
    assert shown.count("–") == (0 if compared else 5)
    assert ("e+00" in shown or "e-1" in shown) == compared


def leak(patch: pytest.MonkeyPatch) -> None:
    """A request row that nobody gives back."""
    real = TreeEngine.run

    def leaking(self: TreeEngine) -> list[Any]:
        runs = real(self)
        self.alloc.open("nobody")
        return runs

    patch.setattr(TreeEngine, "run", leaking)


def break_audit(patch: pytest.MonkeyPatch) -> None:
    """An audit that finds something."""

    def broken(self: KVAllocator) -> None:
        raise AuditError("FULL page 3: no owner")

    patch.setattr(KVAllocator, "audit", broken)


@pytest.mark.parametrize("fault", [leak, break_audit])
def test_simulated_runs_fail_by_audit_and_leaks(
    prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    out = tmp_path / "out.json"
    fault(monkeypatch)
    assert run(prompts, "--accept", "simulated", *FIXED, "--json", str(out), new=3) == 1
    (one,) = json.loads(out.read_text())["runs"]
    assert one["ok"] is False
    assert one["identical"] is None


def test_simulated_drafts_with_wrong_logits_are_told(
    prompts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = TreeEngine.run

    def wrong(self: TreeEngine) -> list[Any]:
        runs = real(self)
        runs[0].logits[-1] = runs[0].logits[-1] + 1.0
        return runs

    monkeypatch.setattr(TreeEngine, "run", wrong)
    assert run(prompts, "--accept", "simulated", *DRAFTS, new=3) == 1
    assert "NO" in capsys.readouterr().out


def test_a_wrong_output_gives_status_1(prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TreeEngine.run

    def wrong(self: TreeEngine) -> list[Any]:
        runs = real(self)
        runs[0].outputs[-1] = (runs[0].outputs[-1] + 1) % 320
        return runs

    monkeypatch.setattr(TreeEngine, "run", wrong)
    assert run(prompts, new=3) == 1


def test_a_leaked_row_gives_status_1(prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leak(monkeypatch)
    assert run(prompts, new=3) == 1


LLAMA, DSV4 = ["--model", "tiny-llama"], ["--model", "tiny"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            [*DSV4, "--spec", "tree"],
            "--spec tree with --model tiny: DeepSeek-V4 takes chains only, because the compressor",
        ),
        ([*DSV4, "--topk", "2"], "--topk 2 with --model tiny: DeepSeek-V4 takes chains only"),
        ([*DSV4, "--steps", "3"], "--steps with --model tiny: it goes with --model tiny-llama"),
        ([*DSV4, "--drafter", "eagle"], "--drafter eagle with --model tiny"),
        ([*DSV4, "--accept", "target-only"], "--accept target-only with --model tiny"),
        ([*DSV4, "--accept", "simulated"], "--accept simulated with --model tiny"),
        ([*DSV4, "--tp", "9"], "--tp 9; 1 to 8 is needed"),
        ([*DSV4, "--tp", "2", "--device", "npu"], "--tp 2 with --device npu"),
        ([*LLAMA, "--tp", "9"], "--tp 9; 1 to 8 is needed"),
        ([*LLAMA, "--topk", "0"], "--topk 0; 1 to 64 is needed"),
        ([*LLAMA, "--topk", "65"], "--topk 65; 1 to 64 is needed"),
        ([*LLAMA, "--steps", "0"], "--steps 0; 1 to 64 is needed"),
        ([*LLAMA, "--draft-tokens", "0"], "--draft-tokens 0 with --spec tree; at least 1"),
        ([*LLAMA, "--spec", "chain", "--draft-tokens", "-1"], "--draft-tokens -1 with --spec chain"),
        (
            [*LLAMA, "--topk", "2", "--steps", "2", "--draft-tokens", "7"],
            "--draft-tokens = 7; a tree of --topk = 2 and --steps = 2 has 6 drafts to choose from",
        ),
        ([*LLAMA, "--spec", "chain", "--topk", "2"], "--topk 2 with --spec chain; 1, or --spec tree, is needed"),
        ([*LLAMA, "--spec", "dspark"], "--spec dspark with --model tiny-llama; one of none, chain, tree"),
        ([*LLAMA, "--drafter", "ngram"], "--drafter ngram with --model tiny-llama; eagle or scripted"),
        ([*LLAMA, "--accept", "rejection"], "--accept rejection with --model tiny-llama"),
        ([*LLAMA, "--temperature", "0.5"], "--temperature 0.5 with --accept greedy; use --accept target-only"),
        ([*LLAMA, "--platform", "a3"], "--platform with --model tiny-llama: it goes with DeepSeek-V4 models only"),
        ([*LLAMA, "--device", "npu"], "--device npu with --model tiny-llama"),
        ([*LLAMA, "--overlap"], "--overlap with --model tiny-llama"),
        ([*LLAMA, "--rows", "native"], "--rows native with --model tiny-llama: it goes with DeepSeek-V4 models only"),
        ([*LLAMA, "--retract", "snapshot"], "--retract snapshot with --model tiny-llama"),
        ([*LLAMA, "--tokens", "64"], "FULL pages: 4 exist"),
        ([*LLAMA, "--report", "x.html"], "--report with --model tiny-llama"),
        ([*LLAMA, "--simulated-length", "2"], "--simulated-length 2 with --accept greedy"),
        ([*LLAMA, "--accept", "simulated", "--simulated-length", "0"], "--simulated-length = 0; at least 1"),
        (
            [*LLAMA, "--accept", "simulated", "--simulated-tokens", "drafts"],
            "--simulated-tokens = 'drafts' with --topk = 4; 1 is needed",
        ),
        ([*LLAMA, "--drafter", "scripted", "--accept", "simulated"], "--drafter scripted follows the greedy oracle"),
        ([*LLAMA, "--prompts", "/nowhere/p.txt"], "/nowhere/p.txt"),
        ([*LLAMA, "--json", "/nowhere/out.json"], "--json /nowhere/out.json"),
    ],
)
def test_wrong_options_are_named(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *options]) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("value", ["0", "-2", "two"])
def test_ranks_are_a_number(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--tp", value])
    assert f"argument --tp: {value!r}: an integer of at least 1 is needed" in capsys.readouterr().err


def test_a_config_that_is_no_llama(prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    for raw, words in (
        ({**TINY, "num_key_value_heads": 3}, "num_key_value_heads = 3; a divisor of num_attention_heads = 4"),
        ({**TINY, "hidden_act": "nothing"}, "transformers refuses the llama configuration"),
        ({**TINY, "vocab_size": 100}, "bytes need 256 token ids"),
        ({**TINY, "hidden_size": 4096, "intermediate_size": 16384}, "parameters; the float64 emulation runs up to"),
    ):
        config.write_text(json.dumps(raw))
        assert run(prompts, model=str(config)) == 2
        assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--accept", "rejection"], ["--model", "tiny-llama", "--accept", "target-only"]])
def test_two_ranks(prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    out = tmp_path / "out.json"
    more = ["--temperature", "0.8", "--tp", "2", "--max-new-tokens", "8", "--json", str(out)]
    assert main(["run", "--prompts", prompts, *options, *more]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 ranks: histories identical after" in shown
    (one,) = json.loads(out.read_text())["runs"]
    assert [rank["same_history"] and rank["ok"] for rank in one["ranks"]] == [True, True]
    assert one["ranks"][1]["overruled"] > 0
