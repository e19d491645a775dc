"""cases.md 5, 6, 10-13, 17, 19, 24-27, 44-46: inputs that broke such systems, each as its kind (47: test_mutations)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dsv4_npu.alloc import AllocSpec, FamilyCounts, KVAllocator
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.prefix_cache import PrefixCache
from dsv4_npu.alloc.py_ledger import PyLedger
from dsv4_npu.alloc.request import Request, State
from dsv4_npu.alloc.rollback import RollbackRules
from dsv4_npu.alloc.state import C128, FULL, SWA
from dsv4_npu.errors import CapacityError, OwnershipError
from tests.lifecycle.device import WrongReadError
from tests.lifecycle.engine import decode, initial, life_of, prefill, turn
from tests.lifecycle.truth import Shape, Truth, oracle
from tests.lifecycle.world import World

GROUP = 2048


def spec_of(tokens: int = 8192, **changes: object) -> AllocSpec:
    sizes: dict[str, object] = {
        "page_size": 128,
        "c128_page_size": 16,
        "full_pages": tokens // 128,
        "swa_pages": tokens // 128,
        "c128_pages": tokens // 2048 + 4,
        "request_rows": 4,
        "row_width": tokens,
        "verify_width": 4,
    }
    return AllocSpec(**{**sizes, **changes})  # type: ignore[arg-type]


def enter(world: World, tokens: Sequence[int], limit: int) -> Request:
    world.names += 1
    request = world.life.admit(world.names, list(tokens), limit)
    world.live.append(request)
    world.truth[request] = Truth(list(tokens))
    world.enter(request)
    return request


def serve(world: World, request: Request, right: int = 0) -> None:
    """Prefill by the budget of 200 and decode with ``right`` correct drafts a round to the end."""
    while request.state in (State.PREFILL, State.DECODE):
        if request.state is State.PREFILL:
            step = world.life.extend([(request, world.life.chunk_end(request, 200))])
        else:
            step = world.life.decode_plan([request])
        world.steps.append(step)
        world.turn(lambda n: min(right, n - 1))
        world.check()


# 5
@pytest.mark.parametrize("owner", ["swa_page", "request"])
@pytest.mark.parametrize("back", [1, 3, 17, 130])
def test_5_a_wrong_tail_rolled_back_and_replayed(owner: str, back: int) -> None:
    world = World(Shape(owner=owner, width=6))
    request = enter(world, [7] * 240, 40)
    serve(world, request, right=0)
    position = world.life.rewind(request, len(request) - back)
    world.moved_to(request, position, request.row)
    serve(world, request, right=3)
    assert request.outputs == oracle([7] * min(240, request.prompt_len), 40, frozenset())
    world.life.finish(request)
    world.sweep()
    world.shut_down()


# 6
@pytest.mark.parametrize(("owner", "capture"), [("swa_page", True), ("request", True), ("request", False)])
def test_6_a_reused_row_reads_its_own_rows_or_the_prefix(owner: str, capture: bool) -> None:
    world = World(Shape(owner=owner, capture=capture, rows=1))
    first = enter(world, [3] * 300, 9)
    row = first.row
    serve(world, first, right=2)
    world.life.finish(first)
    world.sweep()
    second = enter(world, [3] * 290 + [4] * 80, 9)
    assert second.row == row
    assert second.cached == (0 if owner == "request" and not capture else 256)
    serve(world, second, right=1)
    assert second.outputs == oracle([3] * 290 + [4] * 80, 9, frozenset())


def test_6_without_the_captured_rows_a_read_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "restore", lambda self, request: None)
    with pytest.raises(WrongReadError, match="C4 ring"):
        test_6_a_reused_row_reads_its_own_rows_or_the_prefix("request", True)


def test_at_most_all_but_the_last_prompt_token_are_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    def hit() -> int:
        life = life_of(spec_of(c128_page_size=1))
        first = life.admit("r", [1] * 256, 3)
        prefill(life, first, budget=128)
        life.finish(first)
        return life.admit("r", [1] * 256, 3).cached

    assert hit() == 128
    match = PrefixCache.match
    monkeypatch.setattr(PrefixCache, "match", lambda self, tokens: match(self, np.append(tokens, tokens[-1:])))
    assert hit() == 256, "the cache has the whole prompt: only the rule keeps its last token out"


# 10
def test_10_a_thousand_rounds_leave_nothing() -> None:
    life = life_of(spec_of())
    request = life.admit("r", [1] * 10, 2000)
    prefill(life, request)
    for _ in range(1000):
        decode(life, request, [9])
    assert life.alloc.committed(request.row) == 1010
    assert life.alloc.usage()["FULL"][0] == 8, "a reject frees nothing and takes nothing"
    life.finish(request)
    assert initial(life.alloc)


# 11
@pytest.mark.parametrize("first", ["finish", "abort"])
@pytest.mark.parametrize("second", ["finish", "abort", "retract", "keep"])
def test_11_a_second_end_raises_and_frees_nothing(first: str, second: str) -> None:
    life = life_of(spec_of())
    request, other = life.admit("r", [1] * 10, 5), life.admit("other", [2] * 10, 5)
    prefill(life, request)
    getattr(life, first)(request)
    before = life.alloc.usage()
    with pytest.raises(OwnershipError, match="request 'r' is"):
        getattr(life, second)(request)
    assert life.alloc.usage() == before
    assert other.row == 2
    life.alloc.audit()


# 12
@pytest.mark.parametrize("owner", ["swa_page", "request"])
def test_12_outputs_are_trimmed_and_the_session_goes_on(owner: str) -> None:
    world = World(Shape(owner=owner, width=5, cache=False))
    request = enter(world, [2] * 100, 10)
    for right in (0, 3, 3, 4):
        plan = world.life.extend([(request, 100)]) if right == 0 else world.life.decode_plan([request])
        world.steps.append(plan)
        world.turn(lambda n, right=right: right)
    assert world.alloc.committed(request.row) == 113
    assert (request.state, request.num_outputs, len(request)) == (State.ENDED, 10, 110)
    assert request.outputs == oracle([2] * 100, 10, frozenset())
    world.life.keep(request)
    world.sweep()
    assert world.alloc.committed(request.row) == 110
    assert world.alloc.allocated(request.row) == 128
    world.moved_to(request, world.life.resume(request, [8] * 30, 12), request.row)
    assert world.alloc.committed(request.row) in (0, 110), "floor_page(110), or the end itself where it is proved"
    serve(world, request, right=2)
    history = [2] * 100 + oracle([2] * 100, 10, frozenset()) + [8] * 30
    assert request.outputs == oracle(history, 12, frozenset())


@pytest.mark.parametrize(
    ("run", "cap", "expected", "reason"),
    [
        ([10, 11, 99, 20, 21, 22], 5, [10, 11, 99], "stop"),
        ([10, 11, 99, 20, 21, 22], 3, [10, 11, 99], "stop"),
        ([10, 11, 99, 20, 21, 22], 2, [10, 11], "length"),
        ([10, 11, 12, 13, 14, 99], 5, [10, 11, 12, 13, 14], "length"),
        ([10, 11], 5, [10, 11], None),
    ],
)
def test_a_stop_inside_a_run_wins_over_the_cap(run: list[int], cap: int, expected: list[int], reason: str) -> None:
    life = life_of(spec_of(verify_width=6))
    request = life.admit("r", [1] * 10, cap + 1, stop_ids=(99,))
    prefill(life, request, first_token=7)
    decode(life, request, run)
    assert request.outputs == [7, *expected]
    assert request.reason == reason
    assert life.alloc.committed(request.row) == 10 + len(run)


def test_overshoot_never_enters_a_prefix_key() -> None:
    life = life_of(spec_of(c128_page_size=1))
    request = life.admit("r", [1] * 124, 100, stop_ids=(99,))
    prefill(life, request, first_token=2)
    decode(life, request, [3, 99, 4, 5])
    assert life.alloc.committed(request.row) == 128, "the whole page is committed, but not all of it is history"
    life.finish(request)
    assert life.cache is not None
    assert life.cache.nodes == 0
    assert initial(life.alloc)


# 13
@pytest.mark.parametrize(("owner", "compressed", "expected"), [("swa_page", True, 128), ("request", True, 0)])
def test_13_a_session_continues_from_the_page(owner: str, compressed: bool, expected: int) -> None:
    life = life_of(spec_of(c4_state_owner=owner), cache=False)
    session = session_of_250(life)
    assert life.resume(session, [5] * 20, 5, keep=130) == expected
    assert life.alloc.allocated(session.row) == expected


def test_13_a_pool_without_compressor_keeps_130() -> None:
    spec = spec_of()
    of = RollbackRules.of(spec, True)
    rules = RollbackRules(of.page, of.c4, of.c128, compressed=False)
    life = Lifecycle(KVAllocator(spec, backend="python"), rules=rules)
    session = session_of_250(life)
    assert life.resume(session, [5] * 20, 5, keep=130) == 130
    assert life.alloc.allocated(session.row) == 256


def session_of_250(life: Lifecycle) -> Request:
    request = life.admit("s", [1] * 100, 300)
    prefill(life, request)
    while life.alloc.committed(request.row) < 250:
        decode(life, request, [2])
    life.decode_plan([request])
    assert life.alloc.allocated(request.row) == 384
    life.cancel(next(iter(life._steps.values())))
    life.keep(request)
    assert life.alloc.allocated(request.row) == 256, "the reserve is given back while nobody decodes"
    return request


# 17
@pytest.mark.parametrize("state", ["preallocated", "half prefilled", "retracted", "kept"])
def test_17_an_abort_leaves_nothing(state: str) -> None:
    cleared: list[int] = []
    spec = spec_of()
    alloc = KVAllocator(spec, backend="python")
    life = Lifecycle(
        alloc, PrefixCache(alloc), rules=RollbackRules.of(spec, True), on_clear=lambda c: cleared.append(c.row)
    )
    request = life.admit("r", [1] * 300, 5)
    row = request.row
    if state == "preallocated":
        life.preallocate(request, 300)
        assert alloc.usage()["FULL"][0] == 3
    elif state == "half prefilled":
        turn(life, life.extend([(request, 200)]), {})
    else:
        prefill(life, request)
        (life.retract if state == "retracted" else life.keep)(request)
    life.abort(request)
    assert request.state is State.ABORTED
    assert initial(alloc)
    assert cleared == [row], "the banks of the row are to be cleared, once"


# 19
def replace_a_prefix() -> None:
    alloc = KVAllocator(spec_of(16384, c128_pages=8), backend="python")
    filler, row, other = (alloc.open(name) for name in ("filler", "row", "other"))
    with alloc.transaction() as plan:
        plan.extend(filler, 2 * GROUP)
        plan.commit()
    with alloc.transaction() as plan:
        plan.extend(row, 2 * GROUP)
        plan.commit()
    with alloc.transaction() as plan:
        plan.extend(other, GROUP)
        plan.commit()
    gone, kept = alloc.state.c128_table[row, :2].tolist()
    new = int(alloc.state.c128_table[other, 0])
    alloc.replace_c128_prefix(row, [kept, new])
    assert alloc.state.c128_table[row, :2].tolist() == [kept, new]
    assert [int(alloc.state.c128_count[page]) for page in (gone, kept, new)] == [0, 1, 2]
    alloc.audit()


def test_19_a_prefix_is_retained_before_the_old_one_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_a_prefix()

    def release_first(self: PyLedger, row: int, pages: np.ndarray) -> None:
        old = self.state.c128_table[row, : len(pages)].astype(np.int64)
        self._release(old)
        for page in pages.tolist():
            self.state.c128_count[page] += 1
        self._put_sidecar(row, np.arange(len(pages)), pages)

    monkeypatch.setattr(PyLedger, "_replace_c128", release_first)
    with pytest.raises(Exception, match="C128 page"):
        replace_a_prefix()


# 24
@pytest.mark.parametrize(("same", "shared"), [(2047, 0), (2048, 1), (4095, 1), (4096, 2)])
def test_24_only_complete_c128_pages_are_shared(same: int, shared: int) -> None:
    life = life_of(spec_of(16384))
    first = life.admit("a", [1] * same + [2] * 50, 5)
    prefill(life, first, budget=2048)
    life.finish(first)
    second = life.admit("b", [1] * same + [3] * 50, 5)
    assert second.cached == shared * GROUP
    assert np.count_nonzero(life.alloc.state.c128_table[second.row]) == shared


def test_24_entries_of_5000_tokens() -> None:
    life = life_of(spec_of())
    request = life.admit("a", [1] * 5000, 5)
    loc = life.extend([(request, 5000)]).loc
    assert len(loc.out_c128) == 39
    assert len(loc.out_c4) == 1250
    assert np.count_nonzero(life.alloc.state.c128_table[request.row]) == 3


# 25
def test_25_a_match_adopts_what_c128_backs() -> None:
    life = life_of(spec_of(131072 + GROUP, row_width=131072 + GROUP))
    tokens = [1] * 117632
    first = life.admit("a", tokens, 5)
    prefill(life, first, budget=GROUP)
    life.finish(first)
    assert life.cache is not None
    assert life.cache.match(first.tokens[:117632]).length == 57 * GROUP
    assert life.cache.evict(FamilyCounts(0, 0, 10))
    second = life.admit("b", tokens, 5)
    assert second.cached == 96256 == 47 * GROUP
    life.alloc.audit()


# 26
def test_26_the_room_in_a_partial_page_counts() -> None:
    life = life_of(spec_of(c128_pages=1))
    request = life.admit("a", [1] * 128, 1900)
    prefill(life, request)
    assert life.alloc.state.free(C128) == 0
    while life.alloc.committed(request.row) < 2024:
        decode(life, request, [1, 1, 1, 1])
    assert life.make_room(FamilyCounts(0, 0, 0))
    with pytest.raises(CapacityError, match="needs 2 C128 pages: 1 exist"):
        life.check(2048 + 1, 2100)


# 27
def test_27_nothing_is_evicted_when_it_cannot_help() -> None:
    life = life_of(spec_of(32768, c128_pages=3))
    cached = life.admit("cached", [1] * GROUP, 1)
    prefill(life, cached)
    life.finish(cached)
    running = life.admit("running", [2] * 3000, 5)
    prefill(life, running)
    assert life.cache is not None
    assert (life.alloc.state.free(C128), life.cache.evictable.c128) == (0, 1)
    late = life.admit("late", [3] * 5000, 5)
    with pytest.raises(CapacityError, match="C128 pages: need 3, free 0"):
        life.extend([(late, 5000)])
    assert life.cache.nodes == 2, "the unread leaf is still there"
    assert not life.cache.evict(FamilyCounts(0, 0, 2))
    life.extend([(late, 200)])
    assert life.cache.nodes == 1, "where it helps it is evicted"
    life.alloc.audit()


# 44
def test_44_a_tenth_of_swa_serves_a_long_prompt_and_many_short_ones() -> None:
    full = (100_000 + 64 * 200) // 128 + 80
    spec = AllocSpec(128, 16, full, full // 10, full // 16 + 70, 65, 101_000, verify_width=4)
    life = life_of(spec)
    waiting = [life.admit(0, [1] * 100_000, 12)]
    waiting += [life.admit(i, [i % 50 + 2] * 200, 12) for i in range(1, 65)]
    served: list[Request] = []
    rounds = 0
    while waiting:
        rounds += 1
        assert rounds < 5000
        for request in list(waiting):
            if request.state is State.PREFILL:
                end = life.chunk_end(request, 2048)
                try:
                    step = life.extend([(request, end)])
                except CapacityError:
                    continue
                turn(life, step, {request: [1] if end == len(request) else []})
            elif request.state is State.DECODE:
                try:
                    decode(life, request, [1, 2])
                except CapacityError:
                    continue
            if request.state is State.ENDED:
                life.finish(request)
                served.append(request)
                waiting.remove(request)
                continue
            committed = life.alloc.committed(request.row)
            cursor = int(life.alloc.state.evict_cursor[request.row]) * 128
            assert cursor <= max(0, committed - 128) // 128 * 128
        if rounds % 10 == 0:
            life.alloc.audit(deep=False)
    assert len(served) == 65
    life.alloc.audit()
    assert life.cache is not None
    life.cache.clear()
    assert initial(life.alloc)


# 45
def test_45_an_evicted_page_is_freed_on_the_full_side_only() -> None:
    life = life_of(spec_of(), cache=False)
    request = life.admit("r", [1] * 1000, 5)
    prefill(life, request, budget=256)
    used = life.alloc.usage()
    assert (used["FULL"][0], used["SWA"][0]) == (8, 2)
    life.finish(request)
    life.alloc.audit()
    assert initial(life.alloc)
    assert sorted(life.alloc.state.free_list[SWA][: life.alloc.state.free(SWA)].tolist()) == list(range(1, 65))
    assert len(set(life.alloc.state.free_list[FULL].tolist())) == 64


# 46
def test_46_a_prefix_without_its_window_is_shortened_or_refused() -> None:
    life = life_of(spec_of(16384))
    cache = life.cache
    assert cache is not None
    first = life.admit("a", [1] * (3 * GROUP + 10), 3)
    prefill(life, first, budget=GROUP)
    life.finish(first)
    assert life.alloc.usage()["SWA"][0] == 3, "one window per granule"
    third = cache.match(first.tokens).node
    assert third.end == 3 * GROUP
    second = third.parent
    assert second is not None
    life.alloc.free_swa(second.full_pages)
    second.swa = 0
    assert cache.match(first.tokens).length == 3 * GROUP, "only the window before the end counts"
    assert cache.match(first.tokens[: 3 * GROUP - 1]).length == GROUP, "shortened past the granule without a window"
