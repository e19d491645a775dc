"""The engine loop: admit, prefill in chunks, then rounds of draft, verify, accept, commit, clear and evict.

Ownership and lengths are the life cycle's (:mod:`dsv4_npu.alloc.lifecycle`); this loop computes, and tells it what came
out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.prefix_cache import PrefixCache
from dsv4_npu.alloc.request import Request, State, Step
from dsv4_npu.alloc.rollback import RollbackRules
from dsv4_npu.budget import PoolSizes
from dsv4_npu.config import CacheConfig
from dsv4_npu.emulation.cache import PooledModel
from dsv4_npu.emulation.drafters import Drafter, Drafts
from dsv4_npu.emulation.forward import Tables, plan_batch
from dsv4_npu.emulation.states import StateKeeper
from dsv4_npu.errors import CapacityError, InputError
from dsv4_npu.pools import DSV4Pools
from dsv4_npu.spec import VerifyResult, accept_greedy, accept_rejection, accepted_rows, accepted_tokens, plan_commit


@dataclass(eq=False)
class RequestRun:
    """One request, or one session: what was asked, what came out, how the rounds went.

    Attributes:
        rid: number in the order of submission.
        prompt: tokens given by the user in this turn, after the history of earlier turns.
        outputs: tokens produced in this turn.
        logits: the target's logits behind each output.
        accepts: rows accepted -> verify rounds.
        cached: leading tokens found in the prefix cache at the last admission.
        finish: "stop", "length" or "abort" once the turn is over.
        session: whether the row is kept for another turn.
        life: the request in the life cycle, from the first admission on.
    """

    rid: int
    prompt: list[int]
    max_new: int
    session: bool = False
    outputs: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    accepts: Counter[int] = field(default_factory=Counter)
    cached: int = 0
    finish: str = ""
    life: Request | None = None

    @property
    def request(self) -> Request:
        """The admitted request."""
        assert self.life is not None
        return self.life

    @property
    def row(self) -> int:
        """The request row, 0 without one."""
        return self.life.row if self.life else 0

    @property
    def rounds(self) -> int:
        """Verify rounds so far."""
        return sum(self.accepts.values())

    @property
    def retractions(self) -> int:
        """How often the request gave its memory back to start again."""
        return self.life.retractions if self.life else 0


@dataclass(frozen=True)
class RoundRecord:
    """One verify round: request rows, committed lengths before it, rows accepted (all ``[bs]``)."""

    rows: list[int]
    seq_lens: list[int]
    accept_lens: list[int]


@dataclass(frozen=True)
class EngineOptions:
    """How the loop runs.

    Attributes:
        batch: most requests that run at once.
        chunk: tokens of a prompt that one forward prefills.
        accept: "greedy" or "rejection" (which draws with ``temperature``).
        temperature: 0 makes the target's distribution one-hot.
        clear: run the clear of rejected C128 rows.
        prefix_cache: keep complete prefixes of finished requests for later ones.
        early_exit_layers: layers that the early-exit drafter runs; None: all but the last.
        stop: token ids that end a request.
    """

    batch: int = 8
    chunk: int = 256
    accept: Literal["greedy", "rejection"] = "greedy"
    temperature: float = 0.0
    clear: bool = True
    prefix_cache: bool = True
    early_exit_layers: int | None = None
    stop: tuple[int, ...] = ()
    seed: int = 0


class Engine:
    """Runs requests of one model over one set of pools.

    Args:
        model: a Hugging Face DeepSeek-V4 model (:func:`~dsv4_npu.emulation.model.build_model`).
        config, sizes: the deployment.
        drafter: proposes drafts; None without speculation.
        options: how the loop runs.
        on_round: called after every verify with the engine, for progress and tests.
    """

    def __init__(
        self,
        model: Any,
        config: CacheConfig,
        sizes: PoolSizes,
        drafter: Drafter | None = None,
        options: EngineOptions = EngineOptions(),
        on_round: Callable[[Engine], None] | None = None,
    ) -> None:
        if config.verify_width > 1 and drafter is None:
            raise InputError(f"drafter = None with {config.speculation.kind} speculation; a drafter is needed")
        self.config, self.options, self.drafter, self.on_round = config, options, drafter, on_round
        self.pools = DSV4Pools(config, sizes, state_dtype=torch.float64)
        self.alloc = KVAllocator(AllocSpec.of(config, sizes))
        self.states = StateKeeper(self.pools, self.alloc)
        cache = PrefixCache(self.alloc, capture=self.states.capture) if options.prefix_cache else None
        rules = RollbackRules.of(self.alloc.spec, speculative=config.speculation.speculative)
        self.life = Lifecycle(
            self.alloc, cache, rules=rules, reserve=config.reserve, on_clear=self.states.clear_released
        )
        self.pooled = PooledModel(model, self.pools)
        mirrors = self.alloc.mirrors
        self.tables = Tables(mirrors.block_table, mirrors.full_to_swa, mirrors.c128_table)
        self.coins = torch.Generator().manual_seed(options.seed)
        self.waiting: deque[RequestRun] = deque()
        self.running: list[RequestRun] = []
        self.finished: list[RequestRun] = []
        self.rounds = 0
        self.last_round: RoundRecord | None = None
        self._submitted = 0
        self._crowded = False

    def submit(self, prompt: Sequence[int], max_new: int, session: bool = False) -> RequestRun:
        """Queue a request; refuses (before anything changes) what can never fit."""
        self._check_tokens(prompt, max_new)
        self._check_context(len(prompt), max_new)
        run = RequestRun(self._submitted, list(prompt), max_new, session)
        self._submitted += 1
        self.waiting.append(run)
        return run

    def resume(self, run: RequestRun, more: Sequence[int], max_new: int, keep: int | None = None) -> None:
        """Begin the next turn of a session; ``more`` follows the first ``keep`` tokens of its history."""
        self._check_tokens(more, max_new)
        request = run.request
        kept = len(request) if keep is None else keep
        self._check_context(kept + len(more), max_new)
        self.life.resume(request, more, max_new, keep=keep)
        run.prompt = request.tokens.tolist()
        run.max_new, run.finish = max_new, ""
        run.outputs, run.logits, run.accepts = [], [], Counter()
        self._place(run)

    def rewind(self, run: RequestRun, length: int) -> int:
        """Cut a running request to its first ``length`` tokens; returns the position that it continues from."""
        position = self.life.rewind(run.request, length)
        kept = max(0, length - len(run.prompt))
        run.outputs, run.logits = run.outputs[:kept], run.logits[:kept]
        if length < len(run.prompt):
            run.prompt = run.prompt[:length]
        if run in self.running:
            self.running.remove(run)
        self._place(run)
        return position

    def retract(self, run: RequestRun) -> None:
        """Take a running request's memory away; it waits, and computes its history again."""
        self.life.retract(run.request)
        self.running.remove(run)
        self.waiting.appendleft(run)

    def abort(self, run: RequestRun) -> None:
        """End a request wherever it is; nothing of it is kept."""
        if run.life is not None:
            self.life.abort(run.life)
        for place in (self.running, self.waiting):
            if run in place:
                place.remove(run)
        run.finish = "abort"
        self.finished.append(run)

    def end_session(self, run: RequestRun) -> None:
        """Release what a kept session holds."""
        self.life.finish(run.request)

    def run(self) -> list[RequestRun]:
        """Run until every request is done; they come back in the order they were submitted."""
        while self.step():
            pass
        return sorted(self.finished, key=lambda r: r.rid)

    def step(self) -> bool:
        """Admit, then one prefill forward if any prompt is unfinished, else one verify round. False when idle."""
        self._admit()
        if not self.running:
            return False
        fresh = [r for r in self.running if r.request.state is State.PREFILL]
        if fresh:
            self._prefill(fresh)
        else:
            self._verify_round()
        return True

    def _check_tokens(self, tokens: Sequence[int], max_new: int) -> None:
        vocab = self.config.model.vocab_size
        if not tokens:
            raise InputError("prompt is empty; at least one token is needed")
        bad = [t for t in tokens if not 0 <= t < vocab]
        if bad:
            raise InputError(f"prompt holds token {bad[0]}; 0 to {vocab - 1} are this model's tokens")
        if max_new < 1:
            raise InputError(f"max_new = {max_new}; at least 1 is needed")

    def _check_context(self, length: int, max_new: int) -> None:
        if length + max_new > self.config.context_len:
            raise InputError(
                f"history of {length} and max_new = {max_new} exceed context_len = {self.config.context_len}"
            )
        self.life.check(length, max_new)

    def _place(self, run: RequestRun) -> None:
        """Running if it has a row, else waiting for one."""
        if run in self.finished:
            self.finished.remove(run)
        if run.request.state is State.QUEUED:
            self.waiting.appendleft(run)
        else:
            run.cached = run.request.cached
            self.running.append(run)

    def _admit(self) -> None:
        # After a retraction nobody enters until somebody leaves: the newcomer would be the next to be retracted.
        if self._crowded and self.running:
            return
        self._crowded = False
        while self.waiting and len(self.running) < self.options.batch:
            run = self.waiting[0]
            try:
                if run.life is None:
                    run.life = self.life.admit(run.rid, run.prompt, run.max_new, self.options.stop)
                else:
                    self.life.readmit(run.life)
            except CapacityError:
                if self._give_up_a_session():
                    continue
                if not self.running:
                    raise
                return
            self._place(self.waiting.popleft())

    def _give_up_a_session(self) -> bool:
        """Take the memory of the oldest idle session; its next turn computes the history again."""
        for run in self.finished:
            if run.life is not None and run.life.state is State.KEPT:
                self.life.retract(run.request)
                return True
        return False

    def _with_room(self, runs: list[RequestRun], plan: Callable[[list[RequestRun]], Step]) -> Step | None:
        """Plan a step; while the pages do not suffice, idle sessions and then the youngest requests give theirs back.

        None when every request of the step had to.
        """
        while runs:
            try:
                return plan(runs)
            except CapacityError:
                if self._give_up_a_session():
                    continue
                if len(self.running) == 1:
                    raise
                victim = max(self.running, key=lambda r: r.rid)
                self.retract(victim)
                self._crowded = True
                if victim in runs:
                    runs.remove(victim)
        return None

    def _forward(self, step: Step, tokens: torch.Tensor) -> torch.Tensor:
        live = len(step.requests)
        rows, starts, ends = step.rows[:live].tolist(), step.starts.tolist(), step.ends.tolist()
        self.states.before_forward(step.requests)
        self.alloc.flush()
        self.life.launch(step)
        lengths = [e - s for s, e in zip(starts, ends, strict=True)]
        plan = plan_batch(self.pools, self.tables, rows, starts, lengths)
        logits = self.pooled.forward(tokens, plan)
        self.life.done(step)
        return logits

    def _prefill(self, runs: list[RequestRun]) -> None:
        def extend(chosen: list[RequestRun]) -> Step:
            chunk = self.options.chunk
            return self.life.extend([(r.request, self.life.chunk_end(r.request, chunk)) for r in chosen])

        step = self._with_room(runs, extend)
        if step is None:
            return
        starts, ends = step.starts.tolist(), step.ends.tolist()
        tokens = torch.zeros((len(runs), max(e - s for s, e in zip(starts, ends, strict=True))), dtype=torch.int64)
        for b, (run, start, end) in enumerate(zip(runs, starts, ends, strict=True)):
            tokens[b, : end - start] = torch.from_numpy(run.request.tokens[start:end].astype(np.int64))
        logits = self._forward(step, tokens)
        whole = [b for b, run in enumerate(runs) if ends[b] == len(run.request)]
        last = {b: logits[b, ends[b] - starts[b] - 1] for b in whole}
        self._learn(
            step,
            {runs[b]: [self._first_token(row)] for b, row in last.items()},
            {runs[b]: [row] for b, row in last.items()},
        )

    def _first_token(self, logits: torch.Tensor) -> int:
        if self.options.accept == "greedy" or self.options.temperature == 0:
            return int(logits.argmax())
        probs = (logits / self.options.temperature).softmax(-1)
        return int(torch.multinomial(probs, 1, generator=self.coins))

    def _verify_round(self) -> None:
        runs = list(self.running)
        step = self._with_room(runs, lambda chosen: self.life.decode_plan([r.request for r in chosen]))
        if step is None:
            return
        width, rows, seq_lens = self.config.verify_width, step.rows, step.starts.copy()
        drafts = self._draft(runs, rows, seq_lens)
        roots = torch.tensor([[int(r.request.tokens[-1])] for r in runs])
        candidates = torch.cat((roots, drafts.tokens), dim=1)
        logits = self._forward(step, candidates)
        result = self._accept(candidates, logits, drafts)
        accepted = accepted_rows(result)
        commit = plan_commit(step.loc.out_full.reshape(len(runs), width), seq_lens, accepted)
        assert commit.moves[0].size == 0, "a chain's accepted prefix is in place"
        if self.options.clear and width > 1:
            self.states.clear_rejected(rows, seq_lens, result.accept_lens, width)
        self.last_round = RoundRecord(rows.tolist(), seq_lens.tolist(), [len(at) for at in accepted])
        flat = logits.flatten(0, 1)
        for run, at in zip(runs, accepted, strict=True):
            run.accepts[len(at)] += 1
        tokens = dict(zip(runs, accepted_tokens(result), strict=True))
        self._learn(step, tokens, {run: list(flat[at]) for run, at in zip(runs, accepted, strict=True)})
        self.rounds += 1
        if self.on_round:
            self.on_round(self)

    def _draft(self, runs: list[RequestRun], rows: np.ndarray[Any, Any], seq_lens: np.ndarray[Any, Any]) -> Drafts:
        count = self.config.verify_width - 1
        if not count or self.drafter is None:
            return Drafts(torch.zeros((len(runs), 0), dtype=torch.int64))
        layers = self.options.early_exit_layers or max(self.config.model.num_layers - 1, 1)

        def step(tokens: torch.Tensor, offset: int) -> torch.Tensor:
            self.states.before_forward([])
            self.alloc.flush()
            plan = plan_batch(self.pools, self.tables, rows.tolist(), (seq_lens + offset).tolist(), [1] * len(runs))
            return self.pooled.forward(tokens[:, None], plan, layers)[:, 0]

        return self.drafter.propose([r.request.tokens.tolist() for r in runs], count, step)

    def _accept(self, candidates: torch.Tensor, logits: torch.Tensor, drafts: Drafts) -> VerifyResult:
        if self.options.accept == "greedy":
            return accept_greedy(candidates, logits.argmax(-1))
        vocab = logits.shape[-1]
        if self.options.temperature == 0:
            target = torch.nn.functional.one_hot(logits.argmax(-1), vocab)
        else:
            target = (logits / self.options.temperature).softmax(-1)
        batch, width = candidates.shape
        draft = torch.zeros((batch, width, vocab))
        certain = torch.nn.functional.one_hot(candidates[:, 1:], vocab)
        draft[:, : width - 1] = certain if drafts.probs is None else drafts.probs
        coins = torch.rand((batch, width), generator=self.coins)
        final = torch.rand(batch, generator=self.coins)
        return accept_rejection(candidates, target.float(), draft.float(), coins, final)

    def _learn(
        self, step: Step, tokens: dict[RequestRun, list[int]], logits: dict[RequestRun, list[torch.Tensor]]
    ) -> None:
        """Tell the life cycle what came out; what it takes is the output, the rest of a run is dropped."""
        ended = self.life.learn(step, {run.request: run_tokens for run, run_tokens in tokens.items()})
        for run in tokens:
            new = run.request.outputs[len(run.outputs) :]
            run.logits += logits[run][: len(new)]
            run.outputs += new
        for run in [r for r in self.running if r.request in ended]:
            run.finish = run.request.reason or ""
            self.running.remove(run)
            self.finished.append(run)
            self._crowded = False
            if run.session:
                self.life.keep(run.request)
            else:
                self.life.finish(run.request)
