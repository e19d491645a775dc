"""How a request ends or pauses, each exactly once: finish, abort, retract, session keep, resume, rewind."""

from __future__ import annotations

from collections.abc import Iterable

from dsv4_npu.alloc.request import Ending, Request, State, TokenIds, token_array
from dsv4_npu.alloc.request_rows import RequestRows
from dsv4_npu.errors import CapacityError, InputError, OwnershipError


class RequestEnds(RequestRows):
    """The part of the life cycle that releases rows and moves requests back.

    While forwards of a request are not learned, an end only marks it ``CLOSING``; it is carried out when the last one
    is learned, because until then the row may not be handed on. A second end of any kind raises OwnershipError.
    """

    def finish(self, request: Request) -> None:
        """Release everything; the cache takes the complete granules of the history first. Also ends a session."""
        self._expect(request, "finish", State.DECODE, State.ENDED, State.KEPT)
        self._end(request, "finish")

    def abort(self, request: Request) -> None:
        """Release everything, wherever the request is (queued and preallocated ones too); the cache takes nothing."""
        self._expect(request, "abort", State.QUEUED, State.PREFILL, State.DECODE, State.ENDED, State.KEPT)
        if request.state is State.QUEUED:
            request.state = State.ABORTED
            del self.requests[request.rid]
        else:
            self._end(request, "abort")

    def retract(self, request: Request) -> None:
        """Release everything and put the request back into the queue with its outputs; see :meth:`readmit`.

        Outputs of forwards that are not learned yet still count; if they bring the last one, the request finishes.
        A kept session can be retracted too: :meth:`resume` then computes its history again.
        """
        self._expect(request, "retract", State.PREFILL, State.DECODE, State.KEPT)
        self._end(request, "retract")

    def withdraw(self, request: Request) -> None:
        """Put a request back into the queue that was admitted and has planned nothing: its memory found no room."""
        self._expect(request, "withdraw", State.PREFILL)
        if request.unlearned or request.planned != request.cached:
            raise OwnershipError(f"withdraw: request {request.rid!r} is planned to {request.planned}: retract it")
        self._close_row(request)
        request.state = State.QUEUED

    def keep(self, request: Request) -> None:
        """Make the request a session that owns its row between turns.

        Outputs of forwards that are not learned yet still count. Pages behind the last valid position are given back,
        and with them what a stopped run wrote too far.
        """
        self._expect(request, "keep", State.DECODE, State.ENDED)
        self._end(request, "keep")

    def resume(
        self,
        session: Request,
        more_tokens: TokenIds,
        max_new_tokens: int,
        stop_ids: Iterable[int] | None = None,
        keep: int | None = None,
    ) -> int:
        """Begin the next turn of a kept session; returns the position from which it must be computed.

        ``more_tokens`` follow the first ``keep`` tokens of the history (all of it by default). CapacityError when the
        longer history can never fit; nothing is changed then. If the position is 0 and the session is ``QUEUED``
        afterwards, its row was given up and none is free: readmit it later.
        """
        self._expect(session, "resume", State.KEPT, State.QUEUED)
        more = token_array("more_tokens", more_tokens)
        kept = len(session) if keep is None else keep
        if not 0 <= kept <= len(session):
            raise InputError(f"keep = {kept}: 0 to {len(session)} (the history) is allowed")
        self.check(kept + len(more), max_new_tokens)
        session.cut(kept)
        session.append(more)
        session.prompt_len = len(session)
        session.max_new_tokens, session.reason = max_new_tokens, None
        if stop_ids is not None:
            session.stop_ids = frozenset(stop_ids)
        if session.state is State.QUEUED:
            return self._reenter(session)
        # Rows whose look-ahead reaches a token that was replaced are not history any more.
        valid = max(0, kept - self.rules.lookahead)
        position = self._back_to(session, min(self.alloc.committed(session.row), valid, len(session) - 1))
        self._continue_at(session, position)
        return position

    def rewind(self, request: Request, length: int) -> int:
        """Cut a request or a session to its first ``length`` tokens; returns the position that it continues from.

        The position is the committed end if nothing of it was cut and the rows before it are resident, else a multiple
        of the page at which every row that is read before it is proved resident; what lies between it and ``length``
        must be computed again (the request is in ``PREFILL`` afterwards, a session stays kept). Where nothing is
        proved, the row is given up and opened again with the longest cached prefix.
        """
        self._expect(request, "rewind", State.PREFILL, State.DECODE, State.ENDED, State.KEPT)
        if request.unlearned:
            raise OwnershipError(f"rewind: request {request.rid!r} has {request.unlearned} steps that were not learned")
        most = len(request) - (request.state is State.ENDED)
        if not 1 <= length <= most:
            raise InputError(f"length = {length}: 1 to {most} is allowed (an ended request loses its last token)")
        session = request.state is State.KEPT
        request.cut(length)
        request.reason = None
        position = self._back_to(request, min(self.alloc.committed(request.row), length if session else length - 1))
        if request.state is not State.QUEUED:
            if session:
                request.state, request.planned = State.KEPT, position
            else:
                self._continue_at(request, position)
        return position

    # -- inside --------------------------------------------------------------------------------------------------

    def _continue_at(self, request: Request, position: int) -> None:
        if request.state is not State.QUEUED:
            request.state, request.planned = State.PREFILL, position

    def _back_to(self, request: Request, limit: int) -> int:
        """Move the committed end to the largest proved position up to ``limit``, in this row or in a new one."""
        row, alloc, page = request.row, self.alloc, self.rules.page
        if limit == alloc.committed(row) and request.log.resident(limit):
            return limit
        shared, resident = alloc.shared(row), int(alloc.state.swa_start[row]) * page
        low = max(shared, resident + alloc.spec.window - 1 if resident else 0)
        target = self.rules.target(request.log, limit, low)
        if target is None and not shared:
            target = 0
        if target is None:
            self._close_row(request)
            return self._reenter(request)
        alloc.trim(row, target)
        request.log.cut(target)
        return target

    def _reenter(self, request: Request) -> int:
        request.state = State.QUEUED
        try:
            self._enter(request)
        except CapacityError:
            return 0
        return request.cached

    def _end(self, request: Request, ending: Ending) -> None:
        if request.unlearned:
            request.state, request.ending = State.CLOSING, ending
        else:
            self._release(request, ending)

    def _release(self, request: Request, ending: Ending) -> None:
        request.ending = None
        if ending == "retract" and request.reason is not None and request.state is State.CLOSING:
            ending = "finish"
        if ending == "keep":
            self._keep(request)
            return
        if ending == "finish":
            self._insert(request)
        self._close_row(request)
        if ending == "retract":
            request.state = State.QUEUED
            request.retractions += 1
        else:
            request.state = State.FINISHED if ending == "finish" else State.ABORTED
            del self.requests[request.rid]

    def _keep(self, request: Request) -> None:
        valid = min(self.alloc.committed(request.row), len(request))
        self.alloc.trim(request.row, valid)
        request.log.cut(valid)
        self._insert(request)
        self._evict_window(request)
        request.state = State.KEPT
