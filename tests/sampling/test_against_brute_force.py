"""Every implementation against a judge that knows only the rules, and the implementations against each other."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from brute_force import JUDGES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from verify_world import Batch, Target, random_batch, run

OPS = tuple(JUDGES)
EXAMPLES = {"ref": 60, "cpp": 300, "interpreter": 25, "cuda": 60}


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    drafts = draw(st.integers(1, 9), label="D")
    return random_batch(
        seed=draw(st.integers(0, 2**20), label="seed"),
        bs=draw(st.sampled_from([0, 1, 3]), label="bs"),
        drafts=drafts,
        width=draw(st.integers(1, drafts + 2), label="width"),
        vocab=draw(st.sampled_from([1, 2, 3, 5, 7]), label="V"),
        exact=draw(st.booleans(), label="exact"),
    )


@pytest.mark.parametrize("op", OPS)
def test_small(op: str, target: Target) -> None:
    @settings(max_examples=EXAMPLES[target.kind], deadline=None, suppress_health_check=list(HealthCheck))
    @given(batches())
    def check(batch: Batch) -> None:
        JUDGES[op](batch, run(target, op, batch))

    check()


@pytest.mark.parametrize("op", OPS)
def test_equal_to_ref_where_float32_is_exact(op: str, target: Target) -> None:
    """On few-bit numbers no rounding can excuse a difference."""
    for seed in range(EXAMPLES[target.kind] // 5):
        drafts = seed % 9 + 1
        batch = random_batch(seed, 3, drafts, max(1, drafts - seed % 3), [2, 3, 7, 50][seed % 4])
        assert run(target, op, batch) == run(Target("ref", "cpu"), op, batch)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("bs", "drafts", "vocab"),
    [(3, 4, 2047), (1, 5, 4096), (1, 3, 4097), (1, 9, 129280), (2, 1, 129280), (257, 2, 3)],
)
def test_sizes(op: str, target: Target, bs: int, drafts: int, vocab: int) -> None:
    batch = random_batch(bs + drafts + vocab, bs, drafts, drafts, vocab, exact=False)
    JUDGES[op](batch, run(target, op, batch))


@pytest.mark.parametrize("op", OPS)
def test_same_coins_same_tokens(op: str, target: Target) -> None:
    batch = random_batch(5, 3, 4, 4, 9001, exact=False)
    first = run(target, op, batch)
    repeats = 50 if target.kind == "cuda" else 2
    assert all(run(target, op, batch) == first for _ in range(repeats))


@pytest.mark.parametrize("op", OPS)
def test_inputs_are_not_written(op: str, target: Target) -> None:
    batch = random_batch(8, 2, 4, 3, 11)
    before = [x.clone() for x in batch.inputs(op) if isinstance(x, torch.Tensor)]
    run(target, op, batch)
    after = [x for x in batch.inputs(op) if isinstance(x, torch.Tensor)]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("op", ["chain_speculative_sampling", "tree_speculative_sampling_target_only"])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_programs_share_a_row(
    op: str, parts: int, target: Target, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """However many programs sum a row, and wherever their blocks end, the draw is the same."""
    if target.kind not in ("interpreter", "cuda"):
        pytest.skip("only Triton kernels share rows")
    from dsv4_npu.ops import _draw_triton

    small = _draw_triton.Tiling(64, ahead=parts % 2 == 1, warps=1, programs=1)
    monkeypatch.setattr(_draw_triton, "TILING", small)
    monkeypatch.setattr(importlib.import_module(f"dsv4_npu.ops.{op}.triton"), "GPU_TILING", small)
    monkeypatch.setattr(_draw_triton, "programs_per_row", lambda batch, blocks, tile, device: min(parts, blocks))
    _draw_triton.plan.cache_clear()
    request.addfinalizer(_draw_triton.plan.cache_clear)
    for seed, vocab in enumerate((1, 65, 300)):
        batch = random_batch(seed, 2, 3, 3, vocab, exact=seed % 2 == 0)
        for tried in (batch, replace(batch, last_coins=torch.ones(2), coins=torch.ones(2, 3))):
            JUDGES[op](tried, run(target, op, tried))
