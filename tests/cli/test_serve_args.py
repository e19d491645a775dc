"""The launch command: its numbers are the plan's, for every kind of speculation, and it survives a shell."""

from __future__ import annotations

import json
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu.budget import sizes_for_tokens
from dsv4_npu.cli import main
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec
from dsv4_npu.planning.serve_args import ratio_text

DEPLOYMENT = "--model v4_pro --platform a3 --hbm-gib 64 --weights-gib 40 --tp 16 --max-running 32"


def printed(capsys: pytest.CaptureFixture[str], line: str) -> tuple[dict[str, str], dict[str, str], str]:
    """Environment and options that a shell would see, and the comments."""
    assert main(["serve-args", *shlex.split(line)]) == 0
    text = capsys.readouterr().out
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    name, _, value = words[0].partition("=")
    assert words[1:4] == ["python", "-m", "sglang.launch_server"]
    pairs = dict(zip(words[4::2], words[5::2], strict=True))
    assert all(option.startswith("--") for option in pairs)
    return {name: value}, pairs, "".join(line for line in text.splitlines(True) if line.startswith("#"))


def plan(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, object]:
    assert main(["plan", *line.split(), "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("spec", "drafting"),
    [
        ("none", {}),
        (
            "chain --draft-tokens 2",
            {"algorithm": "EAGLE", "num-steps": "2", "eagle-topk": "1", "num-draft-tokens": "3"},
        ),
        (
            "dspark",
            {
                "algorithm": "DSPARK",
                "num-steps": "1",
                "eagle-topk": "1",
                "dspark-block-size": "5",
                "num-draft-tokens": "6",
            },
        ),
    ],
)
def test_the_numbers_are_the_plans(capsys: pytest.CaptureFixture[str], spec: str, drafting: dict[str, str]) -> None:
    line = f"{DEPLOYMENT} --spec {spec}"
    environment, options, comments = printed(capsys, f"{line} --model-path '/models/v4 pro'")
    wanted = plan(capsys, line)
    assert environment == {"SGLANG_PLATFORM": "dsv4_npu"}
    assert options["--model-path"] == "/models/v4 pro"
    assert int(options["--max-total-tokens"]) == wanted["tokens"]
    assert (options["--max-running-requests"], options["--tp-size"]) == ("32", "16")
    assert (options["--page-size"], options["--c128-page-size"], options["--device"]) == ("128", "16", "npu")
    pages = int(options["--max-total-tokens"]) // 128
    assert int(pages * float(options["--swa-full-tokens-ratio"])) * 128 == wanted["swa_tokens"]
    speculative = {key.removeprefix("--speculative-"): v for key, v in options.items() if "speculative" in key}
    assert speculative == drafting
    assert str(wanted["summary"]) in comments


def test_as_json_and_without_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve-args", *DEPLOYMENT.split(), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["environment"] == {"SGLANG_PLATFORM": "dsv4_npu"}
    assert data["command"][3:5] == ["--model-path", "MODEL_PATH"]
    assert "replace MODEL_PATH" in data["notes"][0]
    assert printed(capsys, f"{DEPLOYMENT} --model configs/models/v4_pro.json")[1]["--model-path"].endswith("/models")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--platform cpu", "--platform cpu: a command for an NPU"),
        ("--page-size 256", "--page-size = 256: SGLang uses pages of 128"),
        ("--context 9999999", "--context = 9999999"),
        ("--draft-tokens 12", "--draft-tokens = 12"),
    ],
)
def test_what_cannot_be_served_is_refused(capsys: pytest.CaptureFixture[str], more: str, words: str) -> None:
    assert main(["serve-args", *f"{DEPLOYMENT} {more}".split()]) == 2
    assert words in capsys.readouterr().err


@given(full=st.integers(1, 10**7), share=st.floats(0.001, 1))
@settings(max_examples=200, deadline=None)
def test_the_ratio_gives_the_planned_pages(full: int, share: float) -> None:
    swa = max(1, int(full * share))
    text = ratio_text(full, swa)
    assert int(full * float(text)) == swa
    assert 0 < float(text) <= 1


def test_the_ratio_is_what_the_budget_turns_into_pages() -> None:
    config = CacheConfig(
        ModelSpec.load("v4_flash"), PlatformSpec.load("a3"), SpeculationSpec("chain", 3), context_len=131072
    )
    for tokens in (131072, 1_000_064, 7_654_400):
        sizes = sizes_for_tokens(config, tokens, 0.1)
        again = sizes_for_tokens(config, tokens, float(ratio_text(sizes.full_pages, sizes.swa_pages)))
        assert again == sizes
