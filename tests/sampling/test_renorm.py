"""Renormalisation: literal rows, and a judge in exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from verify_world import Target, smooth_rows

from dsv4_npu import ops

EXAMPLES = {"ref": 60, "cpp": 300, "interpreter": 5, "cuda": 60}
NAN = float("nan")


def top_k(target: Target, rows: list[list[float]], limits: list[int]) -> list[list[float]]:
    probs, ks = torch.tensor(rows).to(target.device), torch.tensor(limits, dtype=torch.int32).to(target.device)
    return ops.top_k_renorm_prob(probs, ks, backend=target.backend).tolist()


def top_p(target: Target, rows: list[list[float]], limits: list[float]) -> list[list[float]]:
    probs, ps = torch.tensor(rows).to(target.device), torch.tensor(limits).to(target.device)
    return ops.top_p_renorm_prob(probs, ps, backend=target.backend).tolist()


def ranked(row: list[float]) -> list[int]:
    return sorted((t for t, p in enumerate(row) if p > 0), key=lambda t: (-row[t], t))


def scaled(row: list[float], kept: list[int]) -> list[float]:
    mass = sum((Fraction(row[t]) for t in kept), Fraction(0))
    return [float(Fraction(p) / mass) if t in kept else 0.0 for t, p in enumerate(row)]


EIGHTHS = st.lists(st.integers(0, 8).map(lambda x: x / 8), min_size=1, max_size=12)


def test_top_k_rule(target: Target) -> None:
    @settings(max_examples=EXAMPLES[target.kind], deadline=None, suppress_health_check=list(HealthCheck))
    @given(EIGHTHS, st.integers(-1, 14))
    def check(row: list[float], k: int) -> None:
        kept = ranked(row)[: k if k > 0 else len(row)]
        assert top_k(target, [row], [k])[0] == pytest.approx(scaled(row, kept), rel=1e-6)

    check()


def test_top_p_rule(target: Target) -> None:
    @settings(max_examples=EXAMPLES[target.kind], deadline=None, suppress_health_check=list(HealthCheck))
    @given(EIGHTHS, st.integers(0, 40).map(lambda x: x / 32))
    def check(row: list[float], limit: float) -> None:
        order = ranked(row)
        kept = [t for n, t in enumerate(order) if n == 0 or limit >= 1 or sum(row[s] for s in order[:n]) < limit]
        assert top_p(target, [row], [limit])[0] == pytest.approx(scaled(row, kept), rel=1e-6)

    check()


def test_literal_rows(target: Target) -> None:
    row = [0.1, 0.4, 0.1, 0.4]
    assert top_k(target, [row] * 4, [1, 2, 3, 4]) == [
        pytest.approx(x, abs=1e-6) for x in ([0, 1, 0, 0], [0, 0.5, 0, 0.5], [1 / 9, 4 / 9, 0, 4 / 9], row)
    ]
    assert top_p(target, [row] * 4, [0.0, 0.45, 0.85, 1.0]) == [
        pytest.approx(x, abs=1e-6) for x in ([0, 1, 0, 0], [0, 0.5, 0, 0.5], [1 / 9, 4 / 9, 0, 4 / 9], row)
    ]


def test_odd_entries(target: Target) -> None:
    rows = [[NAN, 0.5, -1.0, 0.25], [0.0, 0.0, 0.0, 0.0], [NAN, -1.0, NAN, 0.0]]
    wanted = [[0, 1, 0, 0], [0] * 4, [0] * 4]
    assert top_k(target, rows, [1, 2, 1]) == wanted
    assert top_p(target, rows, [0.3, 0.5, 0.5]) == wanted
    assert top_k(target, rows, [3, 0, 9])[0] == pytest.approx([0, 2 / 3, 0, 1 / 3], rel=1e-6)
    assert top_p(target, rows, [0.9, 1.0, 0.9])[0] == pytest.approx([0, 2 / 3, 0, 1 / 3], rel=1e-6)


def test_uniform_row_keeps_the_lowest_tokens(target: Target) -> None:
    """Ties that cross blocks: exactly k remain, from the front."""
    vocab = 9001
    kept = ops.top_k_renorm_prob(
        torch.full((1, vocab), 1 / vocab).to(target.device),
        torch.tensor([4500]).to(target.device),
        backend=target.backend,
    )
    assert torch.nonzero(kept[0]).flatten().tolist() == list(range(4500))


@pytest.mark.parametrize("vocab", [2, 2047, 4097, 129280])
def test_sizes(vocab: int, target: Target) -> None:
    rng = torch.Generator().manual_seed(vocab)
    rows = 1 if target.kind == "interpreter" and vocab > 5000 else 3  # the interpreter takes seconds for a long one
    probs = smooth_rows(rng, rows, vocab)
    for name, limits in (
        ("top_k_renorm_prob", torch.tensor([min(50, vocab), 1, vocab // 2])[:rows]),
        ("top_p_renorm_prob", torch.tensor([0.5, 0.05, 0.95])[:rows]),
    ):
        reference = getattr(ops, name)(probs, limits, backend="ref")
        result = getattr(ops, name)(probs.to(target.device), limits.to(target.device), backend=target.backend).cpu()
        torch.testing.assert_close(result.sum(-1), torch.ones(rows))
        differing = (result > 0) != (reference > 0)
        assert int(differing.sum(-1).max()) <= (1 if name == "top_p_renorm_prob" else 0)
        agreed = ~differing
        torch.testing.assert_close(result[agreed], reference[agreed], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("at", [0, 2047, 2048, 4095, 4096, 4998])
def test_index_of_the_maximum(at: int, target: Target) -> None:
    probs = torch.full((1, 4999), 1e-4)
    probs[0, at] = 0.5
    for name, limit in (("top_k_renorm_prob", torch.tensor([1])), ("top_p_renorm_prob", torch.tensor([0.5]))):
        kept = getattr(ops, name)(probs.to(target.device), limit.to(target.device), backend=target.backend)
        assert torch.nonzero(kept[0]).flatten().tolist() == [at]
        assert float(kept[0, at]) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("name", ["top_k_renorm_prob", "top_p_renorm_prob"])
def test_no_rows_is_no_work(name: str, target: Target) -> None:
    limits = torch.zeros(0, dtype=torch.int32 if "top_k" in name else torch.float32)
    result = getattr(ops, name)(
        torch.zeros(0, 5, device=target.device), limits.to(target.device), backend=target.backend
    )
    assert result.shape == (0, 5)
