"""The engine loop: admit, prefill in chunks, then rounds of draft, verify, accept, commit, clear and evict.

Ownership and lengths are the life cycle's (:mod:`dsv4_npu.alloc.lifecycle`); the device's side of a step is in
:mod:`dsv4_npu.emulation.rounds`. A step is planned, launched, and learned when its asynchronous copy has arrived: at
once, or with overlap after the next round was launched.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from dsv4_npu.alloc.request import Request, State, Step
from dsv4_npu.budget import PoolSizes
from dsv4_npu.config import CacheConfig
from dsv4_npu.emulation.drafters import Drafter
from dsv4_npu.emulation.flights import FlightLoop
from dsv4_npu.emulation.parking import Parking
from dsv4_npu.emulation.requests import EngineOptions, RequestRun, RoundRecord
from dsv4_npu.emulation.stages import OwnDrafter
from dsv4_npu.emulation.stream import EVENTS
from dsv4_npu.errors import CapacityError, InputError

__all__ = ["Engine", "EngineOptions", "RequestRun", "RoundRecord"]

DEFAULT_OPTIONS = EngineOptions()


class Engine(FlightLoop):
    """Runs requests of one model over one set of pools.

    Args:
        model: a Hugging Face DeepSeek-V4 model (:func:`~dsv4_npu.emulation.model.build_model`).
        config, sizes: the deployment.
        drafter: proposes drafts; None without speculation.
        options: how the loop runs.
        on_round: called after every verify was learned with the engine, for progress and tests.

    Raises:
        InputError: no drafter with speculation, a drafter that overlap rules out, or an unknown device.
        UnavailableError: the emulated device cannot be had here.
    """

    def __init__(
        self,
        model: Any,
        config: CacheConfig,
        sizes: PoolSizes,
        drafter: Drafter | OwnDrafter | None = None,
        options: EngineOptions = DEFAULT_OPTIONS,
        on_round: Callable[[Engine], None] | None = None,
    ) -> None:
        super().__init__(model, config, sizes, drafter, options, on_round)
        self.waiting: deque[RequestRun] = deque()
        self.parking: Parking | None = None
        if options.retract == "snapshot":
            self.parking = Parking(self.pools, self.life, options.host_bytes)
        elif options.retract != "recompute":
            raise InputError(f"retract = {options.retract!r}; 'recompute' or 'snapshot' is needed")
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
        self.drain()
        self.life.resume(request, more, max_new, keep=keep)
        if request.state is State.PREFILL and request.planned == request.cached:
            # Without room it waits for its pages like any other.
            with suppress(CapacityError):
                self._bring_back(request)
        run.prompt = request.tokens.tolist()
        run.max_new, run.finish = max_new, ""
        run.outputs, run.logits, run.accepts = [], [], Counter()
        self._place(run)

    def rewind(self, run: RequestRun, length: int) -> int:
        """Cut a running request to its first ``length`` tokens; returns the position that it continues from.

        With overlap call :meth:`drain` before and look whether the request still runs.
        """
        self.drain()
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
        """Take a running request's memory away; it waits, and then gets its history back as ``options.retract`` says.

        Rounds in flight are learned first; nothing more is done if one of them ended the request.
        """
        self.drain()
        if run.finish:
            return
        self._take_memory(run)
        self.running.remove(run)
        self.waiting.appendleft(run)

    def abort(self, run: RequestRun) -> None:
        """End a request wherever it is; nothing of it is kept, and rounds in flight compute it for nothing."""
        if run.life is not None:
            self.life.abort(run.life)
            self._forget(run.life)
        for place in (self.running, self.waiting):
            if run in place:
                place.remove(run)
        run.finish = "abort"
        self.finished.append(run)

    def end_session(self, run: RequestRun) -> None:
        """Release what a kept session holds; one that gave its memory up holds nothing."""
        self.drain()
        if run.request.state is State.QUEUED:
            self.life.abort(run.request)
        else:
            self.life.finish(run.request)
        self._forget(run.request)

    def run(self) -> list[RequestRun]:
        """Run until every request is done; they come back in the order they were submitted."""
        while self.step():
            pass
        return sorted(self.finished, key=lambda r: r.rid)

    def step(self) -> bool:
        """Admit, then one prefill forward if any prompt is unfinished, else one verify round. False when idle."""
        self._admit()
        if not self.running:
            return self.drain()
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
                    self._bring_back(run.life)
            except CapacityError:
                if self._give_up_a_session():
                    continue
                # Rows of requests that ended are free when their last round is learned.
                if not self.running and not self.flights:
                    raise
                return
            self._place(self.waiting.popleft())

    def _give_up_a_session(self) -> bool:
        """Take the memory of the oldest idle session; its next turn gets the history back."""
        for run in self.finished:
            if run.life is not None and run.life.state is State.KEPT:
                self._take_memory(run)
                return True
        return False

    def _take_memory(self, run: RequestRun) -> None:
        if self.parking is not None:
            self.parking.save(run.request)
        self.life.retract(run.request)

    def _bring_back(self, request: Request) -> None:
        """Restore what the host keeps of a freshly admitted request; without room it goes back into the queue."""
        if self.parking is None:
            return
        try:
            self.parking.bring_back(request)
        except CapacityError:
            self.life.withdraw(request)
            raise

    def _forget(self, request: Request) -> None:
        if self.parking is not None:
            self.parking.forget(request)

    def _with_room(self, runs: list[RequestRun], plan: Callable[[list[RequestRun]], Step]) -> Step | None:
        """Plan a step; while the pages do not suffice, rounds in flight are learned, then idle sessions and then the
        youngest requests give theirs back.

        None when no request of the step is left.
        """
        while runs:
            try:
                return plan(runs)
            except CapacityError:
                if self.drain():
                    runs[:] = [run for run in runs if run in self.running]
                    continue
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

    def _prefill(self, runs: list[RequestRun]) -> None:
        def extend(chosen: list[RequestRun]) -> Step:
            chunk = self.options.chunk
            return self.life.extend([(r.request, self.life.chunk_end(r.request, chunk)) for r in chosen])

        step = self._with_room(runs, extend)
        if step is None:
            return
        self._launch_prefill(step, runs)
        # A request decodes when its prefill is learned.
        self.drain()

    def _verify_round(self) -> None:
        before = EVENTS.copy()
        runs = list(self.running)
        step = self._with_room(runs, lambda chosen: self.life.decode_plan([r.request for r in chosen]))
        if step is None:
            return
        self._launch_verify(step, runs)
        learned = self._learn_all_but(1 if self.options.overlap else 0)
        self.costs.append(EVENTS.since(before))
        self._tell(learned)

    def _on_ended(self, run: RequestRun) -> None:
        run.finish = run.request.reason or ""
        self.running.remove(run)
        self.finished.append(run)
        self._crowded = False
        if run.session:
            self.life.keep(run.request)
        else:
            self.life.finish(run.request)
