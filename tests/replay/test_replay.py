"""The replay on synthetic traces: served, shared, under pressure, refused, in sessions, leaking, and repeatable."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4_npu.alloc import KVAllocator
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.prefix_cache import PrefixCache
from dsv4_npu.config import ConfigError
from dsv4_npu.errors import InputError
from dsv4_npu.replay import cli
from tests.replay.test_report import Page
from tests.replay.traces import line, mixed, parse, run, write

ROOMY = ("--tokens", "65536", "--swa-ratio", "1", "--audit", "every")
#: 2,560 tokens of history for eight requests of up to 1,500.
TIGHT = ("--tokens", "2560", "--swa-ratio", "1", "--output-estimate", "0", "--audit", "every")


@pytest.mark.parametrize("overlap", [(), ("--no-overlap",)], ids=["overlap", "one by one"])
@pytest.mark.parametrize("spec", ["none", "chain", "dspark"])
@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_every_request_is_served_and_nothing_is_left(
    tmp_path: Path, platform: str, spec: str, overlap: tuple[str, ...]
) -> None:
    lines = mixed(14)
    status, result = run(tmp_path, lines, *ROOMY, "--platform", platform, "--spec", spec, *overlap)
    counters = result["counters"]
    assert (status, result["audit"]["clean"], result["audit"]["problems"]) == (0, True, [])
    assert (counters["served"], counters["refused"]) == (14, 0)
    assert counters["prompt_tokens"] == sum(one["input_length"] for one in lines)
    assert counters["prompt_tokens"] - counters["hit_tokens"] == counters["prefilled_tokens"]
    assert counters["audits"] == counters["rounds"] + 1
    assert 0 < result["pages"]["FULL"]["mean"] <= result["pages"]["FULL"]["peak"]
    # a run may overshoot the last token by what its verify accepted
    wanted = sum(one["output_length"] for one in lines)
    width = result["deployment"]["verify_width"]
    assert wanted <= counters["output_tokens"] <= wanted + 14 * width
    assert counters["verified_rows"] == counters["decode_rows"] * width
    assert sum(counters["accept_histogram"].values()) <= counters["decode_rows"]


def test_prefixes_are_shared_in_complete_granules(tmp_path: Path) -> None:
    granule, shared = 2048, [7, 8, 9, 10, 11, 12, 13, 14]
    first = [line(0, 5000, 3, shared)]
    later = [line(i, 5000, 3, shared) for i in range(1, 5)]
    others = [line(5, 5000, 3), line(6, 5000, 3, shared[:3])]
    options = (*ROOMY, "--max-running", "1")
    _, result = run(tmp_path, first + later + others, *options)
    assert result["counters"]["hit_tokens"] == 4 * 4096 // granule * granule
    _, without = run(tmp_path, first + later + others, *options, "--no-prefix-cache")
    assert without["counters"]["hit_tokens"] == 0
    assert without["counters"]["prefilled_tokens"] == result["counters"]["prefilled_tokens"] + 4 * 4096


def test_pressure_retracts_and_still_serves_everything(tmp_path: Path) -> None:
    lines = [line(i, 300 + 61 * i, 500) for i in range(8)]
    status, result = run(tmp_path, lines, *TIGHT)
    counters = result["counters"]
    assert status == 0
    assert counters["served"] == 8
    assert counters["retracted"] == counters["readmitted"] > 0
    assert counters["recomputed_tokens"] > 0
    assert result["pages"]["FULL"]["peak"] == result["pages"]["FULL"]["total"]
    _, careful = run(tmp_path, lines, *TIGHT, "--output-estimate", "1", "--audit", "end")
    assert careful["counters"]["retracted"] == 0
    assert careful["counters"]["served"] == 8


def test_easy_admission_retracts_more(tmp_path: Path) -> None:
    lines = [line(i, 1000, 600) for i in range(8)]
    status, chunk = run(tmp_path, lines, *TIGHT, "--admission", "chunk", "--audit", "end")
    _, whole = run(tmp_path, lines, *TIGHT, "--output-estimate", "1", "--audit", "end")
    assert (status, chunk["counters"]["served"], whole["counters"]["served"]) == (0, 8, 8)
    assert chunk["counters"]["retracted"] > whole["counters"]["retracted"] == 0


def test_the_default_swa_share_serves_long_prompts(tmp_path: Path) -> None:
    lines = [line(0, 8000, 20), *(line(i, 200, 20) for i in range(1, 9))]
    status, result = run(tmp_path, lines, "--tokens", "16384", "--swa-ratio", "0.1", "--audit", "every")
    assert (status, result["counters"]["served"]) == (0, 9)
    assert result["pages"]["SWA"]["total"] == 12


def test_refusals_have_reasons(tmp_path: Path) -> None:
    lines = [line(0, 300, 10), line(1, 9000, 10), line(2, 9500, 10), line(3, 300, 9000), line(4, 4000, 10)]
    status, result = run(tmp_path, lines, "--tokens", "2560", "--swa-ratio", "1")
    assert status == 0
    assert (result["counters"]["served"], result["counters"]["refused"]) == (1, 4)
    reasons = {one["reason"]: one["requests"] for one in result["refused"]}
    assert sorted(reasons.values()) == [1, 3]
    assert any("row_width = " in reason for reason in reasons)
    assert any("FULL pages: 20 exist" in reason for reason in reasons)


def test_a_request_that_cannot_move_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The admission check let through what the pools cannot hold: the replay says so and goes on."""
    monkeypatch.setattr(Lifecycle, "check", lambda *_: None)
    monkeypatch.setattr(KVAllocator, "admit_check", lambda *_: None)
    status, result = run(tmp_path, [line(0, 4000, 10), line(1, 300, 10)], "--tokens", "2560", "--swa-ratio", "1")
    assert (status, result["counters"]["served"]) == (0, 1)
    (refused,) = result["refused"]
    assert refused["reason"].startswith("cannot make progress alone: FULL pages: need")


