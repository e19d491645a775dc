"""Tables fit a terminal of 80 columns, and keep their frames in a wide one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from dsv4_npu.cli import main
from dsv4_npu.emulation import command


@pytest.mark.parametrize("width", [80, 120])
def test_a_run_fits_the_terminal(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(command, "widened", lambda console: Console(file=out, width=width))
    prompts = tmp_path / "p.txt"
    prompts.write_text("one\n\ntwo")
    assert main(["run", "--prompts", str(prompts), "--max-new-tokens", "4"]) == 0
    lines = out.getvalue().splitlines()
    requests = [text for text in lines if text.strip("┃│ ").split()[:1] in (["0"], ["1"])]
    assert max(len(text) for text in lines if not text.startswith("identical = ")) <= width
    assert len(requests) == 2
    assert all("e-" in text and "yes" in text for text in requests)
    assert any("┃" in text for text in lines) == (width == 120)
