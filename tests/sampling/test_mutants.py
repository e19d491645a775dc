"""Switches single rules off in the oracle and shows that the judge, and so every test that uses it, notices."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from brute_force import JUDGES, WrongError
from verify_world import Batch, random_batch, run_function

CHAIN = "chain_speculative_sampling"
TREE = "tree_speculative_sampling_target_only"
GREEDY = "verify_tree_greedy"

MISSING = "vocab:\n                break"
RESET = "rejected = set()\n                reached = torch.zeros((), dtype=torch.float32)"
MUTANTS = [
    (GREEDY, "siblings are not followed", "node = next_sibling[node]", "node = -1"),
    (GREEDY, "the walk restarts at the root", "node = first_child[node]", "node = first_child[0]"),
    (GREEDY, "the target of the node before", "wanted = int(targets[path[-1]])", "wanted = int(targets[path[0]])"),
    (GREEDY, "the bonus is missing", "predicts[path[-1]] = targets[path[-1]]", "pass"),
    (GREEDY, "accept_index is as wide as D", "len(path) == width", "len(path) == drafts"),
    (GREEDY, "the rest is left", " + [-1] * (width - len(path))", " + accept_index[b].tolist()[len(path):]"),
    (GREEDY, "lengths for numbers of drafts", "= len(path) - 1", "= len(path)"),
    (CHAIN, "not strict", "* q < p", "* q <= p"),
    (CHAIN, "drafts of probability 0 pass", "q > 0 and ", ""),
    (CHAIN, "the row of the draft itself", "target_probs[b, step - 1, draft]", "target_probs[b, step, draft]"),
    (CHAIN, "the coin after", "uniform_samples[b, step - 1]", "uniform_samples[b, step]"),
    (CHAIN, "the residual is not taken", "if rejected:", "if False:"),
    (CHAIN, "the residual is always taken", "if rejected:", "if judge < draft_probs.shape[1]:"),
    (CHAIN, "a missing draft counts as rejected", MISSING, MISSING.replace("break", "rejected = True; break")),
    (CHAIN, "no fallback to the target", "draw_residual(residual, target, coin)", "draw(residual, coin)"),
    (CHAIN, "accept_index is as wide as D", "min(drafts, width)", "drafts"),
    (CHAIN, "the final coin of another request", "final_sampling[b]", "final_sampling[b - 1]"),
    (TREE, "siblings are not followed", "node = next_sibling[node]", "node = -1"),
    (TREE, "each sibling on its own", "reached = reached + p", "reached = p"),
    (TREE, "not strict", "scale < reached", "scale <= reached"),
    (TREE, "the coin of the child", "uniform_samples[b, parent]", "uniform_samples[b, node]"),
    (TREE, "one coin for the whole tree", "uniform_samples[b, parent]", "uniform_samples[b, 0]"),
    (TREE, "the row of the child", "target_probs[b, parent, token]", "target_probs[b, node, token]"),
    (TREE, "the residual keeps the rejected", "residual[sorted(rejected)] = 0", "pass"),
    (TREE, "rejected siblings outlive their level", RESET, RESET.replace("rejected = set()", "pass")),
    (TREE, "duplicates count twice", "and token not in rejected", ""),
    (TREE, "accumulation never restarts", RESET, RESET.split("reached")[0]),
    (TREE, "threshold_single is ignored", " or bool(p >= single)", ""),
    (TREE, "threshold_single takes p = 0", "if p > 0:", "if True:"),
    (TREE, "threshold_acc is ignored", "* scale < reached", "< reached"),
    (TREE, "accept_index is as wide as D", "len(path) == width", "len(path) == drafts"),
]  # fmt: skip


def corpus(op: str) -> Iterator[Batch]:
    for seed in range(60):
        drafts = seed % 6 + 1
        batch = random_batch(seed, 3, drafts, max(1, drafts - seed % 2), [2, 3, 5][seed % 3], exact=seed % 2 == 0)
        yield batch
        if op == TREE:
            yield replace(batch, coins=torch.ones_like(batch.coins), threshold_single=1.0, threshold_acc=1.0)
            yield replace(batch, coins=torch.ones_like(batch.coins), threshold_single=0.0)
        yield replace(batch, coins=torch.ones_like(batch.coins), draft=batch.target)
        yield replace(batch, last_coins=torch.ones_like(batch.last_coins))


def mutate(op: str, old: str, new: str) -> Callable[..., None]:
    module = importlib.import_module(f"dsv4_npu.ops.{op}.ref")
    source = inspect.getsource(module)
    assert source.count(old) >= 1, f"{old!r} is no longer in {op}/ref.py"
    space: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(source.replace(old, new), f"<{op} mutant>", "exec"), space)
    function: Callable[..., None] = space[op]
    return function


def survives(op: str, function: Callable[..., None]) -> bool:
    for batch in corpus(op):
        try:
            JUDGES[op](batch, run_function(function, op, batch))
        except (WrongError, IndexError, RuntimeError):
            return False
    return True


@pytest.mark.parametrize("op", list(JUDGES))
def test_the_unchanged_oracle_passes(op: str) -> None:
    assert survives(op, mutate(op, "import torch", "import torch"))


@pytest.mark.parametrize(("op", "rule", "old", "new"), MUTANTS, ids=[f"{m[0]}: {m[1]}" for m in MUTANTS])
def test_every_rule_is_seen(op: str, rule: str, old: str, new: str) -> None:
    assert not survives(op, mutate(op, old, new)), rule
