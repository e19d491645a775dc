"""Admission of a replay: arrival, refusals, rows, the room that the pools can be expected to have, sessions."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dsv4_npu import addressing
from dsv4_npu.alloc.allocator import Cleanup
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.request import Request, State
from dsv4_npu.alloc.state import C128, FULL, ROW, SWA
from dsv4_npu.errors import CapacityError
from dsv4_npu.replay.acceptance import SimulatedAcceptance
from dsv4_npu.replay.jobs import Job
from dsv4_npu.replay.stats import Counters
from dsv4_npu.replay.trace import prompt_tokens


@dataclass(frozen=True)
class Policy:
    """How the scheduler decides.

    ``max_running``: requests in work at once. ``prefill_chunk``: tokens of one prefill step over all requests.
    ``admission``: let a request in when its ``whole`` prompt fits beside what the running ones will need, or when its
    first ``chunk`` fits now. ``output_estimate``: share of the tokens still to produce that ``whole`` keeps room for.
    What was let in too easily is made up for by retractions. ``overlap``: launch a step before the previous one is
    learned. ``step_ms``: time of a round on the trace's clock; None serves the trace as fast as it goes, in arrival
    order.
    """

    max_running: int = 64
    prefill_chunk: int = 8192
    admission: Literal["whole", "chunk"] = "whole"
    output_estimate: float = 0.3
    overlap: bool = True
    step_ms: float | None = None


class Intake:
    """Lets the requests of a trace in. ``running`` have a row and work to do, in no particular order.

    ``kept`` are ended turns whose session waits for its next turn, oldest first. ``refused``: the reason of each
    request that was not served, by trace index.
    """

    def __init__(
        self, life: Lifecycle, jobs: Sequence[Job], acceptance: SimulatedAcceptance, policy: Policy, vocab: int
    ) -> None:
        self.life, self.alloc, self.acceptance, self.policy, self.vocab = life, life.alloc, acceptance, policy, vocab
        self.coming = deque(jobs)
        self.running: list[Job] = []
        self.kept: dict[Job, None] = {}
        self.refused: dict[int, str] = {}
        self.counters = Counters()
        self.clock = 0.0
        self._waiting: list[tuple[int, Job]] = []
        self._job_of: dict[Request, Job] = {}
        self._closed_door = False
        life.on_clear = self._cleared

    @property
    def waiting(self) -> int:
        """Requests that arrived and have no row."""
        return len(self._waiting)

    def queue(self, job: Job) -> None:
        """Let a request wait; earlier arrivals go first, whenever they come back."""
        heapq.heappush(self._waiting, (job.trace.index, job))

    def arrive(self) -> None:
        """Take in what has arrived by now, as far as the queue is interested; refuse what can never be served."""
        step_ms = self.policy.step_ms
        if step_ms is not None and self.coming and not self.running and not self._waiting:
            self.clock = max(self.clock, self.coming[0].trace.timestamp)
        while self.coming and (self.coming[0].trace.timestamp <= self.clock if step_ms is not None else self._hungry):
            job = self.coming.popleft()
            job.arrived = True
            try:
                self.life.check(job.trace.input_length, job.trace.output_length)
            except CapacityError as error:
                self.refuse(job, str(error))
                continue
            if job.before is None or job.before.over:
                self.queue(job)

    def admit(self) -> None:
        """Give rows to waiting requests while there are rows and room."""
        while self._waiting and len(self.running) < self.policy.max_running and not self._closed_door:
            job = self._waiting[0][1]
            row = self._row_for(job)
            if row == "free" and (not self.running or self._room_for(job)):
                heapq.heappop(self._waiting)
                self._enter(job)
            elif row == "soon":
                return
            elif not self.give_up_session(job):
                self._closed_door = bool(self.running)
                return

    def refuse(self, job: Job, reason: str) -> None:
        """The request will not be served; its session ends here."""
        self.refused[job.trace.index] = reason
        self.counters.refused += 1
        job.over = True
        if job.before is not None and job.before in self.kept:
            self.drop_session(job.before)
        job.before = None
        if job.after is not None:
            self._turn_ready(job.after)

    def give_up_session(self, job: Job | None = None) -> bool:
        """Take the row of the session that was kept first, unless ``job`` is its next turn; its history stays known."""
        for turn in self.kept:
            session = turn.request
            if session is not None and session.state is State.KEPT and turn.after is not job:
                self.life.retract(session)
                self.counters.sessions_given_up += 1
                return True
        return False

    def drop_session(self, turn: Job) -> None:
        """End a session that was kept after ``turn``."""
        session = turn.request
        assert session is not None
        if session.state is State.CLOSING:
            return
        del self.kept[turn]
        turn.request = None
        if session.state is State.KEPT:
            self.life.finish(session)
        else:
            self.life.abort(session)

    def leave(self, job: Job) -> None:
        """A running request has no row any more, or only until its last forward is learned."""
        self.running.remove(job)
        self._closed_door = False

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def _hungry(self) -> bool:
        return len(self._waiting) < 2 * self.policy.max_running

    def _session(self, job: Job) -> Request | None:
        """The session that the request continues, if it was kept."""
        before = job.before
        return before.request if job.request is None and before is not None and before in self.kept else None

    def _row_for(self, job: Job) -> Literal["free", "soon", "none"]:
        """Whether there is a row for the request, or one waits for a forward in flight."""
        session = self._session(job)
        if session is not None and session.state is State.KEPT:
            return "free"
        if session is not None and session.state is State.CLOSING:
            return "soon"
        if self.alloc.state.free(ROW):
            return "free"
        return "soon" if self.alloc.state.waiting(ROW) else "none"

    def _room_for(self, job: Job) -> bool:
        """Whether the pools can be expected to hold the running requests and this one, by the policy."""
        state, spec, policy = self.alloc.state, self.alloc.spec, self.policy
        jobs = [*self.running, job] if policy.admission == "whole" else [job]
        goals = np.array([one.length + policy.output_estimate * one.left for one in jobs]).astype(np.int64)
        goals += self.life.reserve
        if policy.admission == "chunk":
            goals = np.minimum(goals, policy.prefill_chunk)
        owners = [one.request or self._session(one) for one in jobs]
        held = state.allocated[[0 if owner is None else owner.row for owner in owners]]
        full, c128 = (
            int(np.maximum(-(-goals // unit) - -(-held // unit), 0).sum())
            for unit in (spec.page_size, spec.group_tokens)
        )
        swa = addressing.pages_for(min(policy.prefill_chunk, job.length) + spec.window, spec.page_size) + len(jobs)
        evictable = self.life.cache.idle if self.life.cache is not None else (0, 0, 0)
        return all(
            need <= state.free(family) + state.waiting(family) + evictable[family]
            for family, need in ((FULL, full), (SWA, swa), (C128, c128))
        )

    def _enter(self, job: Job) -> None:
        counters = self.counters
        if job.request is None:
            job.request = self._begin(job)
        else:
            self.life.readmit(job.request)
            counters.readmitted += 1
            counters.recomputed_tokens += len(job.request) - job.request.cached
        request = job.request
        self._job_of[request] = job
        if request.state is State.QUEUED:
            self.queue(job)
            return
        self.running.append(job)

    def _begin(self, job: Job) -> Request:
        counters, session, before = self.counters, self._session(job), job.before
        job.draw(self.acceptance, self.vocab)
        prompt = prompt_tokens(job.trace, self.vocab)
        counters.prompt_tokens += len(prompt)
        if session is None or before is None:
            request = self.life.admit(job.trace.index, prompt, job.trace.output_length)
            counters.admitted += 1
            counters.hit_tokens += request.cached
            return request
        keep, kept_row = job.shared_with(before), session.state is State.KEPT
        position = self.life.resume(session, prompt[keep:], job.trace.output_length, keep=keep)
        del self.kept[before]
        before.request = None
        counters.resumed += 1
        if kept_row:
            counters.session_tokens += position
        else:
            counters.hit_tokens += position
        return session

    def _turn_ready(self, job: Job) -> None:
        """The turn before is over."""
        if job.arrived and not job.over and job.request is None:
            self.queue(job)

    def _cleared(self, cleanup: Cleanup) -> None:
        self.counters.cleared_rows += 1
