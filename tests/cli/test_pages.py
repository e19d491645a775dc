"""What the page on doctor, serve-args and selftest says is what the commands do."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
import torch

from dsv4_npu.cli import COMMANDS, main
from dsv4_npu.doctor.rules import PURPOSES
from dsv4_npu.selftest import command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")


def first_cells(after: str) -> list[str]:
    """Names in the first column of the first table behind a text."""
    rows = re.search(r"\|---\|---\|\n((?:\|.*\n)+)", PAGE[PAGE.index(after) :])
    assert rows is not None
    return [name for row in rows[1].splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_the_printed_command_is_the_one_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    (given,) = re.findall(r"^    dsv4-npu (serve-args .*\\\n.*)$", PAGE, re.M)
    assert main(shlex.split(given.replace("\\\n", " "))) == 0
    assert f"```console\n{capsys.readouterr().out}```" in PAGE


def test_purposes_and_options_are_listed() -> None:
    assert first_cells("| `--for` |") == list(PURPOSES)
    for name, text in PURPOSES.items():
        assert f"| `{name}` | {text} |" in PAGE
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    known = {name for action in parser._actions for name in action.option_strings} - {"-h", "--help"}
    assert set(first_cells("| option |")) == known


def test_the_keys_of_the_report_are_listed() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["--ops", "fill_bonus"])
    report = command.examine(command.Target(torch.device("cpu")), [], args)
    assert first_cells("| key |") == list(report)


def test_the_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"dsv4-npu {name}" in readme or f"`{name}`" in readme
