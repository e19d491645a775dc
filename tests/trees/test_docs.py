"""The page about trees: its example runs, its numbers are those of the code, its options exist."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from dsv4_npu.emulation.command import add_arguments
from dsv4_npu.spec.trees import TreeSpec

PAGE = (Path(__file__).parents[2] / "docs" / "trees.md").read_text(encoding="utf-8")


def test_the_example_runs() -> None:
    found = re.search(r"<!-- example -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found
    names: dict[str, Any] = {}
    exec(found[1], names)
    root, first, second, bonus = (names[letter] for letter in "RACX")
    assert names["outputs"] == [[first, second, bonus]]
    assert [moved.tolist() for moved in names["moves"]] == [[[-1, -1, 42082]], [[-1, -1, 42083]]]
    assert names["kept"].tolist() == [root, first, second]
    assert [part.tolist() for part in names["front"]] == [[first, second, bonus], [root, first, second]]


def test_the_reserve() -> None:
    assert "is 2 · 4 · 2 · 128 = 2048 tokens, against 32" in PAGE
    assert TreeSpec(4, 3, 16).reserve(128) == 2048
    assert TreeSpec(4, 3, 16).reserve(1) == 32


def test_the_options_exist() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    assert set(re.findall(r"--[a-z][a-z-]+", PAGE.split("## Running it")[1])) <= known
