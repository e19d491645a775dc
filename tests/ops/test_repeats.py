"""Equal inputs give equal bits, fifty times over: a race between programs or warps would show as a difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4_npu import ops
from dsv4_npu.ops import _registry

RUNS = 50
POISON = -77
Call = tuple[tuple[Any, ...], tuple[int, ...]]


def lengths(rng: torch.Generator, bs: int, most: int) -> torch.Tensor:
    return torch.randint(1, most + 1, (bs,), generator=rng)


def accepted_paths(rng: torch.Generator, bs: int, drafts: int, width: int) -> torch.Tensor:
    """Random ascending paths from each request's root."""
    below = torch.rand(bs, drafts - 1, generator=rng).argsort(1)[:, : width - 1].sort(1).values + 1
    first = torch.arange(bs)[:, None] * drafts
    return torch.cat((first, first + below), 1).to(torch.int32)


def clear_drafts(rng: torch.Generator) -> Call:
    bs, drafts, ring = 37, 9, 256
    state = torch.rand(5, (bs + 1) * ring, 96, generator=rng)
    rows = torch.randperm(bs, generator=rng) + 1
    return (state, rows, torch.randint(0, 9999, (bs,), generator=rng), lengths(rng, bs, drafts), ring, drafts), (0,)


def clear_requests(rng: torch.Generator) -> Call:
    state = torch.rand(5, 40 * 24, 96, generator=rng)
    return (state, torch.randperm(40, generator=rng)[:17], 24), (0,)


def move(rng: torch.Generator) -> Call:
    """A permutation in place over more rows than a warp holds: every row is read and written."""
    slab = torch.rand(7, 20, 16, 1, 160, generator=rng)
    slots = torch.arange(1, 61)
    return (slab, slots, slots[torch.randperm(60, generator=rng)]), (0,)


def move_groups(rng: torch.Generator) -> Call:
    slab = torch.rand(7, 20, 16, 1, 160, generator=rng).bfloat16()
    first = torch.arange(1, 301, 5)[:, None]
    target = first + torch.arange(4)
    return (slab, target, target.flip(1).contiguous()), (0,)


def compact(rng: torch.Generator) -> Call:
    bs, drafts, width = 29, 9, 6
    predict = torch.randint(0, 999, (bs * drafts,), generator=rng)
    hidden = torch.rand(bs * drafts, 320, generator=rng).bfloat16()
    return (predict, hidden, accepted_paths(rng, bs, drafts, width), lengths(rng, bs, width)), (0, 1)


def bonus(rng: torch.Generator) -> Call:
    bs, drafts, width = 29, 9, 6
    predict = torch.randint(0, 999, (bs * drafts,), generator=rng)
    poisoned = torch.full((bs,), POISON)
    return (poisoned, predict, accepted_paths(rng, bs, drafts, width), lengths(rng, bs, width)), (0,)


def gather(rng: torch.Generator) -> Call:
    bs, drafts, width = 29, 9, 6
    slots = torch.randperm(bs * drafts, generator=rng) + 1
    return (slots, accepted_paths(rng, bs, drafts, width), lengths(rng, bs, width)), ()


