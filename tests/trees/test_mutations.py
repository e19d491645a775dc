"""The head's proposals follow one history; and each rule of the commit, switched off, is found out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_npu import ops
from dsv4_npu.emulation.trees import rounds as rounds_module
from dsv4_npu.emulation.trees.drafting import EagleTrees
from dsv4_npu.emulation.trees.head import EagleHead
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
    """Whether an oracle finds what a run computed wrong. An error on the way there is none of its findings."""
    try:
        run(bench)
    except AssertionError:
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


class Strided:
    """The readers of ``accept_index`` with rows ``stride`` apart (None: W), in the flat buffer, unchecked."""

    def __init__(self, stride: int | None) -> None:
        self.stride, self.misread = stride, 0
        self.sources = torch.empty(0)

    def index(self, index: torch.Tensor, lens: torch.Tensor, rows: int) -> torch.Tensor:
        """What is read at each place; behind the buffer's end it begins again."""
        batch, depth = index.shape
        place = torch.arange(depth)
        at = torch.arange(batch)[:, None] * (depth if self.stride is None else self.stride) + place
        read = index.flatten()[at % index.numel()].long() % rows
        self.misread += int(((read != index) & (place < lens[:, None])).sum())
        return read

    def fill_bonus_tokens_(
        self, bonus: torch.Tensor, predict: torch.Tensor, index: torch.Tensor, lens: torch.Tensor
    ) -> None:
        last = lens.long()[:, None] - 1
        bonus.copy_(predict[self.index(index, lens, len(predict)).gather(1, last)[:, 0]])

    def gather_accepted_slots(
        self, slots: torch.Tensor, index: torch.Tensor, lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The host, which would find other slots than its own, learns the right ones; :meth:`move` does not."""
        self.sources = slots[self.index(index, lens, len(slots))]
        return ops.gather_accepted_slots(slots, index, lens)

    def move(self, pool: FullKVPool, tgt: torch.Tensor, src: torch.Tensor) -> None:
        """All sources are read before a target is written, whoever owns them."""
        moved = tgt >= 0
        for slab in pool.tensors():
            rows = slab.view(slab.shape[0], -1, *slab.shape[3:])
            rows[:, tgt[moved]] = rows[:, self.sources[moved]].clone()

    def compact_accept_(
        self, predict: torch.Tensor, hidden: torch.Tensor, index: torch.Tensor, lens: torch.Tensor
    ) -> None:
        read = self.index(index, lens, len(predict))
        for rows in (predict, hidden):
            before = rows.clone()
            for b, length in enumerate(lens.tolist()):
                front = b * (len(rows) // len(lens))
                rows[front : front + length] = before[read[b, :length]]


@pytest.mark.parametrize(
    ("reader", "compared"),
    [("fill_bonus_tokens_", outputs), ("gather_accepted_slots", outputs), ("compact_accept_", proposals_alone)],
)
def test_stride_d_instead_of_the_width(bench: Bench, mutation: Mutation, reader: str, compared: Any) -> None:
    """``accept_index`` read as if its rows were D apart: the next root, the moved KV and the head's input are wrong."""
    right, wrong = Strided(None), Strided(SPEC.width)
    for strided in (right, wrong):
        mutation.op(reader, getattr(strided, reader))
        if reader == "gather_accepted_slots":
            mutation.patch.setattr(FullKVPool, "move_kv", lambda pool, tgt, src, by=strided.move: by(pool, tgt, src))
        assert caught(compared, bench) == (strided is wrong)
    assert wrong.misread
    assert not right.misread


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
