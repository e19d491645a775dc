"""Requests of a trace as the scheduler sees them, and which of them are turns of one conversation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dsv4_npu.alloc.request import Request
from dsv4_npu.replay.acceptance import SimulatedAcceptance
from dsv4_npu.replay.trace import BLOCK, TraceRequest, output_tokens

Sessions = Literal["off", "field", "infer"]
#: Complete blocks that two prompts must share at least before the later one is taken for a next turn.
LEAST_SHARED = 2


@dataclass(eq=False)
class Job:
    """A request of the trace on its way through the replay.

    ``before``, ``after``: the previous and the next turn of its session. ``request``: its life in the allocator; turns
    of a session share one. ``over``: it was served or refused. ``outputs``: the token ids that it will produce, with a
    margin for runs that overshoot; ``accepts``: the accepted length of a verify that follows that many outputs.
    """

    trace: TraceRequest
    before: Job | None = None
    after: Job | None = None
    request: Request | None = None
    arrived: bool = False
    over: bool = False
    outputs: list[int] = field(default_factory=list, repr=False)
    accepts: list[int] = field(default_factory=list, repr=False)

    @property
    def length(self) -> int:
        """Tokens known now."""
        return self.trace.input_length if self.request is None else len(self.request)

    @property
    def left(self) -> int:
        """Tokens that it may still produce."""
        return self.trace.output_length - (0 if self.request is None else self.request.num_outputs)

    def draw(self, acceptance: SimulatedAcceptance, vocab: int) -> None:
        """Fix the tokens that the request will produce, and what each verify accepts of them."""
        count = self.trace.output_length
        self.outputs = output_tokens(self.trace, 0, count + acceptance.width, vocab).tolist()
        positions = self.trace.input_length + np.arange(count)
        self.accepts = acceptance.lengths(np.full(count, self.trace.index), positions).tolist()

    def shared_with(self, earlier: Job) -> int:
        """Leading tokens of the prompt that are those of an earlier prompt; at least one token is left to compute."""
        mine, theirs = self.trace.hash_ids, earlier.trace.hash_ids
        least = min(len(mine), len(theirs))
        differ = np.flatnonzero(mine[:least] != theirs[:least])
        blocks = int(differ[0]) if len(differ) else least
        return min(blocks * BLOCK, earlier.trace.input_length, self.trace.input_length - 1)


def make_jobs(trace: Sequence[TraceRequest], sessions: Sessions) -> list[Job]:
    """One job per request, in arrival order, linked into sessions.

    ``field`` links requests of equal ``session_id``. ``infer`` also takes a request without one for the next turn of
    the latest request whose complete blocks are the beginning of its own: the trace does not say it, so this is a
    guess, good enough to exercise sessions.
    """
    jobs = [Job(request) for request in trace]
    if sessions == "off":
        return jobs
    last: dict[Hashable, Job] = {}
    open_ends: dict[tuple[int, int], Job] = {}
    for job in jobs:
        session = job.trace.session_id
        before = last.get(("id", session)) if session is not None else None
        if session is None and sessions == "infer":
            before = _continued(job, open_ends)
        if before is not None:
            before.after, job.before = job, before
        if session is not None:
            last["id", session] = job
        elif sessions == "infer":
            blocks = job.trace.input_length // BLOCK
            if blocks >= LEAST_SHARED:
                open_ends[blocks, int(job.trace.hash_ids[blocks - 1])] = job
    return jobs


def _continued(job: Job, open_ends: dict[tuple[int, int], Job]) -> Job | None:
    ids = job.trace.hash_ids
    for blocks in range(len(ids) - 1, LEAST_SHARED - 1, -1):
        found = open_ends.get((blocks, int(ids[blocks - 1])))
        if found is not None and np.array_equal(found.trace.hash_ids[:blocks], ids[:blocks]):
            del open_ends[blocks, int(ids[blocks - 1])]
            return found
    return None
