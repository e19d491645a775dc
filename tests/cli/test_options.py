"""What the commands share: numbers as text, option names in errors, output files; each command as a user runs it."""

from __future__ import annotations

import argparse
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from dsv4_npu import options, reading
from dsv4_npu.cli import main
from dsv4_npu.errors import ConfigError, InputError
from dsv4_npu.replay import cli as replay_cli
from tests.replay.traces import line, mixed, write

ROOT = Path(__file__).parents[2]


def status_and_error(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    try:
        status = main(list(words))
    except SystemExit as error:
        status = int(str(error.code))
    return status, capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (options.positive, "7", 7),
        (options.whole(0, 9), "0", 0),
        (options.share, "0", 0.0),
        (options.share_above_zero, "1", 1.0),
        (options.above_zero, "2.5", 2.5),
        (options.gib, "64.1", Fraction(641, 10)),
        (options.gib, "1e2", Fraction(100)),
        (options.gib, ".5", Fraction(1, 2)),
    ],
)
def test_numbers_are_read(kind: argparse._ActionType, text: str, value: object) -> None:
    assert kind(text) == value  # type: ignore[operator]


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (options.positive, "x", "'x': an integer of at least 1 is needed"),
        (options.positive, "0", "'0': an integer of at least 1 is needed"),
        (options.integer, "x", "'x': an integer is needed"),
        (options.integer, "-" + "9" * 400, "an integer from -9,007,199,254,740,992 to"),
        (options.positive, "9" * 5000, "…': an integer of at least 1 is needed"),
        (options.positive, "9" * 400, f"…': an integer from 1 to {2**53:,} is needed"),
        (options.whole(1, 1024), "1025", "'1025': an integer from 1 to 1,024 is needed"),
        (options.share, "1.01", "a number from 0 to 1 is needed"),
        (options.share, "nan", "a number from 0 to 1 is needed"),
        (options.share_above_zero, "0", "'0': a number above 0, up to 1 is needed"),
        (options.above_zero, "inf", "a number above 0 is needed"),
        (options.finite, "-inf", "a finite number is needed"),
        (options.finite, "warm", "'warm': a finite number is needed"),
        (options.gib, "1e999999999", "a number of GiB, 0 to 16,384, is needed"),
        (options.gib, "1/0", "a number of GiB"),
        (options.gib_above_zero, "0.0", "a number of GiB above 0 is needed"),
    ],
)
def test_other_text_is_refused_with_what_is_allowed(kind: argparse._ActionType, text: str, words: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        kind(text)  # type: ignore[operator]
    assert words in str(caught.value)
    assert len(str(caught.value)) < 120


def test_json_is_refused_by_name() -> None:
    for text, words in (
        ("[" * 100000, "nested too deeply"),
        ("1" * 5000, "too many digits"),
        ('{\n"a": }', r"\(line 2, column 6\)"),
        ("{]", r"\(column 2\)"),
    ):
        with pytest.raises(InputError, match=f"^the file: .*{words}"):
            reading.parse_json(text, "the file", InputError)
    assert reading.shown(10**5000) == "a number of 5000 digits"
    assert reading.shown("x" * 100) == "'" + "x" * 58 + "…"


def test_fields_become_options() -> None:
    told = r"^here: verify --draft-tokens = 3, c4_page_size = 5, --page-size = 1$"
    with pytest.raises(ConfigError, match=told), options.options_named(where="here: "):
        raise ConfigError("verify draft_tokens = 3, c4_page_size = 5, page_size = 1")


@pytest.mark.parametrize("command", ["run", "replay"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--draft-tokens 12", "--draft-tokens = 12"),
        ("--c128-page-size 24", "--c128-page-size = 24; a power of two"),
        ("--c128-page-size 1048576", "--c128-page-size = 1048576; at most"),
        ("--swa-ratio 0", "--swa-ratio: '0': a number above 0, up to 1 is needed"),
        ("--swa-ratio 1.5", "--swa-ratio: '1.5': a number above 0, up to 1 is needed"),
    ],
)
def test_run_and_replay_name_the_option(
    command: str, given: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = [str(write(tmp_path, mixed(1)))] if command == "replay" else []
    status, told = status_and_error(capsys, command, *trace, *given.split())
    assert status == 2
    assert words in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run", "--batch", "x"), "--batch: 'x': an integer from 1 to 1,024 is needed"),
        (("run", "--page-size", "100"), "--page-size = 100; a multiple of 128"),
        (("replay", "t", "--limit", "x"), "--limit: 'x': an integer of at least 1 is needed"),
        (("replay", "t", "--context", "9999999"), "--context = 9999999; 1 to 1048576"),
        (("replay", "t", "--tokens", "5"), "--tokens = 5; an integer of at least 128"),
        (("replay", "t", "--tokens", "99999999999"), "--tokens: '99999999999': an integer from 1 to 2,147,483,648"),
        (("replay", "t", "--hbm-gib", "900000"), "--hbm-gib: '900000': a number of GiB, 0 to 16,384, is needed"),
        (("replay", "t", "--model", "tiny", "--context", "8000", "--hbm-gib", "9000"), "--hbm-gib 9000: "),
        (("replay", "t", "--max-running", "100000000"), "--max-running: '100000000': an integer from 1 to 65,536"),
        (("replay", "t", "--seed", "-1"), "--seed: '-1': an integer from 0 to 9,007,199,254,740,992 is needed"),
    ],
)
def test_values_without_sense_are_refused(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, error = status_and_error(capsys, *words)
    assert status == 2
    assert told in error


def test_a_model_file_with_absurd_numbers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads((ROOT / "configs/models/tiny.json").read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**data, "vocab_size": 10**400}))
    for command in (["plan", "--hbm-gib", "1"], ["replay", "t"], ["run"]):
        status, told = status_and_error(capsys, *command, "--model", str(path))
        assert (status, "vocab_size = a number of 400 digits" in told) == (2, True)
    path.write_text("[" * 100000)
    assert "nested too deeply" in status_and_error(capsys, "run", "--model", str(path))[1]


