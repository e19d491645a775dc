"""``dsv4-npu run`` with draft stages: what it prints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_npu.cli import main
from dsv4_npu.emulation.stages import StageRounds


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("Two books, one harbour.\n\nThe miller opens the lower gate first.\n", encoding="utf-8")
    return str(path)


def test_own_drafts_of_both_kinds(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--spec", "mtp", "--spec", "dspark", "--drafter", "own", "--overlap", "--max-new-tokens", "3"]
    assert main(["run", "--prompts", prompts, *options]) == 0
    shown = capsys.readouterr().out
    assert "tiny on a3, mtp D=4, own drafts, overlap" in shown
    assert "tiny_dspark on a3, dspark D=6, own drafts, overlap" in shown
    assert "identical = yes" in shown


def test_native_rows(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Stage rows are stored in the platform's formats like the target's."""
    options = ["--spec", "mtp", "--rows", "native", "--platform", "a5", "--max-new-tokens", "4"]
    assert main(["run", "--prompts", prompts, *options]) == 0
    assert "own drafts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--spec", "mtp", "--drafter", "ngram"], "--spec mtp with --drafter ngram"),
        (["--spec", "chain", "--drafter", "own"], "--spec chain with --drafter own"),
        (["--spec", "mtp", "--draft-tokens", "10"], "write pad 10"),
        (["--spec", "mtp", "--model", "tiny_dspark"], "tiny_dspark has 3 draft stages"),
    ],
)
def test_what_cannot_be_is_refused(
    options: list[str], words: str, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--prompts", prompts, *options]) == 2
    assert words in capsys.readouterr().err


def test_wrong_proposals_give_status_1(
    prompts: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["run", "--prompts", prompts, "--spec", "mtp", "--max-new-tokens", "4"]
    assert main(options) == 0
    assert "proposals from the stages' own rows: all equal" in capsys.readouterr().out
    monkeypatch.setattr(StageRounds, "committed", lambda self, *given: None)
    assert main(options) == 1
    shown = capsys.readouterr().out
    assert "of them DIFFER" in shown
    assert "identical = yes" in shown
