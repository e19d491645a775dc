"""The verify and sampling ops, at DeepSeek-V4's vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import _kernels_public as public
import torch
from _kernels_case import POISON, Case, both, generator, same
from _kernels_reading import add_rows

from dsv4_npu.ops import _registry

CHAIN, TREE = "chain_speculative_sampling", "tree_speculative_sampling_target_only"
THRESHOLDS = (1.0, 1.0)


@dataclass
class Inputs:
    """A batch whose walks end with a rejection after 0 to D - 2 accepted drafts."""

    candidates: torch.Tensor
    rows: torch.Tensor
    children: torch.Tensor
    siblings: torch.Tensor
    coins: torch.Tensor
    final: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def chain(self) -> tuple[torch.Tensor, ...]:
        return (*self.outputs, self.candidates, self.rows, self.coins, self.final, self.p, self.q)

    def tree(self) -> tuple[Any, ...]:
        links = (self.candidates, self.rows, self.children, self.siblings)
        return (*self.outputs, *links, self.coins, self.final, self.p, *THRESHOLDS)

    def poison(self) -> None:
        for output in self.outputs:
            output.fill_(POISON)


def inputs(device: str, seed: int, batch: int, drafts: int, vocab: int) -> Inputs:
    """Chains: node k follows node k - 1. The coin of a request's last step is 1 and q likes the draft there."""
    rng = generator(device, seed)
    p = torch.softmax(torch.randn(batch, drafts, vocab, device=device, generator=rng), -1)
    q = torch.softmax(torch.randn(batch, drafts - 1, vocab, device=device, generator=rng), -1)
    candidates = torch.randint(0, vocab, (batch, drafts), device=device, generator=rng)
    last = torch.randint(0, drafts - 1, (batch,), device=device, generator=rng)
    coins = torch.zeros(batch, drafts, device=device)
    each = torch.arange(batch, device=device)
    coins[each, last] = 1
    q[each, last, candidates[each, last + 1]] = 0.9
    children = torch.tensor([[*range(1, drafts), -1]] * batch, device=device)
    sizes = ((batch * drafts,), (batch, drafts), (batch,))
    predicts, index, number = (torch.full(n, POISON, dtype=torch.int32, device=device) for n in sizes)
    return Inputs(
        candidates,
        torch.arange(batch * drafts, device=device).view(batch, drafts),
        children,
        torch.full_like(children, -1),
        coins,
        torch.rand(batch, device=device, generator=rng),
        p,
        q,
        (predicts, index, number),
    )


