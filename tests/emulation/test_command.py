"""The run command: exit status, files, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4_npu.cli import main
from dsv4_npu.emulation import parking
from dsv4_npu.emulation.engine import Engine
from dsv4_npu.movement import Snapshot

PROMPTS = "Two books, one harbour.\n\nThe miller opens the lower gate first.\n"


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text(PROMPTS, encoding="utf-8")
    return str(path)


def test_numbers_and_picture_of_a_run(prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.html"
    files = ["--json", str(out), "--report", str(picture)]
    kinds = ["--spec", "chain", "--spec", "none"]
    status = main(["run", "--prompts", prompts, "--max-new-tokens", "6", "--platform", "a5", *kinds, *files])
    assert status == 0
    assert "identical = yes" in capsys.readouterr().out
    runs = json.loads(out.read_text())["runs"]
    assert [run["ok"] for run in runs] == [True, True]
    assert [len(r["outputs"]) for r in runs[0]["requests"]] == [6, 6]
    assert runs[0]["requests"][0]["outputs"] == runs[1]["requests"][0]["outputs"]
    for kind in ("chain", "none"):
        assert "outputs equal the oracle" in (tmp_path / f"out-a5-{kind}.html").read_text()
    assert not picture.exists()


def test_a_wrong_output_gives_status_1(prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine.run

    def wrong(self: Engine) -> list[object]:
        runs = real(self)
        runs[0].outputs[-1] = (runs[0].outputs[-1] + 1) % 320
        return runs  # type: ignore[return-value]

    monkeypatch.setattr(Engine, "run", wrong)
    assert main(["run", "--prompts", prompts, "--max-new-tokens", "3"]) == 1


def test_native_rows_are_compared_with_a_plain_decode(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.html"
    options = ["--prompts", prompts, "--max-new-tokens", "8", "--platform", "a5", "--rows", "native"]
    files = ["--json", str(out), "--report", str(picture)]
    assert main(["run", *options, "--drafter", "scripted", *files]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    (run,) = json.loads(out.read_text())["runs"]
    assert run["reference"] == "a plain decode over the same rows"
    assert "rows fp8_packed, keys fp8_fp32" in run["label"]
    natives = [request["native"] for request in run["requests"]]
    calls = sum(len(one["close_calls"]) for one in natives)
    assert calls > 0
    assert f"{calls} outputs have a top-2 margin within the rows' error, 0 of them differ" in shown
    assert all(one["max_row_error"] > 1e-3 for one in natives)
    assert max(max(request["accept_histogram"], key=int) for request in run["requests"]) == "4"
    assert "those of a plain decode over the same rows" in picture.read_text()

    real = Engine.run

    def wrong(self: Engine) -> list[object]:
        runs = real(self)
        if self.config.verify_width > 1:
            settled = {c["position"] for c in natives[0]["close_calls"]}
            at = next(i for i in range(8) if i not in settled)
            runs[0].outputs[at] = (runs[0].outputs[at] + 1) % 320
        return runs  # type: ignore[return-value]

    monkeypatch.setattr(Engine, "run", wrong)
    assert main(["run", *options]) == 1


@pytest.mark.parametrize("how", ["snapshot", "recompute"])
def test_few_pages_make_requests_leave_and_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    texts, out = tmp_path / "prompts.txt", tmp_path / "out.json"
    texts.write_text("\n\n".join(word * 20 for word in ("river ", "lamp. ", "stone, ")), encoding="utf-8")
    options = ["--prompts", str(texts), "--max-new-tokens", "20", "--tokens", "512", "--retract", how]
    assert main(["run", *options, "--json", str(out)]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["retractions"] > 0
    shown = " ".join(capsys.readouterr().out.split())
    if how == "recompute":
        assert run["parking"] is None
        assert f"retractions: {run['retractions']}, each computed again" in shown
        return
    counts = run["parking"]
    assert counts["saved"] + counts["refused"] + counts["empty"] == run["retractions"]
    assert counts["restored"] == counts["saved"] > 0
    assert f"{counts['restored']} restored with {counts['positions']} positions" in shown


def test_rows_of_draft_stages_leave_and_come_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, out = tmp_path / "prompts.txt", tmp_path / "out.json"
    texts.write_text("\n\n".join(word * 20 for word in ("river ", "lamp. ", "stone, ")), encoding="utf-8")
    options = ["--prompts", str(texts), "--max-new-tokens", "20", "--tokens", "512", "--retract", "snapshot"]
    options += ["--spec", "mtp", "--platform", "a5", "--overlap", "--json", str(out)]
    assert main(["run", *options]) == 0
    assert json.loads(out.read_text())["runs"][0]["parking"]["restored"] > 0
    whole = parking.take_snapshot

    def without_stages(*args: Any) -> Snapshot:
        snapshot = whole(*args)
        return replace(snapshot, rows={**snapshot.rows, "swa": tuple(t[:5] for t in snapshot.rows["swa"])})

    monkeypatch.setattr(parking, "take_snapshot", without_stages)
    assert main(["run", *options]) == 1, "the stages propose something else"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--spec", "chain", "--draft-tokens", "10"], "write pad 10"),
        (["--spec", "chain", "--draft-tokens", "-1"], "--draft-tokens = -1"),
        (["--c128-page-size", "3"], "--c128-page-size = 3; a power of two"),
        (["--page-size", "100"], "--page-size = 100"),
        (["--temperature", "0.5"], "--temperature 0.5 with greedy"),
        (["--tokens", "128"], "at least --tokens 768 is needed"),
        (["--rows", "native", "--model", "tiny-llama"], "--rows native"),
        (["--rows", "native", "--accept", "rejection", "--temperature", "1"], "--rows native"),
        (["--temperature", "-1"], "--temperature -1"),
        (["--model", "nothing"], "'nothing' is not known"),
        (["--prompts", "/nowhere/p.txt"], "/nowhere/p.txt"),
        (["--prompts", "README.md", "--json", "README.md"], "--json README.md: --prompts names the same file"),
        (["--json", "/nowhere/out.json"], "--json /nowhere/out.json"),
        (["--report", "/tmp"], "--report /tmp"),
        (["--max-new-tokens", "100000"], "--max-new-tokens on top of the longest of --prompts: context = "),
    ],
)
def test_wrong_options_are_named(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *options]) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert "Traceback" not in shown
