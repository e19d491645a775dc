"""The device's side of a step with trees: draft, verify, accept, agree, move, compact, follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_npu import ops
from dsv4_npu.emulation.replica import Replica
from dsv4_npu.emulation.transfer import HostCopy
from dsv4_npu.emulation.trees.cache import PooledTarget, plan_rows
from dsv4_npu.emulation.trees.drafting import TreeDrafter
from dsv4_npu.emulation.trees.head import EagleHead
from dsv4_npu.emulation.trees.options import TreeOptions
from dsv4_npu.pools.full_kv import FullKVPool
from dsv4_npu.spec import VerifyResult
from dsv4_npu.spec.simulated import simulate_acceptance
from dsv4_npu.spec.trees import TreeLayout, TreeSpec, accept_tree_greedy, accept_tree_sampling, tree_layout


@dataclass(frozen=True)
class Launched:
    """What a step leaves to be learned.

    Attributes:
        copy: of a prefill: the token after each chunk ``[bs]``. Of a verify: starts ``[bs]``, accept_lens ``[bs]``,
            predict ``[bs · D]`` by row, accept_index ``[bs, W]``, and the target and source slots of the commit
            ``[bs, W]``.
        logits: for the comparison with the oracle alone: ``[bs, V]`` of a prefill, ``[bs, D, V]`` of a verify.
    """

    copy: HostCopy
    logits: torch.Tensor


class TreeRounds:
    """Enqueues prefills and verify rounds of one model over one pool.

    Attributes:
        lengths, roots: int64 ``[request rows + 1]``; committed length and root token of each request row.
        states: ``[request rows + 1, H]``; the draft head's state of each request row, folded up to the root.
        moved: rows of KV that commits moved so far.
    """

    def __init__(
        self,
        model: Any,
        pool: FullKVPool,
        block_table: torch.Tensor,
        spec: TreeSpec,
        head: EagleHead,
        drafter: TreeDrafter,
        options: TreeOptions,
        replica: Replica | None = None,
    ) -> None:
        self.pool, self.block_table, self.spec, self.head = pool, block_table, spec, head
        self.drafter, self.options, self.replica = drafter, options, replica
        self.pooled = PooledTarget(model, pool)
        rows = block_table.shape[0]
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        self.roots = torch.zeros(rows, dtype=torch.int64)
        self.states = head.start(rows)
        self.moved = torch.zeros((), dtype=torch.int64)
        self._coins = torch.Generator().manual_seed(options.seed)

    def prefill(self, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]) -> Launched:
        """One chunk per request from position ``start`` on.

        ``tokens``: those of the chunk and the one behind it, or a chunk that ends the known tokens and -1.
        """
        row, start = torch.tensor(rows), torch.tensor(starts)
        length = torch.tensor([len(chunk) - 1 for chunk in tokens])
        width = int(length.max())
        padded = torch.zeros((len(rows), width + 1), dtype=torch.int64)
        for b, chunk in enumerate(tokens):
            padded[b, : len(chunk)] = torch.tensor(chunk)
        used = torch.arange(width) < length[:, None]
        depth = torch.arange(width).expand(len(rows), width)
        causal = torch.ones((width, width), dtype=torch.bool).tril().expand(len(rows), width, width)
        plan = plan_rows(self.block_table, row, start, max(starts), self.pool.page, depth, causal, used)
        logits, hidden = self.pooled.forward(padded[:, :width].clamp_min(0), plan)
        at = torch.arange(len(rows))
        last = logits[at, length - 1]
        first = self._first_tokens(last, start + length)
        follow = padded[:, 1:]
        open_end = follow[at, length - 1] < 0
        follow[at, length - 1] = torch.where(open_end, first.clamp_min(0), follow[at, length - 1])
        before = torch.where((start > 0)[:, None], self.states[row], self.head.start(len(rows)))
        self.states[row] = self.head.fold_front(before, hidden, follow.clamp_min(0), length)
        self.lengths[row] = start + length
        self.roots[row] = first.clamp_min(0)
        return Launched(HostCopy([first]), last)

    def verify(self, rows: Sequence[int], histories: Sequence[Sequence[int]], longest: int) -> Launched:
        """One round of the batch; ``longest`` is at least each committed length."""
        row = torch.tensor(rows, dtype=torch.int64)
        start, root = self.lengths[row], self.roots[row]
        drafts = self.drafter.propose(self.states[row], root, histories)
        candidates, layout = drafts.tokens, tree_layout(drafts.parents)
        used = torch.ones_like(candidates, dtype=torch.bool)
        plan = plan_rows(self.block_table, row, start, longest, self.pool.page, layout.depth, layout.mask, used)
        logits, hidden = self.pooled.forward(candidates.clamp_min(0), plan)
        result = self._agreed(self._accept(candidates, layout, self._seen(logits)), start, candidates)

        bonus = torch.empty_like(root)
        ops.fill_bonus_tokens_(bonus, result.predict, result.accept_index, result.accept_lens)
        target, source = ops.gather_accepted_slots(plan.slots.flatten(), result.accept_index, result.accept_lens)
        outcome = HostCopy((start, result.accept_lens, result.predict, result.accept_index, target, source))
        predict, front = result.predict.contiguous(), hidden.flatten(0, 1)
        if self.spec.branches:
            self._move(target, source)
            ops.compact_accept_(predict, front, result.accept_index, result.accept_lens)
        self._follow(row, predict, front, result.accept_lens)
        self.lengths[row] = start + result.accept_lens
        # A row without a positive probability has bonus -1: the host raises when it learns of it.
        self.roots[row] = bonus.clamp_min(0)
        return Launched(outcome, logits)

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Move the accepted rows that are not in place."""
        still = target == source
        self.moved += (~still).sum()
        self.pool.move_kv(target.masked_fill(still, -1), source.masked_fill(still, -1))

    def _follow(self, row: torch.Tensor, predict: torch.Tensor, hidden: torch.Tensor, lens: torch.Tensor) -> None:
        """Fold what was accepted into the head's states, from the front of each request's block."""
        width = self.spec.width
        most = min(self.spec.depth, width)
        tokens = predict.view(-1, width)[:, :most].clamp_min(0).to(torch.int64)
        rows = hidden.view(-1, width, hidden.shape[-1])[:, :most]
        self.states[row] = self.head.fold_front(self.states[row], rows, tokens, lens)

    def _seen(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.replica is None else self.replica.disturb(logits)

    def _agreed(self, result: VerifyResult, seq_lens: torch.Tensor, candidates: torch.Tensor) -> VerifyResult:
        return result if self.replica is None else self.replica.agree(result, seq_lens, candidates)

    def _first_tokens(self, logits: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """The token after each chunk: a tree that is only a root."""
        root = torch.zeros((len(logits), 1), dtype=torch.int64)
        layout = tree_layout(torch.full_like(root, -1))
        seen = self._seen(logits)[:, None]
        result = self._draw(root, layout, seen, 1) if self.options.sampled else self._choose(root, layout, seen, 1)
        tokens = result.predict.to(torch.int64)
        return tokens if self.replica is None else self.replica.agree_first(tokens, seq_lens)

    def _accept(self, candidates: torch.Tensor, layout: TreeLayout, logits: torch.Tensor) -> VerifyResult:
        options, depth = self.options, self.spec.depth
        if options.accept == "simulated":
            lengths = torch.randint(1, depth + 1, (len(candidates),), generator=self._coins)
            if options.simulated_length is not None:
                lengths.fill_(options.simulated_length)
            return simulate_acceptance(
                candidates,
                layout,
                lengths,
                depth,
                tokens=options.simulated_tokens,
                topk=self.spec.topk,
                fixed_token=options.simulated_token,
                target_predict=logits.argmax(-1),
            )
        if options.accept == "target-only":
            return self._draw(candidates, layout, logits, depth)
        return self._choose(candidates, layout, logits, depth)

    def _choose(self, candidates: torch.Tensor, layout: TreeLayout, logits: torch.Tensor, depth: int) -> VerifyResult:
        return accept_tree_greedy(candidates, layout, logits.argmax(-1), depth)

    def _draw(self, candidates: torch.Tensor, layout: TreeLayout, logits: torch.Tensor, depth: int) -> VerifyResult:
        batch, width, vocab = logits.shape
        if self.options.temperature:
            probs = (logits / self.options.temperature).softmax(-1).float()
        else:
            probs = torch.nn.functional.one_hot(logits.argmax(-1), vocab).float()
        coins = torch.rand((batch, width + 1), generator=self._coins)
        return accept_tree_sampling(
            candidates, layout, probs, coins[:, :width].contiguous(), coins[:, width].contiguous(), depth
        )
