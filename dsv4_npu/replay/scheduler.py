"""The rounds of a replay: chunked prefill, speculative decode with overlap, relief under pressure.

It serves the requests of a trace on a :class:`~dsv4_npu.alloc.lifecycle.Lifecycle`, as an engine would, except that no
forward runs: how many drafts a verify accepts is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.request import Request, State, Step
from dsv4_npu.alloc.state import FULL, SWA
from dsv4_npu.errors import CapacityError
from dsv4_npu.replay.acceptance import SimulatedAcceptance
from dsv4_npu.replay.intake import Intake, Policy
from dsv4_npu.replay.jobs import Job


class Scheduler(Intake):
    """Serves ``jobs`` on one life cycle: call :meth:`round` until :attr:`finished`, then :meth:`close`."""

    def __init__(
        self, life: Lifecycle, jobs: Sequence[Job], acceptance: SimulatedAcceptance, policy: Policy, vocab: int
    ) -> None:
        super().__init__(life, jobs, acceptance, policy, vocab)
        self._outstanding: list[Step] = []

    @property
    def finished(self) -> bool:
        """Whether every request was served or refused and nothing is in flight."""
        return not (self.coming or self._waiting or self.running or self._outstanding)

    def round(self) -> None:
        """Admit, launch a decode and a prefill, learn the outcome of the round before; without overlap, of both."""
        self.arrive()
        self.admit()
        decode = self._decode()
        prefill = self._prefill(decode is not None)
        before, self._outstanding = self._outstanding, [step for step in (decode, prefill) if step is not None]
        self._learn(before)
        if not self.policy.overlap:
            self._settle()
        self.counters.rounds += 1
        self.clock += self.policy.step_ms or 0.0

    def close(self) -> None:
        """End what is left of the sessions and empty the cache: afterwards nothing may be in use."""
        self._settle()
        for turn in list(self.kept):
            self.drop_session(turn)
        if self.life.cache is not None:
            self.life.cache.clear()

    # -- steps ---------------------------------------------------------------------------------------------------

    def _decode(self) -> Step | None:
        """Launch a decode of every request that can."""
        while True:
            owned = [job.request for job in self.running]
            batch = [request for request in owned if request is not None and request.state is State.DECODE]
            if not batch:
                return None
            try:
                step = self.life.decode_plan(batch)
            except CapacityError as error:
                self._relieve(str(error))
                continue
            self.counters.decode_steps += 1
            self.counters.decode_rows += len(batch)
            self.counters.verified_rows += len(batch) * self.life.width
            self._launch(step)
            return step

    def _prefill(self, decoding: bool) -> Step | None:
        """Launch the next prefill chunks; without room they wait for the decodes, or the chunks become smaller."""
        state, page, budget = self.alloc.state, self.alloc.spec.page_size, self.policy.prefill_chunk
        while True:
            chunks = self._chunks(budget)
            if not chunks:
                return None
            try:
                step = self.life.extend(chunks)
            except CapacityError as error:
                free = min(state.free(FULL), state.free(SWA))
                if budget > page:
                    # Down to one page even if nothing is free: the cache is asked only for what it can give in full.
                    budget = max(page, min(budget // 2, free * page))
                elif decoding:
                    return None
                else:
                    self._relieve(str(error))
                continue
            self.counters.prefill_steps += 1
            self.counters.prefill_chunks += len(chunks)
            self.counters.prefilled_tokens += int((step.ends - step.starts).sum())
            self._launch(step)
            return step

    def _chunks(self, budget: int) -> list[tuple[Request, int]]:
        chunks = []
        filling = [job for job in self.running if job.request is not None and job.request.state is State.PREFILL]
        for job in sorted(filling, key=lambda one: one.trace.index):
            request = job.request
            assert request is not None
            if request.planned >= len(request):
                continue
            if budget < 1:
                break
            end = self.life.chunk_end(request, budget)
            budget -= end - request.planned
            chunks.append((request, end))
        return chunks

    def _launch(self, step: Step) -> None:
        self.counters.cleared_swa_pages += len(self.alloc.drain_freed_swa())
        self.counters.table_entries += self.alloc.flush()
        self.life.launch(step)

    def _settle(self) -> None:
        """Wait for everything in flight."""
        before, self._outstanding = self._outstanding, []
        self._learn(before)

    def _relieve(self, reason: str) -> None:
        """Make room: learn what is in flight, give up a session, retract a request, refuse the last one.

        The oldest request is never retracted, so that one always gets on.
        """
        if self._outstanding:
            self._settle()
        elif not self.give_up_session():
            oldest = min(self.running, key=lambda job: job.trace.index)
            victim = max((job for job in self.running if job is not oldest), key=self._burden, default=oldest)
            assert victim.request is not None
            if victim is not oldest:
                self.running.remove(victim)
                self.life.retract(victim.request)
                self.counters.retracted += 1
                self.queue(victim)
                self._closed_door = True
            else:
                self.leave(oldest)
                self.life.abort(victim.request)
                oldest.request = None
                self.refuse(oldest, f"cannot make progress alone: {reason}")

    def _burden(self, job: Job) -> tuple[bool, int]:
        """Order in which requests are retracted: those that hold pages first, the latest arrival first."""
        held = job.request is not None and self.alloc.allocated(job.request.row) > self.alloc.shared(job.request.row)
        return held, job.trace.index

    # -- outcomes ------------------------------------------------------------------------------------------------

    def _learn(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self.life.done(step)
            tokens = self._accepted(step) if step.kind == "decode" else self._first_tokens(step)
            for request in self.life.learn(step, tokens):
                self._ended(self._job_of[request], request)

    def _accepted(self, step: Step) -> dict[Request, list[int]]:
        tokens, counted = {}, []
        for request in step.requests:
            if request.reason is None:
                job, done = self._job_of[request], request.num_outputs
                tokens[request] = run = job.outputs[done : done + job.accepts[done]]
                counted.append(len(run))
        self.counters.accepted(counted)
        return tokens

    def _first_tokens(self, step: Step) -> dict[Request, list[int]]:
        tokens = {}
        for request, end in zip(step.requests, step.ends.tolist(), strict=True):
            if end == len(request):
                done = request.num_outputs
                tokens[request] = self._job_of[request].outputs[done : done + 1]
                self.counters.output_tokens += 1
        return tokens

    def _ended(self, job: Job, request: Request) -> None:
        job.over = True
        self.counters.served += 1
        job.outputs, job.accepts = [], []
        self.leave(job)
        del self._job_of[request]
        if job.after is not None and not job.after.over:
            self.life.keep(request)
            self.kept[job] = None
            self._turn_ready(job.after)
        else:
            self.life.finish(request)
            job.request = None
