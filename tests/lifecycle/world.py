"""An engine over the life cycle and the tag device: operations in any legal order, everything checked after each."""

from __future__ import annotations

from collections.abc import Callable

from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.prefix_cache import PrefixCache
from dsv4_npu.alloc.request import Request, State, Step
from dsv4_npu.alloc.rollback import RollbackRules
from dsv4_npu.alloc.state import C128, FULL, ROW, SWA
from dsv4_npu.errors import CapacityError
from tests.lifecycle.checks import Checks
from tests.lifecycle.device import VOCABULARY, TagDevice, chain, next_token
from tests.lifecycle.truth import Shape, Truth, oracle

STOP = 5


class World(Checks):
    """The engine. Every operation takes ``draw(n)``, an integer in ``[0, n)``, and returns whether it did something."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        speculative = shape.width > 1
        spec = AllocSpec(
            128, shape.c128_page, shape.full, shape.swa, shape.c128, shape.rows, shape.row_width,
            window=128, verify_width=shape.width, c4_state_owner=shape.owner,  # type: ignore[arg-type]
        )  # fmt: skip
        self.alloc = KVAllocator(spec, backend=shape.backend)  # type: ignore[arg-type]
        self.device = TagDevice(self.alloc, speculative)
        capture = self.device.capture if shape.owner == "request" and shape.capture else None
        self.cache = PrefixCache(self.alloc, capture=capture) if shape.cache else None
        self.life = Lifecycle(
            self.alloc, self.cache, rules=RollbackRules.of(spec, speculative), on_clear=self.device.clear
        )
        self.truth: dict[Request, Truth] = {}
        self.live: list[Request] = []
        self.steps: list[Step] = []
        self.in_flight: dict[int, tuple[set[int], set[int], set[int], set[int]]] = {}
        self.names = 0
        self.hits = self.finished = self.refused = self.moved = 0
        self.previous: tuple[set[int], ...] = self._used()

    # -- choosing ------------------------------------------------------------------------------------------------

    def pick(self, draw: Callable[[int], int], *states: State, idle: bool = False) -> Request | None:
        found = [r for r in self.live if r.state in states and not (idle and r.unlearned)]
        return found[draw(len(found))] if found else None

    def prompt(self, draw: Callable[[int], int]) -> list[int]:
        base = draw(3)
        shared = [(i * (base + 3)) % VOCABULARY for i in range((0, 60, 128, 256, 300, 384, 512)[draw(7)])]
        if shared and draw(3) == 0:
            return shared
        return shared + [draw(VOCABULARY) for _ in range(1 + draw(5))] + [base] * draw(130)

    # -- operations ----------------------------------------------------------------------------------------------

    def admit(self, draw: Callable[[int], int]) -> bool:
        prompt, limit = self.prompt(draw), (1, 3, 9, 60)[draw(4)]
        self.names += 1
        try:
            request = self.life.admit(self.names, prompt, limit, stop_ids=(STOP,))
        except CapacityError:
            self.refused += 1
            return False
        self.live.append(request)
        self.truth[request] = Truth(list(prompt))
        self.enter(request)
        return True

    def enter(self, request: Request) -> None:
        """The request has a new row, maybe with a prefix."""
        self.hits += request.cached > 0
        if request.state is State.PREFILL:
            assert request.cached < len(request)
            self.truth[request].length = request.cached
            self.restore(request)

    def restore(self, request: Request) -> None:
        if request.restore is not None:
            self.flush()
            self.device.restore(request.row, request.cached, request.restore)

    def prefill(self, draw: Callable[[int], int]) -> bool:
        ready = [r for r in self.live if r.state is State.PREFILL and r.unlearned < 2 and r.planned < len(r)]
        chunks = []
        for request in ready[: 1 + draw(2)]:
            budget = (1, 7, 100, 128, 200, 600)[draw(6)]
            exact = min(len(request), request.planned + budget)
            chunks.append((request, exact if draw(3) == 0 else self.life.chunk_end(request, budget)))
        return bool(chunks) and self.plan(lambda: self.life.extend(chunks))

    def preallocate(self, draw: Callable[[int], int]) -> bool:
        request = self.pick(draw, State.PREFILL)
        if request is None:
            return False
        try:
            self.life.preallocate(request, 1 + draw(500))
        except CapacityError:
            return False
        return True

    def decode(self, draw: Callable[[int], int]) -> bool:
        ready = [r for r in self.live if r.state is State.DECODE and r.unlearned < 2]
        first = draw(len(ready)) if ready else 0
        some = ready[first : first + 1 + draw(4)]
        return bool(some) and self.plan(lambda: self.life.decode_plan(some, padded_to=draw(6)))

    def plan(self, make: Callable[[], Step]) -> bool:
        before = self._tables()
        try:
            self.steps.append(make())
        except CapacityError:
            assert self._tables() == before or self.cache is not None
            return False
        return True

    def launch(self, draw: Callable[[int], int]) -> bool:
        ready = [s for s in self.steps if not s.launched]
        if not ready:
            return False
        step = ready[0]
        self.device.clear_swa_banks(self.alloc.drain_freed_swa())
        self.flush()
        self.life.launch(step)
        self.in_flight[step.number] = self._reads(step)
        for request, start, end in zip(step.requests, step.starts.tolist(), step.ends.tolist(), strict=True):
            truth = self.truth[request]
            if step.kind == "prefill":
                tokens = truth.tokens[:end]
                self.device.forward(request.row, truth.tag_array(tokens), start, end, end, f"request {request.rid}")
                truth.length = end
                truth.results[step.number] = [next_token(truth.tags[end - 1])] if end == len(truth.tokens) else []
                truth.tokens += truth.results[step.number]
            else:
                truth.results[step.number] = self.verify(request, truth, draw(self.shape.width))
        return True

    def verify(self, request: Request, truth: Truth, right: int) -> list[int]:
        start, width = truth.length, self.shape.width
        assert start == len(truth.tokens) - 1
        run: list[int] = []
        tag = int(truth.tag_array(truth.tokens)[-1])
        for _ in range(right + 1):
            run.append(next_token(tag))
            tag = chain(tag, run[-1])
        guesses = run[:right] + [(token + 1) % VOCABULARY for token in run[right:]] + [1] * width
        drafted = truth.tokens + guesses[: width - 1]
        known, keep = len(truth.tags), start + right + 1
        tags = truth.tag_array(drafted)
        del truth.tags[max(known, keep) :]
        self.device.forward(request.row, tags, start, start + width, keep, f"request {request.rid}")
        self.device.clear_rejected(request.row, start, right + 1, width)
        del truth.tags[keep:]
        truth.tokens += run
        truth.length = keep
        return run

    def turn(self, draw: Callable[[int], int]) -> bool:
        """A forward without overlap."""
        return [self.launch(draw), self.done(draw), self.learn(draw)] != [False] * 3

    def pipeline(self, draw: Callable[[int], int]) -> bool:
        """Decodes with overlap: each one is launched before the one before it is learned."""
        request = self.pick(draw, State.DECODE, idle=True)
        if request is None or any(not step.launched for step in self.steps):
            return False
        for _ in range(2 + draw(12)):
            if request.state is not State.DECODE or not self.plan(lambda: self.life.decode_plan([request])):
                break
            self.check()
            self.launch(draw)
            if request.unlearned == 2:
                mine = next(step for step in self.steps if request in step.requests)
                while mine in self.steps:
                    self.done(draw)
                    self.learn(draw)
                    self.check()
                self.prefill(draw)
                self.check()
                if not self.steps[-1].launched and self.steps[-1].kind == "prefill":
                    self.launch(draw)
        return True

    def done(self, draw: Callable[[int], int]) -> bool:
        ready = [s for s in self.steps if s.launched and not s.done]
        if not ready:
            return False
        self.life.done(ready[0])
        return True

    def learn(self, draw: Callable[[int], int]) -> bool:
        if not self.steps or not self.steps[0].done:
            return False
        step = self.steps.pop(0)
        closing = {r for r in step.requests if r.state is State.CLOSING or r.reason is not None}
        tokens = {r: self.truth[r].results.pop(step.number) for r in step.requests}
        self.in_flight.pop(step.number)
        ended = self.life.learn(step, tokens)
        assert closing.isdisjoint(ended)
        assert all(request.state is State.ENDED for request in ended)
        self.sweep()
        return True

    def cancel(self, draw: Callable[[int], int]) -> bool:
        if not self.steps or self.steps[-1].launched:
            return False
        self.life.cancel(self.steps.pop())
        self.sweep()
        return True

    def end(self, draw: Callable[[int], int]) -> bool:
        kinds = {
            "finish": (State.ENDED, State.KEPT),
            "keep": (State.ENDED, State.DECODE),
            "retract": (State.PREFILL, State.DECODE, State.KEPT),
            "abort": (State.QUEUED, State.PREFILL, State.DECODE, State.ENDED, State.KEPT),
        }
        kind = ("finish", "finish", "finish", "keep", "keep", "retract", "abort")[draw(7)]
        request = self.pick(draw, *kinds[kind])
        if request is None:
            return False
        getattr(self.life, kind)(request)
        self.sweep()
        return True

    def sweep(self) -> None:
        """Look at requests that reached an end."""
        for request in list(self.live):
            if request.state in (State.FINISHED, State.ABORTED):
                self.live.remove(request)
                assert request.row == 0
                if request.reason is not None and request.state is State.FINISHED:
                    self.finished += 1
                    prompt = request.tokens[: request.prompt_len].tolist()
                    assert request.outputs == oracle(prompt, request.max_new_tokens, request.stop_ids)
            elif request.state in (State.QUEUED, State.KEPT) and not request.unlearned:
                truth = self.truth[request]
                truth.tokens = request.tokens.tolist()
                del truth.tags[len(truth.tokens) :]
                truth.length = self.alloc.committed(request.row) if request.row else 0

    def readmit(self, draw: Callable[[int], int]) -> bool:
        request = self.pick(draw, State.QUEUED)
        if request is None or request.reason is not None:
            return False
        try:
            self.life.readmit(request)
        except CapacityError:
            return False
        self.enter(request)
        return True

    def resume(self, draw: Callable[[int], int]) -> bool:
        session = self.pick(draw, State.KEPT, State.QUEUED)
        if session is None:
            return False
        kept = len(session) if draw(3) else draw(len(session) + 1)
        more = [draw(VOCABULARY) for _ in range(1 + draw(40))]
        row = session.row
        try:
            position = self.life.resume(session, more, 1 + draw(30), keep=kept)
        except CapacityError:
            return False
        self.moved_to(session, position, row)
        return True

    def rewind(self, draw: Callable[[int], int]) -> bool:
        request = self.pick(draw, State.PREFILL, State.DECODE, State.ENDED, State.KEPT, idle=True)
        if request is None:
            return False
        back = (draw(4), draw(140), draw(len(request)))[draw(3)] + (request.state is State.ENDED)
        row = request.row
        if back >= len(request):
            return False
        position = self.life.rewind(request, len(request) - back)
        self.moved_to(request, position, row)
        return True

    def moved_to(self, request: Request, position: int, row: int) -> None:
        truth = self.truth[request]
        truth.tokens, truth.length = request.tokens.tolist(), position
        del truth.tags[:]
        self.moved += 1
        if request.state is not State.QUEUED:
            assert position == self.alloc.committed(request.row) == request.planned
            assert position < len(request) or request.state is State.KEPT
            if request.row != row or (request.cached and position == request.cached):
                self.restore(request)

    def evict(self, draw: Callable[[int], int]) -> bool:
        if self.cache is None:
            return False
        there = self.cache.evictable
        need = type(there)(*(draw(count + 2) for count in there))
        free = [self.alloc.state.free(f) + self.alloc.state.waiting(f) for f in (FULL, SWA, C128)]
        possible = all(wanted <= count for wanted, count in zip(need, there, strict=True))
        assert self.cache.evict(need) == possible
        now = [self.alloc.state.free(f) + self.alloc.state.waiting(f) for f in (FULL, SWA, C128)]
        gained = [after - before for after, before in zip(now, free, strict=True)]
        assert all(got >= wanted for got, wanted in zip(gained, need, strict=True)) if possible else not any(gained)
        return True

    OPERATIONS = (
        *["admit"] * 2, *["prefill"] * 4, *["decode"] * 6, *["launch"] * 2, *["done"] * 2, *["learn"] * 2,
        *["turn"] * 8, *["pipeline"] * 2, *["end"] * 2, "readmit", "resume", "rewind", "evict", "cancel", "preallocate",
    )  # fmt: skip

    def step(self, draw: Callable[[int], int]) -> str:
        name = self.OPERATIONS[draw(len(self.OPERATIONS))]
        self.perform(name, draw)
        return name

    def perform(self, name: str, draw: Callable[[int], int]) -> bool:
        did = bool(getattr(self, name)(draw))
        self.check()
        return did

    def shut_down(self) -> None:
        """Everything ends, and every pool is back at its initial count."""

        def none(_: int) -> int:
            return 0

        while self.steps:
            if not any(self.perform(name, none) for name in ("launch", "done", "learn")):
                raise AssertionError("steps are left that cannot go on")
        for request in list(self.live):
            self.life.abort(request)
        self.live.clear()
        if self.cache is not None:
            self.cache.clear()
            assert self.cache.nodes == 0
        self.check()
        for family in (FULL, SWA, C128, ROW):
            assert self.alloc.state.free(family) == self.alloc.state.total(family)
        assert not self.alloc.state.tables.any()
