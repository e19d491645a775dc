"""Judges a finished verify from its inputs, in float64 and from the rules alone.

Nothing is walked forward here: the outputs are taken as a claim (this path, these tokens) and every decision that the
claim implies is examined. A decision within rounding of its border may go either way; the final token may be the
neighbouring one, and only that, where the coin lies within rounding of a step.
"""

from __future__ import annotations

import bisect
import itertools
import math

from verify_world import POISON, Batch, Result

ROUNDING = 2e-6


class WrongError(AssertionError):
    """The outputs break a rule."""


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise WrongError(message)


def claimed_path(batch: Batch, result: Result, b: int) -> list[int]:
    """The nodes of the claimed path, root first, after checks of the three buffers' layout."""
    _, drafts, _ = batch.shape
    length = result.accept_token_num[b] + 1
    index = result.accept_index[b]
    expect(1 <= length <= batch.width, f"request {b}: {length} accepted rows in a buffer of {batch.width}")
    expect(
        index[length:] == [-1] * (batch.width - length), f"request {b}: the rest of accept_index is {index[length:]}"
    )
    rows = batch.rows[b].tolist()
    expect(all(row in rows for row in index[:length]), f"request {b}: {index[:length]} holds rows of others")
    path = [rows.index(row) for row in index[:length]]
    expect(path[0] == 0, f"request {b}: the path starts at node {path[0]}")
    tokens = batch.candidates[b].tolist()
    for here, after in itertools.pairwise(path):
        expect(result.predicts[rows[here]] == tokens[after], f"request {b}: predict does not hold the accepted token")
    for node in range(drafts):
        if node not in path:
            expect(result.predicts[rows[node]] == POISON, f"request {b}: predict was written off the path")
    return path


def siblings_of(batch: Batch, b: int, parent: int) -> list[int]:
    """The children of a node in sibling order."""
    found: list[int] = []
    node = int(batch.children[b, parent])
    while node != -1:
        found.append(node)
        node = int(batch.siblings[b, node])
    return found


def masses(row: list[float]) -> list[float]:
    return [x if x > 0 else 0.0 for x in row]


def allowed_tokens(weights: list[float], coin: float) -> set[int]:
    """The tokens that a draw may give: the right one, and a neighbour across a step that the coin all but touches."""
    support = [token for token, weight in enumerate(weights) if weight > 0]
    if not support:
        return {-1}
    steps = list(itertools.accumulate(weights[token] for token in support))
    total = math.fsum(weights)
    at = min(bisect.bisect_right(steps, coin * total), len(support) - 1)
    allowed = {support[at]}
    if at > 0 and coin * total - steps[at - 1] <= ROUNDING * total:
        allowed.add(support[at - 1])
    if at + 1 < len(support) and steps[at] - coin * total <= ROUNDING * total:
        allowed.add(support[at + 1])
    return allowed


def judge_draw(b: int, token: int, residual: list[float], target: list[float], coin: float) -> None:
    weights = residual if any(residual) else target
    allowed = allowed_tokens(weights, coin)
    expect(token in allowed, f"request {b}: drew {token}; allowed {sorted(allowed)}")


def judge_greedy(batch: Batch, result: Result) -> None:
    for b in range(batch.shape[0]):
        path = claimed_path(batch, result, b)
        wanted = [int(batch.target_predict.flatten()[batch.rows[b, node]]) for node in path]
        for here, after in itertools.pairwise(range(len(path))):
            matching = [n for n in siblings_of(batch, b, path[here]) if int(batch.candidates[b, n]) == wanted[here]]
            expect(matching[:1] == [path[after]], f"request {b}: accepted {path[after]}, first match {matching[:1]}")
        if len(path) < batch.width:
            left = [n for n in siblings_of(batch, b, path[-1]) if int(batch.candidates[b, n]) == wanted[-1]]
            expect(not left, f"request {b}: stopped before {left}")
        bonus = result.predicts[int(batch.rows[b, path[-1]])]
        expect(bonus == wanted[-1], f"request {b}: bonus {bonus}, target {wanted[-1]}")


def judge_chain(batch: Batch, result: Result) -> None:
    bs, drafts, vocab = batch.shape
    for b in range(bs):
        path = claimed_path(batch, result, b)
        expect(path == list(range(len(path))), f"request {b}: a chain's path is {path}")
        verdicts = []
        for step in range(1, min(len(path) + 1, drafts, batch.width)):
            token = int(batch.candidates[b, step])
            if not 0 <= token < vocab:
                verdicts.append("none")
                continue
            p, q = float(batch.target[b, step - 1, token]), float(batch.draft[b, step - 1, token])
            margin = p - float(batch.coins[b, step - 1]) * q
            near = margin != 0 and abs(margin) <= 1e-7 * max(p, q)
            verdicts.append("near" if near and q > 0 else "yes" if q > 0 and margin > 0 else "no")
        accepted = verdicts[: len(path) - 1]
        expect(set(accepted) <= {"yes", "near"}, f"request {b}: accepted {accepted}")
        target = masses(batch.target[b, path[-1]].tolist())
        residual = target
        if len(verdicts) == len(path):
            expect(verdicts[-1] != "yes", f"request {b}: stopped before an acceptable draft")
            if verdicts[-1] != "none":
                draft = masses(batch.draft[b, path[-1]].tolist())
                residual = [max(p - q, 0.0) for p, q in zip(target, draft, strict=True)]
        token = result.predicts[int(batch.rows[b, path[-1]])]
        judge_draw(b, token, residual, target, float(batch.last_coins[b]))


def judge_tree(batch: Batch, result: Result) -> None:
    bs, _, vocab = batch.shape
    scale = max(batch.threshold_acc, 1e-9)
    for b in range(bs):
        path = claimed_path(batch, result, b)
        for here, after in itertools.zip_longest(path, path[1:]):
            if after is None and len(path) == batch.width:
                continue
            target = masses(batch.target[b, here].tolist())
            children = siblings_of(batch, b, here)
            expect(after is None or after in children, f"request {b}: {after} is no child of {here}")
            tokens = [int(batch.candidates[b, node]) for node in children]
            for at, node in enumerate(children):
                known = 0 <= tokens[at] < vocab
                fresh = known and tokens[at] not in tokens[:at]
                p = target[tokens[at]] if fresh else 0.0
                before = {t for t in tokens[: at + 1] if 0 <= t < vocab}
                margin = math.fsum(target[t] for t in before) / scale - float(batch.coins[b, here])
                near = margin != 0 and abs(margin) <= 1e-6 / scale
                if p > 0 and near and p < batch.threshold_single:
                    if node == after:
                        break
                    continue
                take = p > 0 and (margin > 0 or p >= batch.threshold_single)
                expect(take == (node == after), f"request {b}: node {node} under {here} accepted: {node == after}")
                if take:
                    break
        target = masses(batch.target[b, path[-1]].tolist())
        residual = list(target)
        if len(path) < batch.width:
            for node in siblings_of(batch, b, path[-1]):
                if 0 <= int(batch.candidates[b, node]) < vocab:
                    residual[int(batch.candidates[b, node])] = 0.0
        token = result.predicts[int(batch.rows[b, path[-1]])]
        judge_draw(b, token, residual, target, float(batch.last_coins[b]))


JUDGES = {
    "verify_tree_greedy": judge_greedy,
    "chain_speculative_sampling": judge_chain,
    "tree_speculative_sampling_target_only": judge_tree,
}
