"""The device's side of a step: everything is enqueued, and the host waits for nothing here.

Lengths and roots of the requests live on the device, by request row. So a round can be launched before the host knows
how the one before it went: its starts are the lengths that the round before leaves, its roots are that round's bonus
tokens. What the host must learn leaves in one asynchronous copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from dsv4_npu import addressing, ops
from dsv4_npu.emulation.cache import PooledModel
from dsv4_npu.emulation.device import held
from dsv4_npu.emulation.drafters import Drafter, Drafts
from dsv4_npu.emulation.forward import (
    BatchPlan,
    Bounds,
    Tables,
    check_resident,
    plan_batch,
    plan_batch_on_device,
)
from dsv4_npu.emulation.replica import Replica
from dsv4_npu.emulation.requests import EngineOptions
from dsv4_npu.emulation.stages import StageRounds
from dsv4_npu.emulation.states import StateKeeper
from dsv4_npu.emulation.transfer import HostCopy
from dsv4_npu.pools import DSV4Pools
from dsv4_npu.spec import VerifyResult, accept_greedy, accept_rejection


@dataclass(frozen=True)
class Batch:
    """Requests of one forward.

    Attributes:
        rows, starts: int64 ``[bs]`` on the device; lengths: the same, or one number for all.
        host_rows: the request rows as the host knows them.
        bounds: what the host knows of starts and lengths.
        exact: ``bounds`` are the starts and the tables are on the CPU, so that the host can plan.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor | int
    host_rows: list[int]
    bounds: Bounds
    exact: bool


@dataclass(frozen=True)
class Launched:
    """What a step leaves to be learned.

    Attributes:
        copy: on its way to the host. Of a prefill: the token after each chunk ``[bs]``. Of a verify: starts ``[bs]``,
            accept_lens ``[bs]``, predict ``[bs · D]``, accept_index ``[bs, S]``, and the target and source slots of
            the commit ``[bs, S]``.
        logits: held memory, for the comparison with the oracle alone: ``[bs, V]`` of a prefill, ``[bs, D, V]`` of a
            verify.
    """

    copy: HostCopy
    logits: torch.Tensor


