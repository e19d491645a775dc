"""Trees of every shape give the outputs and logits of plain greedy decoding on Hugging Face's own cache."""

from __future__ import annotations

import random

import pytest
import torch

from dsv4_npu.alloc.request import State
from dsv4_npu.emulation.trees.drafting import ScriptedTrees
from dsv4_npu.emulation.trees.engine import TreeEngine
from dsv4_npu.emulation.trees.model import TINY_LATENT
from dsv4_npu.errors import CapacityError, ConfigError, InputError, UnavailableError
from dsv4_npu.spec.trees import TreeSpec, most_nodes
from tests.trees.harness import Bench, check_empty

LENGTHS = [1, 7, 30]
PAGES = (1, 4, 16, 7)


def widths(topk: int, steps: int) -> list[int]:
    """Several D: the smallest, some in between, and the largest tree (or 30 nodes of it)."""
    most = min(most_nodes(topk, steps), 30)
    return sorted({2, (2 + most) // 3, most})


SHAPES = [(topk, steps, width) for topk in range(1, 5) for steps in range(1, 6) for width in widths(topk, steps)]


@pytest.mark.parametrize(("topk", "steps"), sorted({(topk, steps) for topk, steps, _ in SHAPES}))
def test_all_shapes(bench: Bench, topk: int, steps: int) -> None:
    for index, (_, _, width) in enumerate(one for one in SHAPES if one[:2] == (topk, steps)):
        spec = TreeSpec(topk, steps, width)
        for length in LENGTHS:
            bench.prompt(length)
        drafter = bench.scripted(spec, seed=width) if (index + steps) % 2 else None
        engine = bench.run(spec, LENGTHS, drafter, page=PAGES[(topk + steps + index) % len(PAGES)])
        most = max(max(run.accepts) for run in engine.finished)
        assert most <= min(steps + 1, width)


def in_order(engine: TreeEngine) -> None:
    """After every round: the audit, and the three counters of each request."""
    engine.alloc.audit()
    for run in engine.running:
        committed, allocated = engine.alloc.committed(run.row), engine.alloc.allocated(run.row)
        assert committed <= allocated
        if run.request.state is State.DECODE:
            assert len(run.request) == committed + 1


def test_every_length_and_moves_come_up(bench: Bench) -> None:
    spec = TreeSpec(3, 4, 12)
    engine = bench.run(spec, [5, 9, 12, 20], bench.scripted(spec), new=40, on_round=in_order)
    accepts = {length for run in engine.finished for length in run.accepts}
    assert accepts == {1, 2, 3, 4, 5}
    assert engine.device.moved > 20


def test_a_chain_moves_nothing(bench: Bench) -> None:
    for length in LENGTHS:
        bench.prompt(length)
    spec = TreeSpec(1, 3, 4)
    engine = bench.run(spec, LENGTHS, bench.scripted(spec))
    assert engine.device.moved == 0
    assert {length for run in engine.finished for length in run.accepts} == {1, 2, 3, 4}


def test_without_speculation(bench: Bench) -> None:
    engine = bench.run(TreeSpec(1, 0, 1), LENGTHS)
    assert all(set(run.accepts) == {1} for run in engine.finished)


@pytest.mark.parametrize("heads", [4, 1])
def test_multi_head_and_one_shared_head(heads: int) -> None:
    bench = Bench(num_key_value_heads=heads)
    spec = TreeSpec(3, 3, 9)
    engine = bench.run(spec, LENGTHS)
    assert engine.pool.keys.shape[3] == heads
    assert engine.device.moved


@pytest.mark.parametrize("scripted", [False, True])
def test_latent_rows(scripted: bool) -> None:
    """One slab of compressed rows: what DeepSeek-V3 caches, moved and read like any other."""
    try:
        bench = Bench(TINY_LATENT)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    for length in LENGTHS:
        bench.prompt(length)
    spec = TreeSpec(3, 4, 12)
    engine = bench.run(spec, LENGTHS, bench.scripted(spec) if scripted else None, page=4, new=24)
    assert [tuple(slab.shape[2:]) for slab in engine.pool.tensors()] == [(4, 1, 16)]
    assert engine.device.moved


def test_a_tight_pool_gives_requests_their_memory_back(bench: Bench) -> None:
    spec = TreeSpec(2, 3, 7)
    engine = bench.run(spec, [20, 25, 30, 33], page=4, pages=75, new=24)
    assert any(run.retractions for run in engine.finished)


def test_stop_tokens_and_aborts(bench: Bench) -> None:
    want = bench.oracle.greedy(bench.prompt(30), 16).tokens
    stop = want[6]
    spec = TreeSpec(3, 4, 12)
    engine = bench.engine(spec, bench.scripted(spec), options={"stop": (stop,)})
    first = engine.submit(bench.prompt(30), 16)
    second = engine.submit(bench.prompt(7), 40)
    for _ in range(5):
        engine.step()
    engine.abort(second)
    third = engine.submit(bench.prompt(1), 1)
    engine.run()
    assert first.outputs == want[: want.index(stop) + 1]
    assert (first.finish, second.finish, third.finish) == ("stop", "abort", "length")
    check_empty(engine)


def test_refusals_come_before_anything_changes(bench: Bench) -> None:
    engine = bench.engine(TreeSpec(2, 2, 5), pages=20, page=4)
    for prompt in ([], [bench.vocab], [-1]):
        with pytest.raises(InputError, match=f"tokens of 0 to {bench.vocab - 1}"):
            engine.submit(prompt, 4)
    with pytest.raises(InputError, match="exceed context_len = 160"):
        engine.submit([1] * 100, 61)
    with pytest.raises(CapacityError, match="FULL pages: 20 exist"):
        engine.submit([1] * 80, 8)
    with pytest.raises(ConfigError, match="topk = 321; the model has 320 tokens"):
        bench.engine(TreeSpec(321, 1, 4))
    check_empty(engine)


def test_one_seed_one_run(bench: Bench) -> None:
    spec = TreeSpec(3, 3, 10)
    runs = []
    for _ in range(2):
        engine = bench.engine(spec, options={"accept": "target-only", "temperature": 0.9, "seed": 4})
        for length in LENGTHS:
            engine.submit(bench.prompt(length), 12)
        runs.append([run.outputs for run in engine.run()])
    assert runs[0] == runs[1]


def test_logits_behind_sampled_tokens(bench: Bench) -> None:
    spec = TreeSpec(3, 3, 10)
    engine = bench.engine(spec, options={"accept": "target-only", "temperature": 0.8})
    for length in LENGTHS:
        engine.submit(bench.prompt(length), 20)
    for run in engine.run():
        want = bench.oracle.forced(run.prompt, run.outputs)
        assert float((torch.stack(run.logits) - want).abs().max()) < 1e-10
        assert run.outputs != bench.oracle.greedy(run.prompt, 20).tokens
    check_empty(engine)


def test_temperature_zero_is_greedy(bench: Bench) -> None:
    spec = TreeSpec(3, 3, 10)
    bench.run(spec, LENGTHS, bench.scripted(spec), options={"accept": "target-only"})


def test_scripted_trees_are_legal(bench: Bench) -> None:
    spec = TreeSpec(3, 4, 13)
    drafter: ScriptedTrees = bench.scripted(spec)
    history = bench.prompt(30)
    sizes = set()
    for seed in range(40):
        drafter.seed = seed
        tokens, parents = drafter._one(history)
        used = sum(parent >= 0 for parent in parents)
        sizes.add(used)
        depth = [0] * spec.width
        for j in range(1, used + 1):
            assert 0 <= parents[j] < j
            depth[j] = depth[parents[j]] + 1
            assert depth[j] <= spec.steps
        assert all(parents.count(j) <= spec.topk for j in range(spec.width))
        assert tokens[used + 1 :] == [-1] * (spec.width - used - 1)
    assert len(sizes) > 3


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 15))])
def test_any_order_of_events(bench: Bench, seed: int) -> None:
    """Requests come, are aborted and retracted at any moment, in a tight pool; what ends has the oracle's output."""
    draw = random.Random(seed)
    topk, steps = draw.randint(1, 4), draw.randint(1, 4)
    spec = TreeSpec(topk, steps, draw.randint(2, min(16, most_nodes(topk, steps))))
    page = draw.choice([1, 3, 8])
    drafter = bench.scripted(spec, seed) if draw.random() < 0.6 else None
    pages = -(-(80 + spec.reserve(page) * 2) // page)
    engine = bench.engine(spec, drafter, page=page, pages=pages, options={"batch": 3, "chunk": draw.randint(3, 20)})
    runs, aborted = [], []
    for _ in range(60):
        event = draw.random()
        live = [*engine.running, *engine.waiting]
        if event < 0.2 and len(runs) < 12:
            runs.append(engine.submit(bench.prompt(draw.randint(1, 40)), draw.randint(1, 20)))
        elif event < 0.25 and live:
            aborted.append(draw.choice(live))
            engine.abort(aborted[-1])
        elif event < 0.32 and engine.running:
            engine.retract(draw.choice(engine.running))
        else:
            engine.step()
        in_order(engine)
    engine.run()
    for run in runs:
        want = bench.oracle.greedy(run.prompt, run.max_new).tokens
        assert run.outputs == want[: len(run.outputs)]
        assert run in aborted or len(run.outputs) == run.max_new
    check_empty(engine)
