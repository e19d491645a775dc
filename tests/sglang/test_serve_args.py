"""SGLang's own parser takes the printed launch command, and understands it as meant."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from dsv4_npu.cli import main

DEPLOYMENT = "--model v4_flash --platform a3 --hbm-gib 64 --weights-gib 30 --tp 8 --max-running 48 --model-path /m"


def words(capsys: pytest.CaptureFixture[str], spec: str) -> list[str]:
    assert main(["serve-args", *DEPLOYMENT.split(), *spec.split(), "--json"]) == 0
    command: list[str] = json.loads(capsys.readouterr().out)["command"]
    return command[3:]


def parsed(command: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return vars(parser.parse_args(command))


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("--spec none", {"speculative_algorithm": None}),
        (
            "--spec chain",
            {
                "speculative_algorithm": "EAGLE",
                "speculative_num_steps": 3,
                "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": 4,
            },
        ),
        (
            "--spec dspark",
            {
                "speculative_algorithm": "DSPARK",
                "speculative_num_steps": 1,
                "speculative_dspark_block_size": 5,
                "speculative_num_draft_tokens": 6,
            },
        ),
        ("--spec chain --draft-model-path /d", {"speculative_draft_model_path": "/d"}),
    ],
)
def test_sglang_understands_the_command(capsys: pytest.CaptureFixture[str], spec: str, meant: dict[str, Any]) -> None:
    command = words(capsys, spec)
    found = parsed(command)
    assert len(command) % 2 == 0
    assert set(command[::2]) <= {f"--{name.replace('_', '-')}" for name in found}, "an option of no field"
    assert meant.items() <= found.items()
    assert {"device": "npu", "model_path": "/m", "page_size": 128, "c128_page_size": 16}.items() <= found.items()
    assert (found["tp_size"], found["max_running_requests"], found["kv_cache_dtype"]) == (8, 48, "bfloat16")
    assert 0 < found["swa_full_tokens_ratio"] <= 0.2


def test_an_unknown_option_would_be_seen(capsys: pytest.CaptureFixture[str]) -> None:
    command = [word.replace("--c128-page-size", "--c128-page") for word in words(capsys, "--spec none")]
    with pytest.raises((SystemExit, argparse.ArgumentError, AssertionError)):
        assert set(command[::2]) <= {f"--{name.replace('_', '-')}" for name in parsed(command)}
