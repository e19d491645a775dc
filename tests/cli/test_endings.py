"""How a command ends that is not let to its end: Ctrl-C, and output that nobody reads."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from dsv4_npu import options
from dsv4_npu.cli import main
from dsv4_npu.replay import cli as replay_cli

PLAN = [sys.executable, "-m", "dsv4_npu", "plan", "--hbm-gib", "64"]


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(replay_cli, "run", interrupted)
    assert main(["replay", "t"]) == 130
    assert capsys.readouterr().err == "dsv4-npu replay: interrupted\n"


def sleeps(rank: int, folder: str) -> None:
    """A rank that says its process id and waits; Ctrl-C reaches it as it would from a terminal."""
    os.kill(os.getpid(), signal.SIGINT)
    (Path(folder) / f"rank{rank}").write_text(str(os.getpid()))
    time.sleep(60)


INTERRUPT_RANKS = """
import os, signal, sys, threading, time
from pathlib import Path
from dsv4_npu import cli
from dsv4_npu.emulation.ranks import on_ranks
from dsv4_npu.replay import cli as replay
from tests.cli.test_endings import sleeps

def interrupt():
    while len(list(Path(sys.argv[1]).glob("rank*"))) < 2:
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    # A background job of a shell inherits the signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    replay.run = lambda args: on_ranks(2, sleeps, sys.argv[1])
    raise SystemExit(cli.main(["replay", "t"]))
"""


def test_ctrl_c_ends_the_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPT_RANKS)
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=paths, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (130, "dsv4-npu replay: interrupted\n")
    for file in tmp_path.glob("rank*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_a_closed_pipe_is_no_error() -> None:
    for words in (PLAN, [*PLAN, "--json"]):
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        told = process.stderr.read()
        assert (process.wait(60), told) == (141, b"")
        process.stderr.close()


def test_a_console_tells_of_a_closed_pipe() -> None:
    with pytest.raises(BrokenPipeError):
        options.widened(Console()).on_broken_pipe()


def test_output_that_has_no_place() -> None:
    for words in (PLAN, [*PLAN, "--json"]):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (2, "dsv4-npu plan: No space left on device\n")


def test_help_that_nobody_reads() -> None:
    process = subprocess.Popen([*PLAN, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.wait(60)
    process.stderr.close()