def weights_of_last_row(op: str, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Each request's final weights in float64 and the row of the verify that receives the drawn token."""
    each = torch.arange(len(x.final), device=x.p.device)
    step = x.outputs[2].long()
    weights = x.p[each, step].double()
    if op == CHAIN:
        weights = (weights - x.q[each, step].double()).clamp(min=0)
    else:
        weights[each, x.candidates[each, step + 1]] = 0
    return weights, x.outputs[1].gather(1, step[:, None]).flatten().long()


def check_drawn(op: str, x: Inputs) -> None:
    """The drawn tokens against the inverse CDF in float64: weight > 0, and the coin within rounding of its step."""
    weights, rows = weights_of_last_row(op, x)
    token = x.outputs[0][rows].long()
    each = torch.arange(len(token), device=token.device)
    assert ((token >= 0) & (token < weights.shape[1])).all(), f"{op}: a drawn token is no token"
    assert (weights[each, token] > 0).all(), f"{op}: a drawn token has weight 0"
    steps = weights.cumsum(1)
    goal = x.final.double() * steps[:, -1]
    near = 2e-6 * steps[:, -1]
    after = steps[each, token]
    assert (goal < after + near).all(), f"{op}: a drawn token lies before its coin"
    assert (after - weights[each, token] <= goal + near).all(), f"{op}: a drawn token lies behind its coin"


def sampling_case(op: str, device: str, batch: int, drafts: int, vocab: int, rivals: dict[str, Any]) -> Case:
    function, bare = both(op, device)
    tree = op == TREE
    arguments: Callable[[Inputs], tuple[Any, ...]] = Inputs.tree if tree else Inputs.chain
    recreated = public.tree if tree else public.chain

    others: dict[str, Callable[[Inputs], object]] = {"public": lambda x: recreated(*arguments(x))}
    if not tree and "chain" in rivals:

        def real(x: Inputs) -> None:
            links = (x.children, x.siblings)
            given = x.chain()
            rivals["chain"](*given[:5], *links, *given[5:], *THRESHOLDS, True)

        others["sglang"] = real

    def ours(x: Inputs) -> None:
        function(*arguments(x))

    def verify(x: Inputs) -> None:
        x.poison()
        _registry.ops[op].ref(*arguments(x))
        wanted = [output.clone() for output in x.outputs]
        drawn_at = weights_of_last_row(op, x)[1]
        wanted[0][drawn_at] = 0  # a drawn token may differ by rounding and is judged by itself
        for run in (ours, *others.values()):
            x.poison()
            run(x)
            mine = [output.clone() for output in x.outputs]
            same(op, mine[2], wanted[2])
            # The public kernels leave what lies behind the accepted rows.
            valid = torch.arange(drafts, device=device) <= (drafts if run is ours else wanted[2][:, None])
            same(op, mine[1] * valid, wanted[1] * valid)
            check_drawn(op, x)
            mine[0][drawn_at] = 0
            same(op, mine[0], wanted[0])

    rows_read = 1 if tree else 2
    return Case(
        op,
        f"V {vocab}, D {drafts}, one draft rejected",
        batch,
        lambda seed: inputs(device, seed, batch, drafts, vocab),
        ours,
        lambda x: bare(*arguments(x)),
        verify,
        lambda x: batch * vocab * 4 * rows_read,
        "read",
        others | {"reading alone": lambda x: add_rows(x.p, None if tree else x.q)},
        sets=max(6, min(96, 2**29 // (batch * vocab * 4 * rows_read))) if device == "cuda" else 2,
        calls=96,
    )


def greedy_case(device: str, batch: int, drafts: int) -> Case:
    op = "verify_tree_greedy"
    function, bare = both(op, device)

    def make(seed: int) -> tuple[torch.Tensor, ...]:
        x = inputs(device, seed, batch, drafts, 16)
        wanted = torch.randint(0, 2, (batch, drafts), device=device, generator=generator(device, seed))
        return (*x.outputs, x.candidates % 2, x.rows, x.children, x.siblings, wanted)

    def verify(x: tuple[torch.Tensor, ...]) -> None:
        results = []
        for run in (_registry.ops[op].ref, function):
            for output in x[:3]:
                output.fill_(POISON)
            run(*x)
            results.append([output.clone() for output in x[:3]])
        for mine, wanted in zip(results[1], results[0], strict=True):
            same(op, mine, wanted)

    return Case(
        op,
        f"D {drafts}",
        batch,
        make,
        lambda x: function(*x),
        lambda x: bare(*x),
        verify,
        lambda x: batch * drafts * 8 * 5,
        "copy",
    )


def renorm_case(op: str, device: str, batch: int, vocab: int) -> Case:
    function, bare = both(op, device)
    by_mass = op == "top_p_renorm_prob"

    def make(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = generator(device, seed)
        probs = torch.softmax(3 * torch.randn(batch, vocab, device=device, generator=rng), -1)
        if by_mass:
            return probs, torch.rand(batch, device=device, generator=rng) * 0.4 + 0.5
        return probs, torch.randint(1, min(vocab, 100), (batch,), device=device, generator=rng)

    def verify(x: tuple[torch.Tensor, torch.Tensor]) -> None:
        got, want = function(*x), _registry.ops[op].ref(*x)
        torch.testing.assert_close(got.sum(1), torch.ones(batch, device=device), rtol=1e-4, atol=1e-4)
        differing = (got > 0) != (want > 0)
        if by_mass:  # float32 sums may keep or drop the tokens at the edge
            allowed = 1e-4
            assert (x[0] * differing).sum(1).max() < allowed, f"{op}: other tokens are kept than by ref"
        else:
            assert not differing.any(), f"{op}: other tokens are kept than by ref"
        torch.testing.assert_close(got * ~differing, want * ~differing, rtol=2e-4, atol=1e-9)

    def with_torch(x: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        probs, limits = x
        ordered, order = probs.sort(1, descending=True)
        if by_mass:
            kept = ordered * (ordered.cumsum(1) - ordered < limits[:, None])
        else:
            kept = ordered * (torch.arange(vocab, device=device) < limits[:, None])
        return torch.empty_like(probs).scatter_(1, order, kept / kept.sum(1, keepdim=True))

    return Case(
        op,
        f"V {vocab}",
        batch,
        make,
        lambda x: function(*x),
        lambda x: bare(*x),
        verify,
        lambda x: 2 * batch * vocab * 4,
        "copy",
        {"torch sort": with_torch},
        sets=4,
        calls=16,
    )


def sampling_cases(device: str, small: bool, rivals: dict[str, Any]) -> Iterator[Callable[[], Iterator[Case]]]:
    """Builders of cases, so that only one case's memory is held at a time."""
    vocab = 9001 if small else 129280
    for batch in (1, 3) if small else (1, 16, 64):
        for op in (CHAIN, TREE):
            yield lambda op=op, batch=batch: iter([sampling_case(op, device, batch, 4, vocab, rivals)])
    some = 2 if small else 64
    yield lambda: iter([greedy_case(device, some, 8)])
    for op in ("top_k_renorm_prob", "top_p_renorm_prob"):
        yield lambda op=op: iter([renorm_case(op, device, some, vocab)])
