"""The tables of what SGLang's calls cost show the recorded run."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_documents_show_the_recorded_times() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "sglang_calls.json").read_text())["microseconds"]
    rows = set()
    for case, sides in recorded.items():
        ours, theirs = sides["dsv4_npu"], sides["SGLang"]
        ratio = theirs / ours
        rows.add(f"| {case} | {ours:,.0f} | {theirs:,.0f} | {ratio:.{0 if ratio >= 10 else 1}f} |")
    document = (ROOT / "docs" / "sglang-differences.md").read_text()
    shown = set(document[document.index("## What the calls cost") :].splitlines())
    assert rows <= shown
    readme = (ROOT / "README.md").read_text()
    start = readme.index("| call through SGLang, batch 64 |")
    lines = readme[start : readme.index("\n\n", start)].splitlines()[2:]
    assert len(lines) >= 10
    assert set(lines) <= rows