def conversation(turns: int, own_id: bool) -> list[dict[str, Any]]:
    """Two conversations; each turn's prompt begins with the complete blocks of the one before."""
    lines = []
    for turn in range(turns):
        for talk in range(2):
            prompt = 1100 + 700 * turn
            more = {"session_id": f"talk {talk}"} if own_id else {}
            ids = (
                [talk * 5000 + i for i in range((1100 + 700 * (turn - 1)) // 512)]
                if turn
                else [talk * 5000, talk * 5000 + 1]
            )
            lines.append(line(len(lines), prompt, 20, ids, **more))
            previous = lines[-3]["hash_ids"] if turn else None
            if previous is not None:
                whole = (1100 + 700 * (turn - 1)) // 512
                lines[-1]["hash_ids"][:whole] = previous[:whole]
    return lines


@pytest.mark.parametrize(("mode", "own_id"), [("field", True), ("infer", False)])
@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_sessions_keep_their_row(tmp_path: Path, platform: str, mode: str, own_id: bool) -> None:
    lines = conversation(3, own_id)
    status, result = run(tmp_path, lines, *ROOMY, "--platform", platform, "--sessions", mode)
    counters = result["counters"]
    assert status == 0
    assert (counters["served"], counters["admitted"], counters["resumed"]) == (6, 2, 4)
    _, off = run(tmp_path, lines, *ROOMY, "--platform", platform)
    assert (off["counters"]["admitted"], off["counters"]["resumed"]) == (6, 0)


def test_a_session_continues_where_its_rows_are_resident(tmp_path: Path) -> None:
    """The second prompt repeats the first one up to inside its last window: nothing before that is computed again."""
    first = line(0, 1024, 1, session_id=1)
    second = line(1, 1500, 5, first["hash_ids"], session_id=1)
    _, result = run(tmp_path, [first, second], *ROOMY, "--sessions", "field")
    counters = result["counters"]
    assert counters["session_tokens"] == 1024
    assert counters["prefilled_tokens"] == 1024 + 1500 - 1024


def test_sessions_give_their_rows_up_under_pressure(tmp_path: Path) -> None:
    lines = []
    for index in range(12):
        lines.append(line(index, 600, 10, session_id=index % 6))
    status, result = run(tmp_path, lines, *TIGHT, "--sessions", "field", "--max-running", "2")
    assert status == 0
    assert result["counters"]["served"] == 12
    assert result["counters"]["sessions_given_up"] > 0


def test_a_refused_turn_ends_its_session(tmp_path: Path) -> None:
    lines = [line(0, 600, 10, session_id=1), line(1, 9000, 10, session_id=1), line(2, 700, 10, session_id=1)]
    status, result = run(tmp_path, lines, *ROOMY, "--sessions", "field")
    assert status == 0
    assert (result["counters"]["served"], result["counters"]["refused"]) == (2, 1)


def test_timestamps_count_when_a_step_takes_time(tmp_path: Path) -> None:
    lines = [dict(line(i, 300, 5), timestamp=1000 * i) for i in range(6)]
    _, spread = run(tmp_path, lines, *ROOMY, "--step-ms", "10")
    _, dense = run(tmp_path, lines, *ROOMY)
    assert dense["counters"]["decode_steps"] < spread["counters"]["decode_steps"]
    assert spread["counters"]["decode_rows"] == spread["counters"]["decode_steps"]


def without_timing(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "timing"}


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    lines = [line(i, 300 + 61 * i, 200) for i in range(8)]
    options = (*TIGHT, "--audit", "end")
    results = [without_timing(run(tmp_path, lines, *options, "--seed", seed)[1]) for seed in ("5", "5", "6")]
    assert results[0] == results[1]
    assert results[0]["counters"] != results[2]["counters"]


@pytest.mark.parametrize("ledger", ["python", "auto"])
def test_both_ledgers_give_the_same_numbers(tmp_path: Path, ledger: str) -> None:
    lines = mixed(8, seed=3)
    reference = without_timing(run(tmp_path, lines, *ROOMY, "--ledger", "python")[1])
    assert without_timing(run(tmp_path, lines, *ROOMY, "--ledger", ledger)[1]) == reference


def test_every_output_says_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, result = run(tmp_path, mixed(3), *ROOMY, "--report", str(tmp_path / "r.html"))
    assert "SIMULATED" in result["acceptance"]
    assert "SIMULATED" in capsys.readouterr().out
    page = Page((tmp_path / "r.html").read_text())
    assert any("SIMULATED" in note for note in json.loads(page.script["data"])["notes"])


def test_the_report_has_the_numbers_of_the_run(tmp_path: Path) -> None:
    lines = [*mixed(6), line(6, 9000, 1)]
    _, result = run(tmp_path, lines, *ROOMY, "--report", str(tmp_path / "r.html"))
    page, counters = Page((tmp_path / "r.html").read_text()), result["counters"]
    for group, name, value in (
        ("Requests", "served", counters["served"]),
        ("Requests", "refused", 1),
        ("Tokens", "prefix hit tokens", counters["hit_tokens"]),
        ("Tokens", "output tokens", counters["output_tokens"]),
        ("Steps", "decode rows", counters["decode_rows"]),
        ("Check", "audits", counters["audits"]),
    ):
        assert page.number(group, name) == f"{value:,}"
    assert page.number("Pages", "FULL peak").split()[0] == f"{result['pages']['FULL']['peak']:,}"
    assert page.tables["Refused requests"][1] == [result["refused"][0]["reason"], "1"]
    data = json.loads(page.script["data"])
    full = data["families"][0]
    assert 0 < max(full["used"]) <= result["pages"]["FULL"]["peak"]
    assert [sum(parts) for parts in zip(*full["kinds"].values(), strict=True)] == full["used"]
    assert data["snapshots"][-1]["maps"]["SWA"].startswith("d1")


def lost_page(monkeypatch: pytest.MonkeyPatch) -> None:
    original, done = KVAllocator.take_over, []

    def take_over(self: KVAllocator, row: int, columns: int) -> tuple[Any, Any]:
        full, c128 = original(self, row, columns)
        return (full, c128[1:]) if len(c128) and not done and not done.append(1) else (full, c128)

    monkeypatch.setattr(KVAllocator, "take_over", take_over)


def row_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Lifecycle.finish, []

    def finish(self: Lifecycle, request: Any) -> None:
        if calls:
            original(self, request)
        calls.append(request)

    monkeypatch.setattr(Lifecycle, "finish", finish)


def cache_not_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "clear", lambda self: None)


def count_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    original, done = KVAllocator.attach_prefix, []

    def attach_prefix(self: KVAllocator, row: int, full: Any, c128: Any, length: int) -> None:
        original(self, row, full, c128, length)
        if len(c128) and not done:
            done.append(1)
            self.state.c128_count[c128[0]] += 1

    monkeypatch.setattr(KVAllocator, "attach_prefix", attach_prefix)


LEAKS = [lost_page, row_not_closed, cache_not_emptied, count_off_by_one]


@pytest.mark.parametrize("plant", LEAKS, ids=[plant.__name__ for plant in LEAKS])
def test_a_planted_leak_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    lines = [line(i, 5000, 5, [1, 2, 3, 4, 5, 6, 7, 8]) for i in range(4)]
    options = ("--tokens", "65536", "--swa-ratio", "1", "--max-running", "2")
    assert run(tmp_path, lines, *options)[0] == 0
    plant(monkeypatch)
    status, result = run(tmp_path, lines, *options, "--report", str(tmp_path / "r.html"))
    assert status == 1
    assert result["audit"]["problems"]
    page = Page((tmp_path / "r.html").read_text())
    assert page.texts["verdict"].startswith(f"{len(result['audit']['problems'])} problem")
    assert len(page.tables["Problems"]) == 1 + len(result["audit"]["problems"])


def test_bad_options_and_traces_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, mixed(2))
    with pytest.raises(ConfigError, match=r"^verify width .*--draft-tokens = 40"):
        cli.run(parse(path, "--draft-tokens", "40"))
    with pytest.raises(ConfigError, match="raise --hbm-gib or lower --max-running"):
        cli.run(parse(path, "--model", "v4_flash", "--hbm-gib", "0.01"))
    with pytest.raises(InputError, match="it holds no request"):
        cli.run(parse(write(tmp_path, [])))
    (tmp_path / "bad.jsonl").write_text(json.dumps(line(0, 10, 1)) + '\n{"timestamp": 1}\n')
    with pytest.raises(InputError, match=r"bad\.jsonl, line 2: input_length is missing"):
        cli.run(parse(tmp_path / "bad.jsonl"))


def test_memory_can_be_given_in_bytes(tmp_path: Path) -> None:
    _, result = run(tmp_path, mixed(3), "--hbm-gib", "0.05")
    assert np.isclose(result["deployment"]["pool_gib"], 0.05, rtol=0.05)
    assert result["deployment"]["pool_gib"] <= 0.05
