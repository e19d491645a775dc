"""The engine loop: admit, prefill in chunks, then rounds of draft, verify, accept, commit, clear and evict."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from dsv4_npu import ops
from dsv4_npu.alloc import AllocSpec, Cleanup, KVAllocator
from dsv4_npu.budget import PoolSizes
from dsv4_npu.config import CacheConfig
from dsv4_npu.emulation.cache import PooledModel
from dsv4_npu.emulation.drafters import Drafter, Drafts
from dsv4_npu.emulation.forward import Tables, plan_batch
from dsv4_npu.errors import InputError
from dsv4_npu.pools import DSV4Pools
from dsv4_npu.spec import VerifyResult, accept_greedy, accept_rejection, accepted_rows, accepted_tokens, plan_commit


@dataclass
class RequestRun:
    """One request: what was asked, what came out, how the rounds went.

    ``logits``: the target's logits behind each output token, for comparison with the oracle.
    """

    rid: int
    prompt: list[int]
    max_new: int
    row: int = 0
    prefilled: int = 0
    cached: int = 0
    outputs: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    accepts: Counter[int] = field(default_factory=Counter)
    finish: str = ""

    @property
    def history(self) -> list[int]:
        """Prompt and outputs; the last token has no KV yet while the request runs."""
        return self.prompt + self.outputs

    @property
    def rounds(self) -> int:
        """Verify rounds so far."""
        return sum(self.accepts.values())


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
        early_exit_layers: layers that the early-exit drafter runs; None: all but the last.
        stop: token ids that end a request.
    """

    batch: int = 8
    chunk: int = 256
    accept: Literal["greedy", "rejection"] = "greedy"
    temperature: float = 0.0
    clear: bool = True
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
        if config.speculation.speculative and config.verify_width > 1 and drafter is None:
            raise InputError(f"drafter = None with {config.speculation.kind} speculation; a drafter is needed")
        self.config, self.options, self.drafter, self.on_round = config, options, drafter, on_round
        self.pools = DSV4Pools(config, sizes, state_dtype=torch.float64)
        self.alloc = KVAllocator(AllocSpec.of(config, sizes))
        self.pooled = PooledModel(model, self.pools)
        self.tables = Tables(
            self.alloc.mirrors.block_table, self.alloc.mirrors.full_to_swa, self.alloc.mirrors.c128_table
        )
        self.coins = torch.Generator().manual_seed(options.seed)
        self.waiting: deque[RequestRun] = deque()
        self.running: list[RequestRun] = []
        self.finished: list[RequestRun] = []
        self.rounds = 0
        self.last_round: RoundRecord | None = None

    def submit(self, prompt: Sequence[int], max_new: int) -> RequestRun:
        """Queue a request; refuses (before anything changes) what can never fit."""
        vocab = self.config.model.vocab_size
        if not prompt:
            raise InputError("prompt is empty; at least one token is needed")
        bad = [t for t in prompt if not 0 <= t < vocab]
        if bad:
            raise InputError(f"prompt holds token {bad[0]}; 0 to {vocab - 1} are this model's tokens")
        if max_new < 1:
            raise InputError(f"max_new = {max_new}; at least 1 is needed")
        if len(prompt) + max_new > self.config.context_len:
            raise InputError(
                f"prompt of {len(prompt)} and max_new = {max_new} exceed context_len = {self.config.context_len}"
            )
        self.alloc.admit_check(len(prompt) + max_new + self.config.reserve)
        request = RequestRun(len(self.waiting) + len(self.running) + len(self.finished), list(prompt), max_new)
        self.waiting.append(request)
        return request

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
        fresh = [r for r in self.running if r.prefilled < len(r.prompt)]
        if fresh:
            self._prefill(fresh)
        else:
            self._verify_round(list(self.running))
        return True

    def _admit(self) -> None:
        while self.waiting and len(self.running) < min(self.options.batch, self.config.request_rows):
            request = self.waiting.popleft()
            request.row = self.alloc.open(request.rid)
            self.running.append(request)

    def _forward(
        self, requests: Sequence[RequestRun], tokens: torch.Tensor, starts: Sequence[int], lengths: Sequence[int]
    ) -> torch.Tensor:
        self._clear_freed_banks()
        self.alloc.flush()
        epoch = self.alloc.launch()
        plan = plan_batch(self.pools, self.tables, [r.row for r in requests], starts, lengths)
        logits = self.pooled.forward(tokens, plan)
        self.alloc.done(epoch)
        return logits

    def _prefill(self, requests: list[RequestRun]) -> None:
        starts = [r.prefilled for r in requests]
        ends = [min(s + self.options.chunk, len(r.prompt)) for s, r in zip(starts, requests, strict=True)]
        lengths = [e - s for s, e in zip(starts, ends, strict=True)]
        with self.alloc.transaction() as tx:
            for request, end in zip(requests, ends, strict=True):
                tx.extend(request.row, end)
            tx.commit(slots=False)
        tokens = torch.zeros((len(requests), max(lengths)), dtype=torch.int64)
        for b, (request, start, end) in enumerate(zip(requests, starts, ends, strict=True)):
            tokens[b, : end - start] = torch.tensor(request.prompt[start:end])
        logits = self._forward(requests, tokens, starts, lengths)
        for b, (request, end) in enumerate(zip(requests, ends, strict=True)):
            request.prefilled = end
            self.alloc.commit(request.row, end)
            self.alloc.evict_window(request.row)
            if end == len(request.prompt):
                last = logits[b, lengths[b] - 1]
                self._append(request, [self._first_token(last)], [last])

    def _first_token(self, logits: torch.Tensor) -> int:
        if self.options.accept == "greedy" or self.options.temperature == 0:
            return int(logits.argmax())
        probs = (logits / self.options.temperature).softmax(-1)
        return int(torch.multinomial(probs, 1, generator=self.coins))

    def _verify_round(self, requests: list[RequestRun]) -> None:
        width = self.config.verify_width
        rows = np.array([r.row for r in requests], np.int64)
        window = self.alloc.decode_step(rows, self.config.reserve)
        seq_lens = self.alloc.state.committed[rows].astype(np.int64)
        drafts = self._draft(requests, seq_lens)
        roots = torch.tensor([[r.outputs[-1]] for r in requests])
        candidates = torch.cat((roots, drafts.tokens), dim=1)
        logits = self._forward(requests, candidates, seq_lens.tolist(), [width] * len(requests))
        result = self._accept(candidates, logits, drafts)
        accepted = accepted_rows(result)
        commit = plan_commit(window.out_full.reshape(len(requests), width), seq_lens, accepted)
        assert commit.moves[0].size == 0, "a chain's accepted prefix is in place"
        self.alloc.commit_batch(rows, commit.new_lens)
        self._clear_rejected(rows, seq_lens, result)
        self.last_round = RoundRecord(rows.tolist(), seq_lens.tolist(), [len(at) for at in accepted])
        flat = logits.flatten(0, 1)
        for request, tokens, at in zip(requests, accepted_tokens(result), accepted, strict=True):
            request.accepts[len(at)] += 1
            self.alloc.evict_window(request.row)
            self._append(request, tokens, list(flat[at]))
        self.rounds += 1
        if self.on_round:
            self.on_round(self)

    def _draft(self, requests: list[RequestRun], seq_lens: np.ndarray[Any, Any]) -> Drafts:
        count = self.config.verify_width - 1
        if not count or self.drafter is None:
            return Drafts(torch.zeros((len(requests), 0), dtype=torch.int64))

        layers = self.options.early_exit_layers or max(self.config.model.num_layers - 1, 1)

        def step(tokens: torch.Tensor, offset: int) -> torch.Tensor:
            self.alloc.flush()
            starts = (seq_lens + offset).tolist()
            plan = plan_batch(self.pools, self.tables, [r.row for r in requests], starts, [1] * len(requests))
            return self.pooled.forward(tokens[:, None], plan, layers)[:, 0]

        return self.drafter.propose([r.history for r in requests], count, step)

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

    def _clear_rejected(self, rows: np.ndarray[Any, Any], seq_lens: np.ndarray[Any, Any], result: VerifyResult) -> None:
        state = self.pools.c128_state
        if not (self.options.clear and state.layers and self.config.verify_width > 1):
            return
        ops.clear_c128_draft_states_(
            state.data,
            torch.from_numpy(rows),
            torch.from_numpy(seq_lens),
            result.accept_lens,
            state.ring,
            self.config.verify_width,
        )

    def _append(self, request: RequestRun, tokens: list[int], logits: list[torch.Tensor]) -> None:
        """Append accepted tokens; a stop token inside the run wins over the length cap, what follows is dropped."""
        for token, row in zip(tokens, logits, strict=True):
            request.outputs.append(token)
            request.logits.append(row)
            if token in self.options.stop:
                return self._finish(request, "stop")
            if len(request.outputs) == request.max_new:
                return self._finish(request, "length")
        return None

    def _finish(self, request: RequestRun, reason: str) -> None:
        request.finish = reason
        self.running.remove(request)
        self.finished.append(request)
        self._clear_state(self.alloc.close(request.row, request.rid))

    def _clear_state(self, cleanup: Cleanup) -> None:
        """Empty the banks that the request owned before its row can be given out again."""
        row = torch.tensor([cleanup.row])
        owned = [self.pools.c128_state]
        if cleanup.c4_request_bank:
            owned += [self.pools.c4_state, self.pools.index_state]
        for state in owned:
            if state.layers:
                ops.clear_request_states_(state.data, row, state.ring)

    def _clear_freed_banks(self) -> None:
        """Where SWA pages own C4 states, empty the banks of pages that were freed since the last forward."""
        pages = self.alloc.drain_freed_swa()
        if not len(pages) or not self.pools.c4_state_by_page:
            return
        banks = torch.from_numpy(np.unique(pages).astype(np.int64))
        for state in (self.pools.c4_state, self.pools.index_state):
            if state.layers:
                ops.clear_request_states_(state.data, banks, state.ring)