class DeviceRounds:
    """Enqueues prefills and verify rounds.

    Attributes:
        lengths, roots: int64 ``[request rows + 1]``; committed length and root token of each request row as the
            device knows them.
        stages: the draft stages, where they have memory of their own.
        replica: this rank's end of a tensor-parallel group, where there is one.
    """

    def __init__(self, pools: DSV4Pools, tables: Tables, pooled: PooledModel, states: StateKeeper, seed: int) -> None:
        self.pools, self.tables, self.pooled, self.states = pools, tables, pooled, states
        self.device = tables.block_table.device
        self.width = pools.config.verify_width
        self.lengths = torch.zeros(tables.block_table.shape[0], dtype=torch.int64, device=self.device)
        self.roots = torch.zeros_like(self.lengths)
        self.stages: StageRounds | None = None
        self.replica: Replica | None = None
        self._coins = torch.Generator().manual_seed(seed)
        self._rows: tuple[list[int], torch.Tensor] = ([], self.lengths[:0])

    def prefill(
        self,
        rows: list[int],
        starts: Sequence[int],
        chunks: Sequence[npt.NDArray[np.int32]],
        following: Sequence[int],
        options: EngineOptions,
    ) -> Launched:
        """One chunk of tokens per request from position ``start`` on.

        ``following``: the known token behind each chunk, -1 where this forward makes it.
        """
        lengths = [len(chunk) for chunk in chunks]
        packed = np.zeros((4 + max(lengths), len(rows)), np.int64)
        packed[0], packed[1], packed[2], packed[3] = rows, starts, lengths, following
        for b, chunk in enumerate(chunks):
            packed[4 : 4 + len(chunk), b] = chunk
        sent = self._send(packed)
        row, start, length = sent[0], sent[1], sent[2]
        bounds = Bounds(starts, starts, lengths)
        plan = self._plan(Batch(row, start, length, rows, bounds, exact=self.device.type == "cpu"))
        prompt = sent[4:].t()
        logits = self.pooled.forward(prompt, plan)
        last = logits[torch.arange(len(rows), device=self.device), length - 1]
        if self.replica is None:
            tokens = self._first_tokens(last, options)
        else:
            tokens = self.replica.agree_first(self._first_tokens(self.replica.disturb(last), options), start + length)
        self.lengths.index_put_((row,), start + length)
        self.roots.index_put_((row,), tokens.clamp_min(0))
        if self.stages is not None:
            assert self.pooled.hidden is not None
            behind = torch.where(sent[3] < 0, tokens.clamp_min(0), sent[3])
            self.stages.prefilled(row, length, prompt, behind, self.pooled.hidden, plan)
        return Launched(HostCopy([tokens]), held(last))

    def verify(
        self,
        rows: list[int],
        bounds: Bounds,
        options: EngineOptions,
        drafter: Drafter | None,
        histories: Sequence[Sequence[int]],
        *,
        exact: bool,
    ) -> Launched:
        """One round: draft, verify, accept, clear what was rejected, move lengths and roots on."""
        width = self.width
        row = self._row_tensor(rows)
        start, root = self.lengths[row], self.roots[row]
        batch = Batch(row, start, width, rows, bounds, exact)
        drafts = self._draft(batch, root, options, drafter, histories)
        candidates = torch.cat((root[:, None], drafts.tokens.to(self.device)), dim=1)
        logits = self.pooled.forward(candidates, self._plan(batch))
        if self.replica is None:
            result = self._accept(candidates, logits, drafts, options)
        else:
            result = self._accept(candidates, self.replica.disturb(logits), drafts, options)
            result = self.replica.agree(result, start, candidates)
        if options.clear and width > 1:
            self.states.clear_rejected(row, start, result.accept_lens, width)
        bonus = torch.empty_like(root)
        ops.fill_bonus_tokens_(bonus, result.predict, result.accept_index, result.accept_lens)
        self.lengths.index_put_((row,), start + result.accept_lens)
        if self.stages is not None:
            assert self.pooled.hidden is not None
            accepted, predict = result.accept_lens, result.predict
            self.stages.committed(row, start, accepted, candidates, predict, self.pooled.hidden, bounds)
        # A row without a positive probability has bonus -1: the host raises when it learns of it.
        self.roots.index_put_((row,), bonus.clamp_min(0))
        window = start[:, None] + torch.arange(width, device=self.device)
        slots = addressing.full_slots(self.tables.block_table, row[:, None], window, self.pools.config.page)
        target, source = ops.gather_accepted_slots(slots.flatten(), result.accept_index, result.accept_lens)
        outcome = (start, result.accept_lens, result.predict, result.accept_index, target, source)
        return Launched(HostCopy(outcome), held(logits))

    def _send(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _row_tensor(self, rows: list[int]) -> torch.Tensor:
        """Rows on the device; sent only when the batch is another one."""
        if self._rows[0] != rows:
            self._rows = (rows, self._send(np.array(rows, np.int64)))
        return self._rows[1]

    def _plan(self, batch: Batch) -> BatchPlan:
        if batch.exact:
            return plan_batch(self.pools, self.tables, batch.host_rows, batch.bounds.lows, batch.bounds.lengths)
        lengths = batch.lengths
        plan = plan_batch_on_device(self.pools, self.tables, batch.rows, batch.starts, lengths, batch.bounds)
        if self.device.type == "cpu":
            check_resident(plan, batch.starts + lengths)
        return plan

    def _draft(
        self,
        batch: Batch,
        roots: torch.Tensor,
        options: EngineOptions,
        drafter: Drafter | None,
        histories: Sequence[Sequence[int]],
    ) -> Drafts:
        if self.stages is not None and self.width > 1:
            return self.stages.propose(batch.rows, batch.starts, roots, batch.bounds, self.width - 1)
        if self.width == 1 or drafter is None:
            return Drafts(roots.new_empty((len(roots), 0)))
        layers = options.early_exit_layers or max(self.pools.config.model.num_layers - 1, 1)

        def step(tokens: torch.Tensor, offset: int) -> torch.Tensor:
            plan = self._plan(replace(batch, starts=batch.starts + offset, lengths=1, bounds=batch.bounds.row(offset)))
            return self.pooled.forward(tokens[:, None], plan, layers)[:, 0]

        return drafter.propose(roots, histories, self.width - 1, step)

    def _flip(self, batch: int, count: int) -> torch.Tensor:
        """Coins in [0, 1): float32 ``[count, batch]``, drawn on the host and sent in one copy."""
        return torch.rand((count, batch), generator=self._coins).to(self.device, non_blocking=True)

    def _first_tokens(self, logits: torch.Tensor, options: EngineOptions) -> torch.Tensor:
        if options.accept == "greedy" or options.temperature == 0:
            return logits.argmax(-1)
        # A chain without drafts: a draw from the target alone.
        target = (logits / options.temperature).softmax(-1).float()[:, None]
        coins = self._flip(len(logits), 2)
        root = torch.zeros((len(logits), 1), dtype=torch.int64, device=self.device)
        result = accept_rejection(root, target, torch.zeros_like(target), coins[0][:, None], coins[1])
        return result.predict.to(torch.int64)

    def _accept(
        self, candidates: torch.Tensor, logits: torch.Tensor, drafts: Drafts, options: EngineOptions
    ) -> VerifyResult:
        if options.accept == "greedy":
            return accept_greedy(candidates, logits.argmax(-1))
        batch, width, vocab = logits.shape
        if options.temperature == 0:
            target = _one_hot(logits.argmax(-1), vocab)
        else:
            target = (logits / options.temperature).softmax(-1).float()
        draft = torch.zeros_like(target)
        drawn = _one_hot(candidates[:, 1:], vocab) if drafts.probs is None else drafts.probs.to(self.device)
        draft[:, : width - 1] = drawn
        coins = self._flip(batch, width + 1)
        return accept_rejection(candidates, target, draft, coins[:width].t().contiguous(), coins[width])


def _one_hot(tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    """float32 ``[..., vocab]`` with a 1 at each token, without a look at the values."""
    zeros = torch.zeros((*tokens.shape, vocab), dtype=torch.float32, device=tokens.device)
    return zeros.scatter_(-1, tokens[..., None], 1.0)
