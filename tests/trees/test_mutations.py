"""The head's proposals follow one history; and each rule of the commit, switched off, is found out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_npu import ops
from dsv4_npu.emulation.trees import rounds as rounds_module
from dsv4_npu.emulation.trees.drafting import EagleTrees
from dsv4_npu.emulation.trees.head import EagleHead
from dsv4_npu.emulation.trees.rounds import TreeRounds
from dsv4_npu.errors import Dsv4NpuError
from dsv4_npu.pools.full_kv import FullKVPool
from dsv4_npu.spec.trees import TreeSpec
from tests.trees.harness import Bench, Watched

#: D = 10 rows, W = 5: a stride of D reads elsewhere than one of W.
SPEC = TreeSpec(3, 4, 10)
LENGTHS = [2, 9, 14, 23]


def outputs(bench: Bench) -> None:
    """Outputs and logits against the oracle."""
    bench.run(SPEC, LENGTHS, bench.scripted(SPEC), new=24)


def proposals(bench: Bench) -> Watched:
    """Outputs, and the next round's proposals, against a linear run."""
    watched, _ = bench.watched(SPEC)
    bench.run(SPEC, LENGTHS, watched, new=24)
    bench.check_proposals(watched)
    return watched


def proposals_alone(bench: Bench) -> None:
    watched, _ = bench.watched(SPEC)
    engine = bench.engine(SPEC, watched)
    for length in LENGTHS:
        engine.submit(bench.prompt(length), 24)
    engine.run()
    bench.check_proposals(watched)


def caught(run: Any, bench: Bench) -> bool:
    """Whether a run is found to be wrong: by an oracle, or by a check of ours on the way."""
    try:
        run(bench)
    except (AssertionError, Dsv4NpuError):
        return True
    return False


class Mutation:
    """One rule off: what is put in its place, and what it did."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.hits = 0

    def op(self, name: str, instead: Any) -> None:
        """Replace an op where the rounds call it."""
        double = type("Ops", (), {one: staticmethod(getattr(ops, one)) for one in ops.__all__})
        setattr(double, name, staticmethod(instead))
        self.patch.setattr(rounds_module, "ops", double)


@pytest.fixture
def mutation(monkeypatch: pytest.MonkeyPatch) -> Mutation:
    return Mutation(monkeypatch)


def test_proposals_follow_the_history(bench: Bench) -> None:
    watched = proposals(bench)
    assert len(watched.seen) > 20
    trees = {(tuple(one.tokens), tuple(one.parents)) for one in watched.seen}
    assert len(trees) > len(watched.seen) // 2


def test_the_heads_own_trees_follow_the_history(bench: Bench) -> None:
    """As in :func:`proposals`, with the head's own trees verified, and through retractions."""

    head = EagleHead(bench.model, 0)
    watched = Watched(EagleTrees(head, SPEC), head, SPEC)
    engine = bench.run(SPEC, [20, 25, 33], watched, page=4, pages=66, new=24)
    bench.check_proposals(watched)
    assert any(run.retractions for run in engine.finished)


def test_no_compaction_of_hidden_states(bench: Bench, mutation: Mutation) -> None:
    mutation.op("compact_accept_", lambda p, h, index, lens: ops.compact_accept_(p, None, index, lens))
    assert not caught(outputs, bench)
    assert caught(proposals_alone, bench)


def test_no_compaction_of_predict(bench: Bench, mutation: Mutation) -> None:
    mutation.op("compact_accept_", lambda p, h, index, lens: ops.compact_accept_(p.clone(), h, index, lens))
    assert not caught(outputs, bench)
    assert caught(proposals_alone, bench)


def test_no_move(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FullKVPool, "move_kv", lambda self, tgt, src: None)
    assert caught(outputs, bench)


def test_move_reversed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FullKVPool.move_kv
    monkeypatch.setattr(FullKVPool, "move_kv", lambda self, tgt, src: real(self, src, tgt))
    assert caught(outputs, bench)


def one_by_one(pool: FullKVPool, tgt: torch.Tensor, src: torch.Tensor, backwards: bool) -> None:
    """A move that writes each row before it reads the next one."""
    pairs = [(t, s) for t, s in zip(tgt.flatten().tolist(), src.flatten().tolist(), strict=True) if t >= 0]
    for slab in pool.tensors():
        rows = slab.view(slab.shape[0], -1, *slab.shape[3:])
        for t, s in reversed(pairs) if backwards else pairs:
            rows[:, t] = rows[:, s]


def test_move_without_reading_the_sources_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FullKVPool, "move_kv", lambda self, tgt, src: one_by_one(self, tgt, src, backwards=True))
    assert caught(outputs, bench)


def test_one_slab_moved_instead_of_both(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FullKVPool, "move_kv", lambda self, tgt, src: ops.move_kv_(self.keys, tgt, src))
    assert caught(outputs, bench)


def test_bonus_read_at_the_end_of_the_buffer(bench: Bench, mutation: Mutation) -> None:
    def last_row(bonus: torch.Tensor, predict: torch.Tensor, index: torch.Tensor, lens: torch.Tensor) -> None:
        bonus.copy_(predict.view(len(bonus), -1)[:, -1])

    mutation.op("fill_bonus_tokens_", last_row)
    assert caught(outputs, bench)


def test_bonus_read_by_width(bench: Bench, mutation: Mutation) -> None:
    def last_column(bonus: torch.Tensor, predict: torch.Tensor, index: torch.Tensor, lens: torch.Tensor) -> None:
        bonus.copy_(predict[index[:, -1].long()])

    mutation.op("fill_bonus_tokens_", last_column)
    assert caught(outputs, bench)


def test_stride_d_instead_of_the_width(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """``accept_index`` read as if its rows were D apart."""
    real = TreeRounds._agreed

    def strided(self: TreeRounds, result: Any, seq_lens: torch.Tensor, candidates: torch.Tensor) -> Any:
        result = real(self, result, seq_lens, candidates)
        batch, depth = result.accept_index.shape
        at = torch.arange(batch)[:, None] * self.spec.width + torch.arange(depth)
        flat = result.accept_index.flatten()
        if depth > 1:
            result.accept_index.copy_(flat[at.clamp_max(flat.numel() - 1)])
        return result

    monkeypatch.setattr(TreeRounds, "_agreed", strided)
    assert caught(outputs, bench)


def test_rotary_position_follows_the_row(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = rounds_module.tree_layout

    def by_row(parents: torch.Tensor) -> Any:
        layout = real(parents)
        layout.depth.copy_(torch.arange(parents.shape[1]).expand_as(parents))
        return layout

    monkeypatch.setattr(rounds_module, "tree_layout", by_row)
    assert caught(outputs, bench)


def test_siblings_see_each_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = rounds_module.tree_layout

    def causal(parents: torch.Tensor) -> Any:
        layout = real(parents)
        layout.mask.copy_(torch.ones_like(layout.mask).tril())
        return layout

    monkeypatch.setattr(rounds_module, "tree_layout", causal)
    assert caught(outputs, bench)
