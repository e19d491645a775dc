"""Sampled trees: the outputs are distributed as the target, whatever the head proposes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_npu.emulation.numerics import KeepFloat64
from dsv4_npu.emulation.trees import rounds as rounds_module
from dsv4_npu.spec.trees import TreeSpec
from tests.trees.harness import Bench, check_empty

VOCAB, NEW = 6, 3
PROMPT = [4, 0, 5, 3]
REQUESTS, WAVES = 400, 5


@pytest.fixture(scope="module")
def small() -> Bench:
    pytest.importorskip("transformers", reason="the emulation needs transformers")
    return Bench(vocab_size=VOCAB)


def exact(bench: Bench) -> torch.Tensor:
    """The target's probability of every sequence of ``NEW`` tokens, flat."""
    heads = torch.cartesian_prod(*[torch.arange(VOCAB)] * (NEW - 1))
    tokens = torch.cat((torch.tensor(PROMPT).expand(len(heads), -1), heads), dim=1)
    with torch.no_grad(), KeepFloat64():
        probs = bench.model(input_ids=tokens).logits[:, len(PROMPT) - 1 :].softmax(-1)
    joint = probs[:, -1]
    for k in range(NEW - 1):
        joint = joint * probs[:, k].gather(1, heads[:, k : k + 1])
    return joint.flatten()


def counts(bench: Bench, spec: TreeSpec, waves: int = WAVES) -> tuple[torch.Tensor, set[int]]:
    """How often each sequence came out, and the accept lengths that were seen."""
    seen = torch.zeros(VOCAB**NEW)
    lengths: set[int] = set()
    for wave in range(waves):
        options = {"accept": "target-only", "temperature": 1.0, "seed": wave, "batch": REQUESTS}
        engine = bench.engine(spec, poison=False, context_len=12, page=4, options=options)
        for _ in range(REQUESTS):
            engine.submit(PROMPT, NEW)
        for run in engine.run():
            seen[sum(token * VOCAB ** (NEW - 1 - k) for k, token in enumerate(run.outputs))] += 1
            lengths |= set(run.accepts)
        check_empty(engine)
    return seen, lengths


def p_value(seen: torch.Tensor, probs: torch.Tensor) -> float:
    """Chi-square of the counts; sequences with few expected ones count together."""
    want = probs * seen.sum()
    rare = want < 8
    seen, want = (torch.cat((x[~rare], x[rare].sum()[None])).double() for x in (seen, want))
    statistic = ((seen - want) ** 2 / want.clamp_min(1e-9)).sum()
    return float(torch.special.gammaincc(torch.tensor((len(want) - 1) / 2).double(), statistic / 2))


@pytest.mark.parametrize(("topk", "steps", "width"), [(3, 2, 9), (1, 3, 4)])
def test_outputs_are_distributed_as_the_target(small: Bench, topk: int, steps: int, width: int) -> None:
    seen, lengths = counts(small, TreeSpec(topk, steps, width))
    assert len(lengths) >= 3
    assert p_value(seen, exact(small)) > 1e-3


def test_thresholds_below_one_are_found_out(small: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = rounds_module.accept_tree_sampling

    def lossy(*args: Any) -> Any:
        return real(*args, threshold_acc=0.5)

    monkeypatch.setattr(rounds_module, "accept_tree_sampling", lossy)
    seen, _ = counts(small, TreeSpec(3, 2, 9), waves=2)
    assert p_value(seen, exact(small)) < 1e-6


def test_one_coin_for_two_draws_is_found_out(small: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The final coin taken from the root's: the two draws of a round are then no longer independent."""
    real = rounds_module.accept_tree_sampling

    def shared(candidates: Any, layout: Any, probs: Any, coins: Any, final: Any, depth: int) -> Any:
        return real(candidates, layout, probs, coins, coins[:, 0].contiguous(), depth)

    monkeypatch.setattr(rounds_module, "accept_tree_sampling", shared)
    seen, _ = counts(small, TreeSpec(3, 2, 9), waves=2)
    assert p_value(seen, exact(small)) < 1e-6
