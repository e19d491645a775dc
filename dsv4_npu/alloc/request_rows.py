"""Rows and room of requests: admission with a cached prefix, allocation after eviction, release."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from dsv4_npu import addressing
from dsv4_npu.alloc.allocator import Cleanup, KVAllocator
from dsv4_npu.alloc.prefix_cache import PrefixCache
from dsv4_npu.alloc.request import Request, State, Step, TokenIds, token_array
from dsv4_npu.alloc.rollback import RollbackRules
from dsv4_npu.alloc.spec import FamilyCounts
from dsv4_npu.alloc.state import C128, FULL, I32, SWA
from dsv4_npu.errors import InputError, OwnershipError


class RequestRows:
    """The part of the life cycle that opens rows, finds pages and closes rows.

    Args:
        alloc: the owner of the pages.
        cache: a prefix cache over the same allocator, or None.
        rules: the rings, for going back.
        reserve: positions kept allocated behind the committed end of a decoding request: twice what one round writes.
            None takes ``2 · verify_width``.
        on_clear: called with each :class:`Cleanup` when a row was closed: what the device must clear before the row
            and the SWA pages are used again.
    """

    def __init__(
        self,
        alloc: KVAllocator,
        cache: PrefixCache | None = None,
        *,
        rules: RollbackRules,
        reserve: int | None = None,
        on_clear: Callable[[Cleanup], None] | None = None,
    ) -> None:
        spec = alloc.spec
        if cache is not None and cache.alloc is not alloc:
            raise InputError("cache: it must be built over the same allocator")
        self.width = spec.verify_width
        self.reserve = 2 * self.width if reserve is None else reserve
        if self.reserve < 2 * self.width:
            raise InputError(f"reserve = {self.reserve}: at least 2 · verify_width = {2 * self.width} is needed")
        if rules.page != spec.page_size or rules.c4.bank != spec.c4_state_owner:
            raise InputError("rules: page and C4 state owner must be those of the allocator")
        if cache is not None and cache.lookahead != rules.lookahead:
            raise InputError(f"cache: lookahead = {cache.lookahead}; {rules.lookahead}, that of the rules, is needed")
        self.alloc, self.cache, self.rules, self.on_clear = alloc, cache, rules, on_clear
        self.requests: dict[Hashable, Request] = {}
        self._steps: dict[int, Step] = {}
        self._numbers = 0

    def check(self, prompt_len: int, max_new_tokens: int) -> None:
        """Refuse (CapacityError with the reason) a request that can never be served, whatever else is released."""
        if prompt_len < 1 or max_new_tokens < 1:
            raise InputError(f"prompt of {prompt_len} tokens, max_new_tokens = {max_new_tokens}: 1 or more is allowed")
        self.alloc.admit_check(prompt_len + max_new_tokens + self.reserve)

    def admit(
        self, rid: Hashable, prompt_tokens: TokenIds, max_new_tokens: int, stop_ids: Iterable[int] = ()
    ) -> Request:
        """Give a request a row and the longest cached prefix (``request.cached`` tokens, never the whole prompt).

        CapacityError when it can never fit, or when no row is free now; nothing is changed then.
        """
        if rid in self.requests:
            raise OwnershipError(f"request {rid!r} is {self.requests[rid].state.value} already")
        prompt = token_array("prompt_tokens", prompt_tokens)
        self.check(len(prompt), max_new_tokens)
        request = Request(rid, max_new_tokens, frozenset(stop_ids), self.rules.log())
        request.append(prompt)
        request.prompt_len = len(prompt)
        self._enter(request)
        self.requests[rid] = request
        return request

    def readmit(self, request: Request) -> None:
        """Give a queued request a row again; prompt and outputs are prefilled, and the last logits give a new token."""
        self._expect(request, "readmit", State.QUEUED)
        self._enter(request)

    def chunk_end(self, request: Request, budget: int) -> int:
        """End of a next prefill chunk of at most ``budget`` tokens.

        It is cut at the last granule of the cache inside, if the chunk would otherwise pass it without saving the C4
        rows that a later request needs to start there.
        """
        start, end = request.planned, min(len(request), request.planned + budget)
        if budget < 1:
            raise InputError(f"budget = {budget}: 1 or more is allowed")
        if self.cache is not None:
            boundary = addressing.floor_to(end, self.cache.granule)
            if boundary > start and not self.rules.tail_saved(start, end, boundary):
                return boundary
        return end

    def make_room(self, need: FamilyCounts) -> bool:
        """Whether ``need`` pages are free, after evicting from the cache what is missing and only if that helps.

        Pages that wait for a forward in flight count as on their way: nothing is evicted for them, and the answer is
        False until the forward is done.
        """
        state = self.alloc.state
        full, swa, c128 = (max(0, need[f] - state.free(f) - state.waiting(f)) for f in (FULL, SWA, C128))
        if self.cache is not None and (full or swa or c128):
            self.cache.evict(FamilyCounts(full, swa, c128))
        return all(need[family] <= state.free(family) for family in (FULL, SWA, C128))

    # -- inside --------------------------------------------------------------------------------------------------

    def _expect(self, request: Request, what: str, *states: State) -> None:
        if self.requests.get(request.rid) is not request and request.state not in (State.FINISHED, State.ABORTED):
            raise OwnershipError(f"{what}: request {request.rid!r} belongs to another life cycle")
        if request.state not in states:
            allowed = ", ".join(state.value for state in states)
            raise OwnershipError(f"{what}: request {request.rid!r} is {request.state.value}: {allowed} is allowed")

    def _enter(self, request: Request) -> None:
        request.row = self.alloc.open(request.rid)
        request.log = self.rules.log()
        request.cached, request.restore, request.discarded = 0, None, 0
        if self.cache is not None:
            match = self.cache.match(request.tokens[: len(request) - 1 + self.rules.lookahead])
            self.cache.lock(request.row, match.node)
            if match.length:
                self.alloc.attach_prefix(request.row, match.full_pages, match.c128_pages, match.length)
                request.log.adopt(match.length)
                request.cached, request.restore = match.length, match.captured
        request.planned = request.cached
        request.state = State.PREFILL

    def _allocate(self, lengths: list[tuple[int, int]]) -> None:
        with self.alloc.transaction() as plan:
            for row, length in lengths:
                plan.extend(row, length)
            if not plan.fits():
                self.make_room(plan.need)
            plan.commit(slots=False)

    def _history(self, request: Request) -> I32:
        """Tokens whose KV is valid history, and those that it looks ahead to: never the overshoot of a stopped run."""
        return request.tokens[: self.alloc.committed(request.row) + self.rules.lookahead]

    def _insert(self, request: Request) -> None:
        """Let the cache take the complete granules of the history."""
        if self.cache is None:
            return
        ahead = max(request.planned, self.alloc.committed(request.row) + request.unlearned * self.width)
        c4 = self.rules.c4

        def kept(end: int) -> bool:
            overwritten = c4.bank == "request" and c4.live(end)[0] + c4.ring < ahead
            return not overwritten and request.log.overlap_kept(end)

        self.cache.insert(self._history(request), request.row, kept)

    def _evict_window(self, request: Request) -> None:
        """Free the SWA pages before the window; only by a committed end that will not be cut any more."""
        self.alloc.evict_window(request.row)
        request.log.forget(int(self.alloc.state.swa_start[request.row]) * self.rules.page)

    def _close_row(self, request: Request) -> None:
        row, request.row = request.row, 0
        cleanup = self.alloc.close(row, request.rid)
        if self.cache is not None:
            self.cache.unlock(row)
        request.cached = request.planned = 0
        request.restore = None
        if self.on_clear is not None:
            self.on_clear(cleanup)