def extend(rng: torch.Generator) -> Call:
    bs, columns, page = 29, 12, 48
    table = torch.randint(1, 999, (bs + 1, columns), dtype=torch.int32, generator=rng)
    starts, new = (torch.randint(0, columns * page // 2, (bs,), generator=rng) for _ in range(2))
    return (table, torch.randperm(bs, generator=rng) + 1, starts, new, page, int(new.sum()), columns), ()


def verify_inputs(rng: torch.Generator, vocab: int) -> dict[str, Any]:
    bs, drafts = 23, 6
    parents = [0, 0, 0, 1, 1]  # root -> 1, 2, 3; 1 -> 4, 5
    children, siblings = torch.full((bs, drafts), -1), torch.full((bs, drafts), -1)
    for node, parent in reversed(list(enumerate(parents, 1))):
        siblings[:, node] = children[:, parent]
        children[:, parent] = node
    sizes = ((bs * drafts,), (bs, 4), (bs,))
    rows = torch.softmax(2 * torch.randn(2, bs, drafts, vocab, generator=rng), -1)
    likely = rows[0].topk(3).indices
    candidates = likely.gather(2, torch.randint(0, 3, (bs, drafts, 1), generator=rng))
    return {
        "outputs": tuple(torch.full(n, POISON, dtype=torch.int32) for n in sizes),
        "candidates": candidates.squeeze(2),
        "rows": torch.arange(bs * drafts).view(bs, drafts),
        "links": (children, siblings),
        "coins": torch.rand(bs, drafts, generator=rng) * 0.3,
        "final": torch.rand(bs, generator=rng),
        "p": rows[0],
        "q": rows[1],
    }


def chain(rng: torch.Generator, vocab: int = 20011) -> Call:
    x = verify_inputs(rng, vocab)
    given = (*x["outputs"], x["candidates"], x["rows"], x["coins"], x["final"], x["p"], x["q"])
    return given, (0, 1, 2)


def tree(rng: torch.Generator, vocab: int = 20011) -> Call:
    x = verify_inputs(rng, vocab)
    return (*x["outputs"], x["candidates"], x["rows"], *x["links"], x["coins"], x["final"], x["p"]), (0, 1, 2)


def greedy(rng: torch.Generator) -> Call:
    x = verify_inputs(rng, 3)
    wanted = torch.randint(0, 3, x["rows"].shape, generator=rng)
    return (*x["outputs"], x["candidates"], x["rows"], *x["links"], wanted), (0, 1, 2)


def top_k(rng: torch.Generator) -> Call:
    return (verify_inputs(rng, 20011)["p"][:, 0].contiguous(), torch.randint(1, 99, (23,), generator=rng)), ()


def top_p(rng: torch.Generator) -> Call:
    return (verify_inputs(rng, 20011)["p"][:, 0].contiguous(), torch.rand(23, generator=rng)), ()


CASES: dict[str, tuple[str, Callable[[torch.Generator], Call]]] = {
    "clear_c128_draft_states_": ("clear_c128_draft_states_", clear_drafts),
    "clear_request_states_": ("clear_request_states_", clear_requests),
    "move_kv_": ("move_kv_", move),
    "move_kv_ in groups": ("move_kv_", move_groups),
    "compact_accept_": ("compact_accept_", compact),
    "fill_bonus_tokens_": ("fill_bonus_tokens_", bonus),
    "gather_accepted_slots": ("gather_accepted_slots", gather),
    "extend_slots": ("extend_slots", extend),
    "chain_speculative_sampling": ("chain_speculative_sampling", chain),
    "tree_speculative_sampling_target_only": ("tree_speculative_sampling_target_only", tree),
    "chain, long rows": ("chain_speculative_sampling", lambda rng: chain(rng, 129280)),
    "tree, long rows": ("tree_speculative_sampling_target_only", lambda rng: tree(rng, 129280)),
    "verify_tree_greedy": ("verify_tree_greedy", greedy),
    "top_k_renorm_prob": ("top_k_renorm_prob", top_k),
    "top_p_renorm_prob": ("top_p_renorm_prob", top_p),
}


def run(op: str, call: Call, backend: str = "auto") -> list[torch.Tensor]:
    """The written arguments and the results, as bytes; the call's own tensors stay as they are."""
    given, written = call
    arguments = [x.clone() if i in written else x for i, x in enumerate(given)]
    result = getattr(ops, op)(*arguments, backend=backend)
    results = (result,) if isinstance(result, torch.Tensor) else result or ()
    return [x.view(torch.uint8) for x in (*(arguments[i] for i in written), *results)]


def test_every_op_is_here() -> None:
    assert {op for op, _ in CASES.values()} == set(ops.__all__)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("case", CASES)
def test_equal_inputs_give_equal_bits(case: str) -> None:
    op, make = CASES[case]
    given, written = make(torch.Generator().manual_seed(5))
    call = tuple(x.cuda() if isinstance(x, torch.Tensor) else x for x in given), written
    first = run(op, call)
    assert first
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    others = []
    for turn in range(RUNS - 1):
        with torch.cuda.stream(streams[turn % 2]):  # calls in a row, and beside each other
            others.append(run(op, call))
    torch.cuda.synchronize()
    for again in others:
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


WRITING = [case for case, (op, _) in CASES.items() if "-> ()" in _registry.ops[op].schema]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("case", WRITING)
def test_the_same_call_again_on_other_values(case: str) -> None:
    """Other values in the same memory: from the third call on the launch is a repeated one."""
    name, make = CASES[case]
    function, op = getattr(ops, name), _registry.ops[name]
    op.calls._known.clear()
    inputs = [make(torch.Generator().manual_seed(seed)) for seed in range(5)]
    kept = [x.cuda() if isinstance(x, torch.Tensor) else x for x in inputs[0][0]]
    launch = pytest.importorskip("dsv4_npu.ops._launch")
    launches: list[Any] = []
    launch.observers.append(launches.append)
    try:
        for given, written in inputs:
            for mine, fresh in zip(kept, given, strict=True):
                if isinstance(mine, torch.Tensor):
                    mine.copy_(fresh)
            function(*kept)
            alone = [x.cuda() if isinstance(x, torch.Tensor) else x for x in given]
            op("triton", *alone)
            for i in written:
                assert torch.equal(kept[i].view(torch.uint8), alone[i].view(torch.uint8))
    finally:
        launch.observers.pop()
    assert len(launches) == 2 * len(inputs)
    assert any(call is not None for call in op.calls._known.values())


def test_a_race_shows() -> None:
    """The check itself: one row moved before another was read gives other bytes."""
    given, written = move(torch.Generator().manual_seed(5))
    slab, target, source = given
    raced = slab.clone()
    rows = raced.view(7, 320, 160)
    for to, at in zip(target.tolist(), source.tolist(), strict=True):
        rows[:, to] = rows[:, at]
    assert not torch.equal(run("move_kv_", (given, written))[0], raced.view(torch.uint8))
