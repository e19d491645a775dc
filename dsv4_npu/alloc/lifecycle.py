"""The life of requests on the allocator: admit, prefill, decode, learn, and every way to end, each exactly once.

An engine drives it with the events of a forward: plan, launch, done, learn. It holds no payload and reads no device.
Between launch and learn the committed length is the old one; a row is given back only when its last forward is
learned, and pages freed while a forward is in flight wait until it is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from dsv4_npu.alloc.request import Request, State, Step
from dsv4_npu.alloc.request_ends import RequestEnds
from dsv4_npu.alloc.state import I64
from dsv4_npu.alloc.transaction import OutCacheLoc
from dsv4_npu.errors import CapacityError, InputError, OwnershipError

#: Steps of one request that may be planned and not learned: the decode reserve covers two rounds.
MAX_UNLEARNED = 2


class Lifecycle(RequestEnds):
    """All requests on one allocator; arguments as in :class:`RequestRows`.

    A step goes through ``extend`` or ``decode_plan``, ``launch``, ``done``, ``learn``; an engine without overlap calls
    them one after another.
    """

    # -- plans ---------------------------------------------------------------------------------------------------

    def extend(self, chunks: Sequence[tuple[Request, int]]) -> Step:
        """Plan one prefill chunk ``[planned, new_len)`` per request in one transaction, all or none.

        CapacityError when the pages are not there, after the cache gave what it can; see :meth:`make_room`.
        """
        for request, new_len in chunks:
            self._expect(request, "extend", State.PREFILL)
            if not request.planned < new_len <= len(request):
                raise InputError(
                    f"request {request.rid!r}: chunk to {new_len}: {request.planned + 1} to {len(request)} is allowed"
                )
            self._check_unlearned(request)
        self._allocate([(request.row, new_len) for request, new_len in chunks])
        starts = np.array([request.planned for request, _ in chunks], np.int64)
        ends = np.array([new_len for _, new_len in chunks], np.int64)
        loc = _join([self.alloc.slots(r.row, r.planned, new_len) for r, new_len in chunks])
        for request, new_len in chunks:
            request.planned = new_len
        rows = np.array([request.row for request, _ in chunks], np.int64)
        return self._planned("prefill", [request for request, _ in chunks], rows, starts, ends, loc)

    def preallocate(self, request: Request, length: int) -> None:
        """Give a request slots for ``length`` positions before anything is computed (a transfer will fill them)."""
        self._expect(request, "preallocate", State.PREFILL)
        self._allocate([(request.row, length)])

    def decode_plan(self, requests: Sequence[Request], padded_to: int = 0) -> Step:
        """Plan one decode (verify) of ``verify_width`` rows per request; pages for two rounds, all requests or none.

        The batch is padded with row 0 to ``padded_to`` rows. ``step.loc`` are the slots of the positions from the
        committed length on: what the forward writes if every earlier step of the requests was learned. Otherwise the
        device finds them from its own lengths in the mirrors; the pages are there.
        """
        if len(set(requests)) != len(requests):
            raise InputError("requests: each request is decoded once in a batch")
        for request in requests:
            if request.state is not State.DECODE or request.unlearned:
                self._expect(request, "decode", State.DECODE)
                self._check_unlearned(request)
        live = [request.row for request in requests]
        rows = np.array(live + [0] * (padded_to - len(live)), np.int64)
        try:
            loc = self.alloc.decode_step(rows, self.reserve)
        except CapacityError:
            with self.alloc.transaction() as plan:
                for row in live:
                    plan.reserve_decode(row, self.reserve)
                if not self.make_room(plan.need):
                    raise
            loc = self.alloc.decode_step(rows, self.reserve)
        starts = self.alloc.state.committed[rows[: len(live)]]
        return self._planned("decode", list(requests), rows, starts, starts + self.width, loc)

    # -- events --------------------------------------------------------------------------------------------------

    def launch(self, step: Step) -> None:
        """The forward of a planned step was enqueued; from now on freed pages wait for it."""
        self._check_step(step)
        if step.launched:
            raise OwnershipError(f"step {step.number} was launched already")
        self._check_order(step, [other for other in self._before(step) if not other.launched], "is to be launched")
        step.epoch = self.alloc.launch()
        step.launched = True

    def done(self, step: Step) -> None:
        """The forward of a launched step has run on the device."""
        self._check_step(step)
        if not step.launched or step.done:
            raise OwnershipError(f"step {step.number} is {'done already' if step.done else 'not launched'}")
        self.alloc.done(step.epoch)
        step.done = True

    def cancel(self, step: Step) -> None:
        """Forget a planned step that was not launched; the newest one of its requests. Pages stay for the next plan."""
        self._check_step(step)
        if step.launched:
            raise OwnershipError(f"step {step.number} was launched: it must be learned")
        after = [other for other in self._steps.values() if other.number > step.number]
        self._check_order(step, after, "was planned after it and is to be cancelled")
        del self._steps[step.number]
        for request, start in zip(step.requests, step.starts.tolist(), strict=True):
            request.unlearned -= 1
            if step.kind == "prefill":
                request.planned = start
        self._settle(step.requests)

    def learn(self, step: Step, tokens: Mapping[Request, Sequence[int]]) -> list[Request]:
        """The host has the outcome of a done step; steps of a request are learned in their order.

        ``tokens`` per request: of a decode the accepted run with its bonus, ``1..verify_width`` tokens; of a prefill
        ``[token]`` when the chunk ended the known tokens, else nothing. Requests that ended before are ignored, and may
        be left out. Returns those that are ``ENDED`` now: finish, keep or abort them.
        """
        runs = self._outcome(step, tokens)
        del self._steps[step.number]
        rows = step.rows[: len(step.requests)]
        committed = self.alloc.state.committed[rows].tolist()
        if step.kind == "prefill":
            lengths = [now if run is None else end for run, now, end in zip(runs, committed, step.ends, strict=True)]
        else:
            lengths = [now if run is None else now + len(run) for run, now in zip(runs, committed, strict=True)]
        self.alloc.commit_batch(rows, np.array(lengths, np.int64))
        for request, run, start, length in zip(step.requests, runs, committed, lengths, strict=True):
            request.unlearned -= 1
            if run is None:
                request.discarded += 1
                request.log.overrun(start, start + request.discarded * self.width)
                continue
            request.discarded = 0
            if step.kind == "prefill":
                request.log.ran(start, length)
            else:
                request.log.decoded(start, start + self.width, length)
            if run:
                request.take_outputs(run)
                if request.ending is None:
                    request.state = State.DECODE if request.reason is None else State.ENDED
        self._follow(step.requests, rows)
        self._settle(step.requests)
        return [r for r, run in zip(step.requests, runs, strict=True) if run is not None and r.state is State.ENDED]

    # -- inside --------------------------------------------------------------------------------------------------

    def _planned(
        self,
        kind: Literal["prefill", "decode"],
        requests: list[Request],
        rows: I64,
        starts: I64,
        ends: I64,
        loc: OutCacheLoc,
    ) -> Step:
        self._numbers += 1
        step = Step(self._numbers, kind, requests, rows, starts, ends, loc)
        self._steps[step.number] = step
        for request in requests:
            request.unlearned += 1
        return step

    def _follow(self, requests: Sequence[Request], rows: I64) -> None:
        """Where a granule was completed or the window left a page: the cache takes, then the window moves on."""
        state, spec = self.alloc.state, self.alloc.spec
        committed = state.committed[rows]
        due = (committed - max(spec.window, self.width)) // spec.page_size > state.evict_cursor[rows]
        if self.cache is not None:
            granule = self.cache.granule
            due |= committed // granule * granule > state.shared_cols[rows] * spec.page_size
        for index in np.flatnonzero(due).tolist():
            request = requests[index]
            if request.reason is None and request.ending is None:
                self._insert(request)
                self._evict_window(request)

    def _settle(self, requests: Sequence[Request]) -> None:
        """Carry out the ends that waited for their last forward."""
        for request in requests:
            if request.state is State.CLOSING and not request.unlearned:
                assert request.ending is not None
                self._release(request, request.ending)

    def _check_unlearned(self, request: Request) -> None:
        if request.unlearned >= MAX_UNLEARNED:
            raise OwnershipError(
                f"request {request.rid!r} has {request.unlearned} steps that were not learned: the reserve covers "
                f"{MAX_UNLEARNED}"
            )

    def _check_step(self, step: Step) -> None:
        if self._steps.get(step.number) is not step:
            raise OwnershipError(f"step {step.number} is not planned here, or it was learned or cancelled")

    def _before(self, step: Step) -> list[Step]:
        return [other for other in self._steps.values() if other.number < step.number]

    def _check_order(self, step: Step, others: Sequence[Step], what: str) -> None:
        """Steps of one request go in their order."""
        for other in others:
            shared = set(other.requests) & set(step.requests)
            if shared:
                name = next(iter(shared)).rid
                raise OwnershipError(f"step {step.number}: step {other.number} of request {name!r} {what} first")

    def _outcome(self, step: Step, tokens: Mapping[Request, Sequence[int]]) -> list[Sequence[int] | None]:
        """The checked outcome of each request of the step; None where nobody wants it any more."""
        self._check_step(step)
        if not step.done:
            raise OwnershipError(f"step {step.number} is not done: its outcome cannot be known")
        self._check_order(step, self._before(step), "is to be learned")
        runs: list[Sequence[int] | None] = []
        low, high = 1, self.width
        for request, end in zip(step.requests, step.ends.tolist(), strict=True):
            if not _learning(request):
                runs.append(None)
                continue
            run = tokens.get(request, ())
            if step.kind == "prefill":
                low = high = int(end == len(request))
            if not low <= len(run) <= high:
                raise InputError(f"request {request.rid!r}: {len(run)} tokens learned, {low} to {high} are allowed")
            runs.append(run)
        return runs


def _learning(request: Request) -> bool:
    """Whether the outcome of a forward still counts for a request."""
    return request.reason is None and (request.ending is None or request.ending in ("retract", "keep"))


def _join(parts: Sequence[OutCacheLoc]) -> OutCacheLoc:
    def one(family: int) -> I64:
        return np.concatenate([np.zeros(0, np.int64), *(part[family] for part in parts)])

    return OutCacheLoc(one(0), one(1), one(2), one(3))
