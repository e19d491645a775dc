"""Synthetic traces and the replay command in one process."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsv4_npu.replay import cli
from dsv4_npu.replay.trace import BLOCK

Line = dict[str, Any]


def line(index: int, prompt: int, output: int, ids: Sequence[int] | None = None, **more: Any) -> Line:
    """A request whose blocks are its own unless ``ids`` gives the first ones."""
    blocks = -(-prompt // BLOCK)
    own = [1_000_000 * (index + 1) + i for i in range(blocks)]
    hashes = [*(ids or []), *own[len(ids or []) :]][:blocks]
    return {"timestamp": 10 * index, "input_length": prompt, "output_length": output, "hash_ids": hashes, **more}


def mixed(count: int, seed: int = 0, longest: int = 6000) -> list[Line]:
    """Prompts of very different lengths, half of which begin with one of three shared prefixes."""
    rng = np.random.default_rng(seed)
    lines = []
    for index in range(count):
        shared = [100 * (1 + int(rng.integers(3))) + i for i in range(9)] if rng.random() < 0.5 else None
        prompt = int(rng.integers(1, longest)) if rng.random() < 0.8 else int(rng.integers(1, 200))
        lines.append(line(index, prompt, int(rng.integers(1, 60)), shared))
    return lines


def write(folder: Path, lines: Sequence[Line]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def parse(path: Path, *options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    small = ("--model", "tiny", "--context", "8192", "--max-running", "8", "--prefill-chunk", "2048", "--quiet")
    return parser.parse_args([str(path), *small, *options])


def run(folder: Path, lines: Sequence[Line], *options: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of ``dsv4-npu replay`` on a small deployment."""
    out = folder / "out.json"
    status = cli.run(parse(write(folder, lines), "--json", str(out), *options))
    result: dict[str, Any] = json.loads(out.read_text())
    return status, result
