"""What tests and writer need of a page: named blocks that scripts produce, values, and references to code."""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Longest line of a produced block; longer ones are wrapped.
WIDTH = 124

_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+) (?P<name>[\w-]+)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_VALUE = re.compile(r"`([\w.]+) = (-?[\w\[\], ]+)`")
_CODE = re.compile(r"`([\w/]+)\.py:(\w+(?:\.\w+)*)`")
_FILE = re.compile(r"`((?:dsv4_npu|tests|csrc|docs|configs|benchmarks)/[\w./]+)`")


def read(name: str) -> str:
    """The text of a page under ``docs/``."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> dict[str, str]:
    """Fenced blocks of a language that carry a name, by name."""
    found: dict[str, str] = {}
    for match in _BLOCK.finditer(text):
        if match["language"] == language:
            assert match["name"] not in found, f"two blocks are named {match['name']}"
            found[match["name"]] = textwrap.dedent(match["body"])
    return found


def with_blocks(text: str, produced: Mapping[str, str]) -> str:
    """The page with the content of its ``text`` blocks replaced by what the scripts produce."""

    def renew(match: re.Match[str]) -> str:
        if match["language"] != "text":
            return match[0]
        body = f"```text {match['name']}\n{produced[match['name']]}```"
        return textwrap.indent(body, match["indent"])

    return _BLOCK.sub(renew, text)


def block(lines: list[str] | str) -> str:
    """Lines as the body of a block; long ones are wrapped and indented."""
    listed = lines.splitlines() if isinstance(lines, str) else lines
    wrap = textwrap.TextWrapper(WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "".join(
        part.rstrip() + "\n" for line in listed for part in (wrap.wrap(line) if len(line) > WIDTH else [line])
    )


def table(head: list[str], rows: list[list[object]]) -> str:
    """Columns of text, numbers to the right."""
    cells = [head, *([str(one) for one in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    right = [all(re.fullmatch(r"-?\d+|–|", row[i]) for row in cells[1:]) for i in range(len(head))]
    lines = (
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True))
        for row in cells
    )
    return "".join(line.rstrip() + "\n" for line in lines)


def wrong_values(text: str, facts: Mapping[str, object]) -> list[str]:
    """Inline code of the form ``name = value`` that differs from what a script found, or that no script knows."""
    return [
        f"{name} = {value}: {facts.get(name, 'unknown')}"
        for name, value in _VALUE.findall(text)
        if str(facts.get(name)) != value
    ]


def wrong_references(text: str) -> list[str]:
    """References to modules of the package, their members, and files of the repository that do not exist."""
    wrong = [f"{path}" for path in _FILE.findall(text) if not (ROOT / path).exists()]
    for path, member in _CODE.findall(text):
        try:
            found = importlib.import_module("dsv4_npu." + path.removesuffix("/__init__").replace("/", "."))
            for name in member.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            wrong.append(f"{path}.py:{member}: {error}")
    return wrong
