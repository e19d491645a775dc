"""Ranks agree: one broadcast, rank 0 decides, and whoever knows something else is told what."""

from __future__ import annotations

import importlib.util
import itertools
import random
import re
from typing import Any

import pytest
import torch

from dsv4_npu.emulation.ranks import RankError, on_ranks
from dsv4_npu.errors import AuditError, InputError
from dsv4_npu.spec import ranks as ranks_module
from dsv4_npu.spec.ranks import PARTS, RankSync, digest, digest_weights
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
        ("unlike", "unlike", {}),
        ("unlike, blind", "unlike", {"blind": True}),
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
    assert first[:6] == [""] * 6
    assert re.fullmatch("rank 1, round 6: digest of the drafts is \\d+, rank 0 has \\d+", second[5])
    assert second[:5] == [
        "rank 1, round 1: requests is 2, rank 0 has 3",
        "rank 1, round 2: committed length of request 1 of the batch is 9, rank 0 has 6",
        "rank 1, round 3: verify width D is 4, rank 0 has 3",
        "rank 1, round 4: accept_index width is 2, rank 0 has 3",
        "rank 1, round 5: requests is 0, rank 0 has 2",
    ]


def test_a_batch_that_is_too_large_keeps_nobody_waiting(pair: list[dict[str, Any]]) -> None:
    """On both ranks, on rank 0 alone, on rank 1 alone; an ordinary round follows."""
    first, second = (results["mismatches"][6:] for results in pair)
    words = "batch = 5: at most 4 was agreed on"
    assert first == [words, words, ""]
    assert second == [words, "rank 1, round 9: requests is 2, rank 0 has 5", words]


DIFFERENCES = {
    "more requests": "requests is 4, rank 0 has 2",
    "fewer requests": "requests is 2, rank 0 has 4",
    "no requests": "requests is 0, rank 0 has 4",
    "larger D": "verify width D is 4, rank 0 has 2",
    "smaller D": "verify width D is 2, rank 0 has 4",
    "larger W": "accept_index width is 4, rank 0 has 2",
    "smaller W": "accept_index width is 2, rank 0 has 4",
    "lengths": "committed length of request 0 of the batch is 8, rank 0 has 7",
}


def roots(batch: int, width: int, depth: int) -> list[Any]:
    """A result that moves nothing: each root alone, followed by token 0."""
    return [[0] * (batch * width), [[b * width] + [-1] * (depth - 1) for b in range(batch)], [1] * batch]


@pytest.mark.parametrize("name", rank_jobs.SIZES)
def test_what_rank_0_has_in_other_sizes_is_not_consumed(pair: list[dict[str, Any]], name: str) -> None:
    """A rank with another batch, D or W gets its roots alone, until it is told; then rank 0 decides again."""
    first, second = (results["unlike"][name] for results in pair)
    own = rank_jobs.SIZES[name][1]
    assert second["parts"] == [roots(*own), roots(2, 3, 3)]
    assert second["said"] == [f"rank 1, round 1: {DIFFERENCES[name]}", ""]
    assert first["parts"][1][0] == [6000] * 6
    assert first["said"] == ["", ""]
    assert first["overruled"] == second["overruled"] == 0
    assert first["last"] == second["last"] == [7000] * 6
    # The rule off: an index that does not exist, or rank 0's numbers cut at the wrong places.
    blind = pair[1]["unlike, blind"][name]
    assert blind["parts"] != second["parts"]
    assert not blind["said"][0]


def distinct(weights: torch.Tensor) -> bool:
    """Whether lists that differ in one or two tokens, or in their order, have digests of their own."""
    draw, places = random.Random(5), weights.shape[1]

    def of(tokens: list[int]) -> tuple[int, ...]:
        return tuple(digest(torch.tensor(tokens), weights).tolist())

    for _ in range(1500):
        tokens = [draw.randrange(-1, 129280) for _ in range(draw.randrange(2, places + 1))]
        one, two = draw.sample(range(len(tokens)), 2)
        others = [list(tokens) for _ in range(4)]
        others[0][one] = draw.choice([-1, tokens[one] + 1, draw.randrange(129280)])
        others[1][one], others[1][two] = tokens[one] + draw.randrange(1, 9), tokens[two] - draw.randrange(1, 9)
        others[2][one], others[2][two] = tokens[two], tokens[one]
        draw.shuffle(others[3])
        if any(other != tokens and of(other) == of(tokens) for other in others):
            return False
    small = {of(list(tokens)) for tokens in itertools.product(range(5), repeat=4)}
    return len(small) == 5**4


def test_other_drafts_have_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = digest_weights(24)
    assert weights.shape == (2, 24)
    assert len({tuple(column) for column in weights.T.tolist()}) == 24
    assert distinct(weights)
    # Weights linear in the place, or a modulus of few values, are found out.
    place = torch.arange(1, 25)
    assert not distinct((place * 48271 % (2**31 - 1)).expand(2, -1))
    monkeypatch.setattr(ranks_module, "_MODULUS", 97)
    assert not distinct(digest_weights(24))


def test_two_tokens_are_never_exchanged_for_two_others() -> None:
    """The two equations of a change at two places have one solution: their determinant is no multiple of the prime."""
    (low, high), prime = digest_weights(300).tolist(), 2**31 - 1
    assert all((low[i] * high[j] - low[j] * high[i]) % prime for i, j in itertools.combinations(range(300), 2))
    assert digest(torch.full((300,), prime - 3), digest_weights(300)).tolist() == [
        sum((prime - 1) * weight for weight in row) % prime for row in (low, high)
    ]


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
