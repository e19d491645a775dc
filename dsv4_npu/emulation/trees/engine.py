"""The engine loop for trees: admit, prefill in chunks, then rounds; ownership and lengths are the life cycle's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dsv4_npu import addressing
from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.request import State, Step
from dsv4_npu.alloc.rollback import RingRule, RollbackRules
from dsv4_npu.emulation.replica import Replica
from dsv4_npu.emulation.requests import RequestRun, RoundRecord
from dsv4_npu.emulation.trees.drafting import EagleTrees, TreeDrafter
from dsv4_npu.emulation.trees.head import EagleHead
from dsv4_npu.emulation.trees.model import pool_for
from dsv4_npu.emulation.trees.options import TreeOptions
from dsv4_npu.emulation.trees.rounds import Launched, TreeRounds
from dsv4_npu.errors import AuditError, CapacityError, ConfigError, InputError
from dsv4_npu.spec import VerifyResult, accepted_rows, accepted_tokens, plan_commit, sizing
from dsv4_npu.spec.trees import TreeSpec

DEFAULT_OPTIONS = TreeOptions()


def plain_rules(page: int) -> RollbackRules:
    """Rollback rules of a pool without compressor: no ring is ever asked for."""
    c4, c128 = RingRule(addressing.C4_RATIO, 8, "request"), RingRule(addressing.C128_RATIO, 128, "request")
    return RollbackRules(page, c4, c128, compressed=False)


class TreeEngine:
    """Runs requests of one model with plain attention over one full-KV pool.

    Args:
        model: a Hugging Face model (:func:`~dsv4_npu.emulation.trees.model.build_target`).
        spec: the shape of a round.
        context_len: the longest history of a request.
        page: tokens per page.
        pages: usable pages; None: every request row filled to its width.
        drafter: None takes the EAGLE-like head.
        options: how the loop runs.
        replica: this rank's end of a tensor-parallel group; None without one.
        on_round: called after every verify was learned.

    Attributes:
        alloc, life, pool, device: ownership, life cycle, memory, and the device's side.
        running, waiting, finished: requests by where they are.
        history: every verify round in order; rounds: how many.

    Raises:
        ConfigError: options that do not go together, or more branches than tokens.
    """

    def __init__(
        self,
        model: Any,
        spec: TreeSpec,
        *,
        context_len: int,
        page: int = 16,
        pages: int | None = None,
        drafter: TreeDrafter | None = None,
        options: TreeOptions = DEFAULT_OPTIONS,
        replica: Replica | None = None,
        on_round: Callable[[TreeEngine], None] | None = None,
    ) -> None:
        config = model.config
        options.check(spec.topk)
        if spec.topk > config.vocab_size:
            raise ConfigError(f"topk = {spec.topk}; the model has {config.vocab_size} tokens")
        self.spec, self.options, self.on_round, self.context_len = spec, options, on_round, context_len
        self.vocab = config.vocab_size
        reserve = spec.reserve(page)
        width = sizing.row_width(context_len, reserve, page)
        pages = options.batch * addressing.pages_for(width, page) if pages is None else pages
        self.alloc = KVAllocator(
            AllocSpec.plain(
                page_size=page,
                full_pages=pages,
                request_rows=options.batch,
                row_width=width,
                verify_width=spec.width,
            )
        )
        self.life = Lifecycle(self.alloc, rules=plain_rules(page), reserve=reserve)
        self.pool = pool_for(config, pages, page)
        head = EagleHead(model, options.head_seed)
        self.device = TreeRounds(
            model,
            self.pool,
            self.alloc.mirrors.block_table,
            spec,
            head,
            drafter or EagleTrees(head, spec),
            options,
            replica,
        )
        self.running: list[RequestRun] = []
        self.waiting: deque[RequestRun] = deque()
        self.finished: list[RequestRun] = []
        self.history: list[RoundRecord] = []
        self._submitted = 0
        self._crowded = False

    @property
    def rounds(self) -> int:
        """Verify rounds so far."""
        return len(self.history)

    def submit(self, prompt: Sequence[int], max_new: int) -> RequestRun:
        """Queue a request; refuses (before anything changes) what can never fit."""
        if not prompt or not all(0 <= token < self.vocab for token in prompt):
            raise InputError(f"prompt: tokens of 0 to {self.vocab - 1}, at least one, are needed")
        if len(prompt) + max_new > self.context_len:
            raise InputError(f"prompt of {len(prompt)} and max_new = {max_new} exceed context_len = {self.context_len}")
        self.life.check(len(prompt), max_new)
        run = RequestRun(self._submitted, list(prompt), max_new)
        self._submitted += 1
        self.waiting.append(run)
        return run

    def run(self) -> list[RequestRun]:
        """Run until every request is done; they come back in the order they were submitted."""
        while self.step():
            pass
        return sorted(self.finished, key=lambda run: run.rid)

    def step(self) -> bool:
        """Admit, then one prefill forward if any prompt is unfinished, else one verify round. False when idle."""
        self._admit()
        if not self.running:
            return False
        fresh = [run for run in self.running if run.request.state is State.PREFILL]
        if fresh:
            self._prefill(fresh)
        else:
            self._verify_round()
        return True

    def retract(self, run: RequestRun) -> None:
        """Take a running request's memory away; it waits, and computes its history again."""
        self.life.retract(run.request)
        self.running.remove(run)
        self.waiting.appendleft(run)

    def abort(self, run: RequestRun) -> None:
        """End a request wherever it is."""
        if run.life is not None:
            self.life.abort(run.life)
        for place in (self.running, self.waiting):
            if run in place:
                place.remove(run)
        run.finish = "abort"
        self.finished.append(run)

    # -- inside --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        # After a retraction nobody enters until somebody leaves: the newcomer would be the next to be retracted.
        if self._crowded and self.running:
            return
        self._crowded = False
        while self.waiting and len(self.running) < self.options.batch:
            run = self.waiting[0]
            if run.life is None:
                run.life = self.life.admit(run.rid, run.prompt, run.max_new, self.options.stop)
            else:
                self.life.readmit(run.life)
            self.running.append(self.waiting.popleft())

    def _with_room(self, runs: list[RequestRun], plan: Callable[[list[RequestRun]], Step]) -> Step | None:
        """Plan a step; while the pages do not suffice, the youngest request gives its own back."""
        while runs:
            try:
                return plan(runs)
            except CapacityError:
                if len(self.running) == 1:
                    raise
                victim = max(self.running, key=lambda run: run.rid)
                self.retract(victim)
                self._crowded = True
                if victim in runs:
                    runs.remove(victim)
        return None

    def _launch(self, step: Step, work: Callable[[], Launched]) -> list[torch.Tensor]:
        self.alloc.flush()
        self.life.launch(step)
        launched = work()
        learned = launched.copy.wait()
        self.life.done(step)
        return [*learned, launched.logits]

    def _prefill(self, runs: list[RequestRun]) -> None:
        def extend(chosen: list[RequestRun]) -> Step:
            chunk = self.options.chunk
            return self.life.extend([(run.request, self.life.chunk_end(run.request, chunk)) for run in chosen])

        step = self._with_room(runs, extend)
        if step is None:
            return
        starts, ends = step.starts.tolist(), step.ends.tolist()
        chunks = [
            [*run.request.tokens[start : end + 1].tolist(), *([-1] if end == len(run.request) else [])]
            for run, start, end in zip(runs, starts, ends, strict=True)
        ]
        tokens, logits = self._launch(step, lambda: self.device.prefill(step.rows.tolist(), starts, chunks))
        whole = [b for b, run in enumerate(runs) if ends[b] == len(run.request)]
        for b in whole:
            if int(tokens[b]) < 0:
                raise InputError(
                    f"request {runs[b].rid}: no token could be drawn, its row holds no positive probability"
                )
        self._learn(step, {runs[b]: [int(tokens[b])] for b in whole}, {runs[b]: logits[b : b + 1] for b in whole})

    def _verify_round(self) -> None:
        runs = list(self.running)
        step = self._with_room(runs, lambda chosen: self.life.decode_plan([run.request for run in chosen]))
        if step is None:
            return
        look_back = self.device.drafter.needs_history
        histories = [run.request.tokens.tolist() for run in runs] if look_back else []
        longest = int(step.starts.max())
        starts, lens, predict, index, target, source, logits = self._launch(
            step, lambda: self.device.verify(step.rows.tolist(), histories, longest)
        )
        result = VerifyResult(predict, index, lens)
        accepted = accepted_rows(result)
        self._check_commit(step, starts, accepted, target, source)
        self.history.append(RoundRecord(step.rows.tolist(), starts.tolist(), [len(rows) for rows in accepted]))
        flat = logits.flatten(0, 1)
        self._learn(
            step,
            dict(zip(runs, accepted_tokens(result), strict=True)),
            {run: flat[rows] for run, rows in zip(runs, accepted, strict=True)},
        )
        for run, rows in zip(runs, accepted, strict=True):
            run.accepts[len(rows)] += 1
        if self.on_round is not None:
            self.on_round(self)

    def _check_commit(
        self,
        step: Step,
        starts: torch.Tensor,
        accepted: list[list[int]],
        target: torch.Tensor,
        source: torch.Tensor,
    ) -> None:
        """What the device committed is what the host's rule says, from the host's own tables."""
        if starts.tolist() != step.starts.tolist():
            raise AuditError(f"step {step.number}: the device verified from {starts}, the host has {step.starts}")
        window = self.alloc.window(step.rows, step.starts, self.spec.width).out_full
        commit = plan_commit(window.reshape(len(step.rows), -1), step.starts, accepted)
        seen = [
            np.concatenate([slots[b, : len(rows)] for b, rows in enumerate(accepted)]) for slots in (target, source)
        ]
        if not np.array_equal(seen[0], commit.targets) or not np.array_equal(seen[1], commit.sources):
            raise AuditError(f"step {step.number}: the device commits slots {seen}, the host owns {commit}")
        if commit.moves[0].size and not self.spec.branches:
            raise AuditError(f"step {step.number}: a chain's accepted prefix is in place, got moves {commit}")

    def _learn(self, step: Step, tokens: dict[RequestRun, list[int]], logits: dict[RequestRun, torch.Tensor]) -> None:
        """Tell the life cycle what came out; what it takes is the output, the rest of a run is dropped."""
        ended = self.life.learn(step, {run.request: run_tokens for run, run_tokens in tokens.items()})
        for run in tokens:
            new = run.request.outputs[len(run.outputs) :]
            run.logits += list(logits[run][: len(new)])
            run.outputs += new
        for run in [run for run in self.running if run.request in ended]:
            run.finish = run.request.reason or ""
            self.running.remove(run)
            self.finished.append(run)
            self._crowded = False
            self.life.finish(run.request)
