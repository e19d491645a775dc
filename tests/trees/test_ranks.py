"""Ranks agree: one broadcast, rank 0 decides, and whoever knows something else is told what."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

from dsv4_npu.emulation.ranks import RankError, on_ranks
from dsv4_npu.errors import AuditError, InputError
from dsv4_npu.spec import ranks as ranks_module
from dsv4_npu.spec.ranks import PARTS, RankSync
from tests.trees import rank_jobs

SHORT = 60


MODELS = {
    "llama greedy": ("llama", {"accept": "greedy", "temperature": 0.0}),
    "llama target-only": ("llama", {"accept": "target-only", "temperature": 0.8}),
    "deepseek rejection": ("deepseek", {"accept": "rejection", "temperature": 0.8}),
}


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    """Two ranks that play everything; starting them is what takes time."""
    with_models = importlib.util.find_spec("transformers") is not None
    jobs: list[tuple[str, str, dict[str, Any]]] = [
        *((name, *job) for name, job in MODELS.items() if with_models),
        ("thousand", "rounds", {"count": 1000}),
        ("alone", "rounds", {"count": SHORT, "synced": False}),
        ("mismatches", "mismatches", {}),
        ("later", "later", {}),
        ("idle", "idle", {}),
        *(("without " + name, "rounds", {"count": SHORT, "parts": [p for p in PARTS if p != name]}) for name in PARTS),
    ]
    return on_ranks(2, rank_jobs.play, jobs)


def test_a_thousand_rounds_leave_one_history(pair: list[dict[str, Any]]) -> None:
    first, second = (results["thousand"] for results in pair)
    assert first["error"] == second["error"] == ""
    assert first["histories"] == second["histories"]
    assert all(len(history) > 300 for history in first["histories"])
    assert first["overruled"] == 0
    assert second["overruled"] > 300
    # One broadcast per round, always of the same size: the batch was of 0 to 3 requests.
    assert first["sent"] == second["sent"] == [first["sent"][0]] * 1000


def test_ranks_that_do_not_agree_part(pair: list[dict[str, Any]]) -> None:
    first, second = (results["alone"] for results in pair)
    assert first["histories"] != second["histories"]


@pytest.mark.parametrize("missing", PARTS)
def test_two_tensors_are_not_enough(pair: list[dict[str, Any]], missing: str) -> None:
    """Whichever stays at home: histories part, or a rank finds lengths that differ or a path that is none."""
    first, second = (results[f"without {missing}"] for results in pair)
    assert not first["error"]
    assert second["error"] or first["histories"] != second["histories"]


def test_what_differs_is_named(pair: list[dict[str, Any]]) -> None:
    first, second = (results["mismatches"] for results in pair)
    assert first[:-1] == [""] * 6
    assert re.fullmatch("rank 1, round 6: digest of the drafts is \\d+, rank 0 has \\d+", second[5])
    assert second[:5] == [
        "rank 1, round 1: requests is 2, rank 0 has 3",
        "rank 1, round 2: committed length of request 1 of the batch is 9, rank 0 has 6",
        "rank 1, round 3: verify width D is 4, rank 0 has 3",
        "rank 1, round 4: accept_index width is 2, rank 0 has 3",
        "rank 1, round 5: requests is 0, rank 0 has 2",
    ]
    assert first[-1] == second[-1] == "batch = 5: at most 4 was agreed on"


def test_what_differed_is_told_when_somebody_looks(pair: list[dict[str, Any]]) -> None:
    first, second = (results["later"] for results in pair)
    assert first == ["", ""]
    assert second == ["rank 1, round 3: committed length of request 1 of the batch is 7, rank 0 has 6", ""]


def test_idle_ranks_and_empty_batches_take_part(pair: list[dict[str, Any]]) -> None:
    for results in pair:
        assert results["idle"]["empty"] == [0, 3]
        assert results["idle"]["tokens"] == [[10], [10]]
    assert [results["idle"]["overruled"] for results in pair] == [0, 1]


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others() -> None:
    with pytest.raises(AuditError, match="rank 1, round 1: committed length of request 0 of the batch is 3"):
        on_ranks(2, rank_jobs.fail)
    with pytest.raises(RankError, match="rank 1: ValueError: no result"):
        on_ranks(2, rank_jobs.die)


def test_sizes_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module.dist, "get_rank", lambda group: 0)
    for name in ("batch", "width", "depth"):
        with pytest.raises(InputError, match=f"{name} = 0: at least 1"):
            RankSync(**{"batch": 1, "width": 1, "depth": 1, name: 0})


@pytest.mark.parametrize("name", MODELS)
def test_replicas_write_one_history(pair: list[dict[str, Any]], name: str) -> None:
    """Two whole replicas with noise and random numbers of their own."""
    pytest.importorskip("transformers", reason="the emulation needs transformers")
    first, second = (results[name] for results in pair)
    assert first["outputs"] == second["outputs"]
    assert first.get("history") == second.get("history")
    assert first["noise"] != second["noise"]
    for result in (first, second):
        assert result["noise"] > 1e-4
        assert result["error"] < 1e-10
    assert first["overruled"] == 0
    if name == "llama greedy":
        assert first["outputs"] == first["greedy"]
        assert second["overruled"] == 0
    else:
        assert second["overruled"] > 5