def test_errors_that_are_bugs_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: argparse.Namespace) -> int:
        raise OverflowError

    monkeypatch.setattr(replay_cli, "run", broken)
    with pytest.raises(OverflowError):
        main(["replay", "t"])


def test_replay_takes_the_dspark_checkpoint_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    trace = str(write(tmp_path, mixed(2)))
    assert main(["replay", trace, "--quiet", "--spec", "dspark", "--json", str(out)]) == 0
    assert "v4_flash has no DSpark stages: replayed with v4_flash_dspark, which has 3" in capsys.readouterr().out
    assert json.loads(out.read_text())["deployment"]["model"] == "v4_flash_dspark"
    mine = tmp_path / "mine.json"
    mine.write_text((ROOT / "configs/models/v4_flash.json").read_text())
    status, told = status_and_error(capsys, "replay", trace, "--spec", "dspark", "--model", str(mine))
    assert (status, "--spec dspark: model mine has no dspark_block_size" in told) == (2, True)


def test_an_input_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path, mixed(1))
    before = trace.read_text()
    for option in ("--json", "--report"):
        status, told = status_and_error(capsys, "replay", str(trace), option, str(tmp_path / "." / trace.name))
        assert (status, "the trace names the same file" in told) == (2, True)
    assert trace.read_text() == before


def test_a_replay_that_serves_nothing_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path, [line(0, 9000, 10), line(1, 9500, 10)])
    assert main(["replay", str(trace), "--quiet", "--tokens", "2560"]) == 1
    assert "verdict: nothing was served: every request was refused" in capsys.readouterr().out
    trace = write(tmp_path, [line(0, 9000, 10), line(1, 500, 10)])
    assert main(["replay", str(trace), "--quiet", "--tokens", "2560"]) == 0


def option_names(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


def test_the_page_on_replay_lists_every_option() -> None:
    parser = argparse.ArgumentParser()
    replay_cli.add_arguments(parser)
    page = (ROOT / "docs/replay/README.md").read_text()
    table = "\n".join(row for row in page.splitlines() if row.startswith("| `--"))
    known = {name for action in parser._actions for name in action.option_strings} - {"-h", "--help"}
    assert option_names(table) == known
