"""What every command refuses before it begins, in words that name the option, its value and what is allowed."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dsv4_npu import options
from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.cli import main
from dsv4_npu.emulation import command
from dsv4_npu.emulation.trees import command as trees
from dsv4_npu.emulation.trees.model import BUILT_IN, TINY
from dsv4_npu.errors import CapacityError, ConfigError, InputError
from dsv4_npu.planning import command as plan_command
from dsv4_npu.replay import cli as replay_cli
from tests.cli.test_options import ROOT, status_and_error
from tests.replay.traces import line, write

LLAMA, TREES = "--model tiny-llama", "--model tiny-llama --accept simulated"
PLAN = "--hbm-gib 64"


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is run."""

    def built(*args: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(command, "build_model", built)
    monkeypatch.setattr(trees, "build_target", built)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("run --host-mib 5", "--host-mib 5 with --retract recompute; it goes with --retract snapshot"),
        (f"run {LLAMA} --host-mib 5", "--host-mib 5 with --retract recompute"),
        ("run --simulated-tokens drafts", "--simulated-tokens with --model tiny: it goes with --model tiny-llama"),
        (f"run {LLAMA} --simulated-tokens fixed", "--simulated-tokens fixed with --accept greedy; use simulated"),
        ("run --spec none --drafter own", "--drafter own with --spec none: nothing is drafted"),
        (f"run {LLAMA} --spec none --drafter eagle", "--drafter eagle with --spec none"),
        (f"run {LLAMA} --spec none --steps 3", "--steps 3 with --spec none"),
        (f"run {TREES} --spec tree --simulated-length 99", "--simulated-length 99 with --spec tree; 1 to 4 is needed"),
        (f"run {TREES} --spec chain --steps 2 --simulated-length 4", "--simulated-length 4 with --spec chain; 1 to 3"),
        ("run --model nope", "'tiny', 'tiny-llama', 'tiny-mla', 'tiny_dspark'"),
        ("run --draft-tokens 0", "--draft-tokens 0: at least 1 is needed with speculation; --spec none is"),
        ("run --seed -1", f"--seed: '-1': an integer from 0 to {2**53:,} is needed"),
        (f"run --seed {2**53 + 1}", f"an integer from 0 to {2**53:,} is needed"),
        ("run --prompts /nope", "--prompts /nope: No such file or directory; a readable UTF-8"),
        (f"run {LLAMA} --prompts /nope", "--prompts /nope: No such file or directory; a readable UTF-8"),
        ("run --json /proc/x.json", "--json /proc/x.json: it cannot be written: No such file or directory"),
        ("run --topk 0", "--topk 0; 1 to 64 is needed"),
        (
            f"run {LLAMA} --spec chain --steps 2 --draft-tokens 7",
            "--draft-tokens 7 with --spec chain and --steps 2: a chain has one draft per step; at most 2",
        ),
        ("replay t --draft-tokens 0", "--draft-tokens 0: at least 1 is needed"),
        (f"replay t --seed {2**53 + 1}", f"an integer from 0 to {2**53:,} is needed"),
        (f"plan {PLAN} --model tiny-llama", "--model tiny-llama: a model with plain attention"),
        (f"plan {PLAN} --draft-tokens 0", "--draft-tokens 0: at least 1 is needed"),
        (f"serve-args {PLAN} --spec dspark --draft-tokens 0", "--draft-tokens 0: at least 1 is needed"),
        (f"serve-args {PLAN} --draft-model-path=", "--draft-model-path: '': the folder of a checkpoint is needed"),
        (f"serve-args {PLAN} --model-path=", "--model-path: '': the folder of a checkpoint is needed"),
        (f"plan {PLAN} --compare platform=a5,platform=a2", "platform is given twice"),
        (f"plan {PLAN} --compare swa-ratio=0.1,swa_ratio=0.2", "swa-ratio is given twice"),
        ("selftest --device npu:99", "--device npu:99: there is one emulated npu; npu or npu:0 is needed"),
    ],
)
def test_the_option_is_named(no_model: None, line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, error = status_and_error(capsys, *line.split())
    assert status == 2
    assert told in error


@pytest.mark.parametrize("words", [["run"], ["replay", "t"], ["plan", "--hbm-gib", "64"], ["selftest"]])
def test_an_output_without_a_name(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, error = status_and_error(capsys, *words, "--json", "")
    assert (status, "argument --json: '': the name of a file is needed" in error) == (2, True)


def test_a_trace_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "argument trace: '': the name of a file is needed" in status_and_error(capsys, "replay", "")[1]


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("spec", ["none", "chain"])
def test_tokens_that_hold_no_prompt(
    no_model: None, model: str, spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number that is offered is the least: with it the run begins, with one less it is refused."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a" * 301 + "\n\nb", encoding="utf-8")
    words = ["run", "--model", model, "--spec", spec, "--prompts", str(prompts), "--max-new-tokens", "90"]
    status, error = status_and_error(capsys, *words, "--tokens", "256")
    assert status == 2
    assert "--tokens 256: the longest of --prompts (301 tokens), --max-new-tokens 90 and " in error
    least = int(re.findall(r"at least --tokens (\d+) is needed", error)[0])
    assert least >= 391
    assert f"at least --tokens {least}" in status_and_error(capsys, *words, "--tokens", str(least - 1))[1]
    with pytest.raises(AssertionError, match="a model was built"):
        main([*words, "--tokens", str(least)])


@pytest.mark.parametrize(("tokens", "fits"), [(48, False), (63, False), (64, True)])
def test_the_check_of_tokens_is_the_allocators(tokens: int, fits: bool) -> None:
    alloc = KVAllocator(AllocSpec.plain(page_size=16, full_pages=tokens // 16, request_rows=2, row_width=96))
    if fits:
        options.check_tokens(tokens, 16, 40, 8, 2)
        alloc.admit_check(40 + 8 + 2)
        return
    with pytest.raises(ConfigError, match="need 4 FULL pages: 3 exist; at least --tokens 64 is needed"):
        options.check_tokens(tokens, 16, 40, 8, 2)
    with pytest.raises(CapacityError, match="needs 4 FULL pages: 3 exist"):
        alloc.admit_check(40 + 8 + 2)


def test_refusals_of_a_replay_name_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(write(tmp_path, [line(0, 7000, 10)]))
    assert main(["replay", trace, "--quiet", "--tokens", "1000"]) == 1
    assert re.search(r"needs \d+ FULL pages: --tokens 1000 gives 7", capsys.readouterr().out)
    assert main(["replay", trace, "--quiet", "--context", "1000"]) == 1
    assert "--context 1000 gives rows of 1024" in capsys.readouterr().out
    by_memory = argparse.Namespace(hbm_gib=1.5, tokens=None, context=9)
    told = replay_cli._refusal("a request of 9 tokens needs 9 C128 pages: 5 exist", by_memory)
    assert told == "a request of 9 tokens needs 9 C128 pages: --hbm-gib 1.5 gives 5"


def test_a_folder_is_a_checkpoint(no_model: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flash, llama = tmp_path / "mine", tmp_path / "ll"
    for folder in (flash, llama):
        folder.mkdir()
    shutil.copy(ROOT / "configs/models/v4_flash.json", flash / "config.json")
    (llama / "config.json").write_text(json.dumps(TINY))
    for source in (flash, flash / "config.json"):
        assert main(["serve-args", "--hbm-gib", "64", "--model", str(source)]) == 0
        assert f"--model-path {flash}" in capsys.readouterr().out
    assert main(["plan", "--hbm-gib", "64", "--model", str(flash)]) == 0
    assert "mine" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="a model was built"):
        main(["run", "--model", str(llama)])
    (flash / "config.json").unlink()
    assert "is not known" in status_and_error(capsys, "plan", "--hbm-gib", "64", "--model", str(flash))[1]


def test_a_name_comes_before_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("v4_flash").mkdir()
    Path("v4_flash/config.json").write_text("{}")
    assert main(["plan", "--hbm-gib", "64"]) == 0
    assert status_and_error(capsys, "plan", "--hbm-gib", "64", "--model", "./v4_flash")[0] == 2


def test_a_llama_without_its_vocabulary(no_model: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ll.json"
    for raw, told in (
        ({}, "ll.json: vocab_size is missing from the configuration"),
        ({"vocab_size": "many"}, "ll.json: vocab_size = 'many'; an integer of at least 1 is needed"),
        ({"vocab_size": 9}, "ll.json: vocab_size = 9; bytes need 256 token ids"),
    ):
        file.write_text(json.dumps({"model_type": "llama", **raw}))
        status, error = status_and_error(capsys, "run", "--model", str(file))
        assert (status, told in error) == (2, True), error


def test_a_repeated_combination_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(command, "_run_all", lambda console, rank, args, *rest: seen.append(args) or [])
    monkeypatch.setattr(trees, "_run_kinds", lambda args, raw, rank: seen.append(args) or [])
    repeated = ["--spec", "none", "--spec", "chain", "--spec", "none"]
    main(["run", *repeated, "--platform", "a5", "--platform", "a5"])
    main(["run", "--model", "tiny-llama", *repeated])
    assert [args.spec for args in seen] == [["none", "chain"]] * 2
    assert seen[0].platform == ["a5"]


def test_blocks_of_another_size_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve-args", *PLAN.split(), "--spec", "dspark"]
    note = "# --draft-tokens 3: the checkpoint was trained for blocks of dspark_block_size = 5\n"
    for more, noted in (([], False), (["--draft-tokens", "5"], False), (["--draft-tokens", "3"], True)):
        assert main([*words, *more]) == 0
        assert (note in capsys.readouterr().out) == noted


def test_a_full_disk_names_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(write(tmp_path, [line(0, 700, 10)]))
    for words in (["plan", *PLAN.split()], ["replay", trace, "--quiet"], ["replay", trace, "--quiet", "--report"]):
        option = [] if words[-1] == "--report" else ["--json"]
        status, error = status_and_error(capsys, *words, *option, "/dev/full")
        name = (words + option)[-1]
        assert (status, f"{name} /dev/full: it cannot be written: No space left on device" in error) == (2, True)


def test_a_check_of_outputs_leaves_nothing(tmp_path: Path) -> None:
    new, old, link = tmp_path / "new", tmp_path / "old", tmp_path / "link"
    old.write_text("kept")
    link.symlink_to(tmp_path / "elsewhere")
    options.check_outputs(("--json", new), ("--report", old), ("--json", link))
    assert {path.name for path in tmp_path.iterdir()} == {"old", "link"}
    assert old.read_text() == "kept"
    with (
        pytest.raises(InputError, match=r"^--json x: it cannot be written: No space"),
        options.writing("--json", Path("x")),
    ):
        Path("/dev/full").write_text("x")


def test_names_of_plain_models() -> None:
    assert tuple(BUILT_IN) == options.PLAIN_MODELS


@pytest.mark.parametrize("module", [command, replay_cli, plan_command])
def test_no_message_names_what_is_no_option(module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    assert "emulated_kernels" not in parser.format_help()
    assert "emulated_kernels" not in status_and_error(capsys, "plan", *PLAN.split(), "--c128-page-size", "8")[1]
