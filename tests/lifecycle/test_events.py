"""The event model: plan, launch, done, learn; what is refused, and what holds between them."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4_npu.alloc import AllocSpec, FamilyCounts, KVAllocator
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.request import Request, State
from dsv4_npu.alloc.rollback import RollbackRules
from dsv4_npu.alloc.state import FULL, ROW
from dsv4_npu.errors import CapacityError, InputError, OwnershipError
from tests.lifecycle.engine import decode, initial, life_of, prefill, turn

SPEC = AllocSpec(128, 1, 32, 32, 32, 4, 1024, verify_width=4)


def decoding(life: Lifecycle, name: str = "r", length: int = 100, limit: int = 100) -> Request:
    request = life.admit(name, [1] * length, limit)
    prefill(life, request)
    return request


def test_between_launch_and_learn_the_committed_length_is_the_old_one() -> None:
    life = life_of(SPEC)
    request = decoding(life)
    first = life.decode_plan([request], padded_to=3)
    assert first.rows.tolist() == [request.row, 0, 0]
    assert first.loc.out_full.tolist()[4:] == [0] * 8, "padding points at the dummy"
    life.launch(first)
    second = life.decode_plan([request])
    life.launch(second)
    assert life.alloc.committed(request.row) == 100
    assert second.starts.tolist() == [100]
    assert life.alloc.allocated(request.row) >= 100 + 2 * 4, "the reserve covers two rounds"
    with pytest.raises(OwnershipError, match="2 steps that were not learned"):
        life.decode_plan([request])
    life.done(first)
    assert life.alloc.committed(request.row) == 100
    assert life.learn(first, {request: [1, 2, 3]}) == []
    assert life.alloc.committed(request.row) == 103
    assert len(request) == 104
    life.done(second)
    life.learn(second, {request: [4]})
    assert request.outputs == [1, 1, 2, 3, 4]


def test_a_row_is_handed_on_only_after_its_last_forward_is_learned() -> None:
    life = life_of(SPEC)
    request = decoding(life, limit=3)
    first = life.decode_plan([request])
    life.launch(first)
    second = life.decode_plan([request])
    life.launch(second)
    life.done(first)
    assert life.learn(first, {request: [1, 2, 3, 4]}) == [request]
    assert (request.state, request.num_outputs) == (State.ENDED, 3)
    row = request.row
    life.finish(request)
    assert (request.state, request.row) == (State.CLOSING, row)
    assert life.alloc.rows() == [row]
    with pytest.raises(OwnershipError, match="request 'r' is closing"):
        life.finish(request)
    life.done(second)
    assert life.alloc.rows() == [row], "done is not enough"
    assert life.learn(second, {}) == []
    assert request.state is State.FINISHED
    assert request.num_outputs == 3
    assert life.alloc.rows() == []
    assert initial(life.alloc)


def test_pages_of_an_aborted_request_wait_for_every_forward_in_flight() -> None:
    life = life_of(SPEC, cache=False)
    one, two = decoding(life, "one"), decoding(life, "two")
    step = life.decode_plan([one])
    life.launch(step)
    free = life.alloc.state.free(FULL)
    life.abort(two)
    assert life.alloc.state.free(FULL) == free
    assert life.alloc.state.waiting(FULL) == 1
    assert not life.make_room(FamilyCounts(free + 1, 0, 0)), "it is on its way, but not there"
    life.done(step)
    assert life.make_room(FamilyCounts(free + 1, 0, 0))
    life.alloc.audit()


def test_events_out_of_order_are_refused_and_change_nothing() -> None:
    life = life_of(SPEC)
    request = decoding(life)
    first, second = life.decode_plan([request]), life.decode_plan([request])
    tables = life.alloc.state.tables.copy()
    with pytest.raises(OwnershipError, match="step 2 is not launched"):
        life.done(first)
    with pytest.raises(OwnershipError, match="step 2 of request 'r' is to be launched first"):
        life.launch(second)
    with pytest.raises(OwnershipError, match="was planned after it"):
        life.cancel(first)
    life.launch(first)
    with pytest.raises(OwnershipError, match="launched already"):
        life.launch(first)
    with pytest.raises(OwnershipError, match="was launched: it must be learned"):
        life.cancel(first)
    with pytest.raises(OwnershipError, match="is not done"):
        life.learn(first, {request: [1]})
    life.launch(second)
    life.done(second)
    with pytest.raises(OwnershipError, match="step 2 of request 'r' is to be learned first"):
        life.learn(second, {request: [1]})
    life.done(first)
    with pytest.raises(OwnershipError, match="done already"):
        life.done(first)
    for wrong in ([], [1] * 5):
        with pytest.raises(InputError, match=f"{len(wrong)} tokens learned, 1 to 4 are allowed"):
            life.learn(first, {request: wrong})
    assert (life.alloc.state.tables == tables).all()
    assert life.alloc.committed(request.row) == 100
    life.learn(first, {request: [1]})
    with pytest.raises(OwnershipError, match="step 2 is not planned here"):
        life.learn(first, {request: [1]})


def test_a_cancelled_chunk_is_planned_again() -> None:
    life = life_of(SPEC)
    request = life.admit("r", [1] * 300, 5)
    step = life.extend([(request, 200)])
    assert request.planned == 200
    life.cancel(step)
    assert (request.planned, request.unlearned) == (0, 0)
    prefill(life, request)
    assert life.alloc.committed(request.row) == 300
    life.alloc.audit()


def test_a_prefill_takes_a_token_exactly_at_its_end() -> None:
    life = life_of(SPEC)
    request = life.admit("r", [1] * 300, 5)
    for end, wrong in ((200, [1]), (300, [])):
        step = life.extend([(request, end)])
        life.launch(step)
        life.done(step)
        with pytest.raises(InputError, match="tokens learned"):
            life.learn(step, {request: wrong})
        life.learn(step, {request: [1][len(wrong) :]})
    with pytest.raises(OwnershipError, match="extend: request 'r' is decode"):
        life.extend([(request, 301)])


def test_a_retracted_request_keeps_the_outputs_of_forwards_in_flight() -> None:
    life = life_of(SPEC)
    request = decoding(life, limit=50)
    step = life.decode_plan([request])
    life.launch(step)
    life.retract(request)
    assert request.state is State.CLOSING
    life.done(step)
    assert life.learn(step, {request: [1, 2]}) == []
    assert (request.state, request.row, request.outputs) == (State.QUEUED, 0, [1, 1, 2])
    life.readmit(request)
    prefill(life, request, first_token=9)
    assert request.outputs == [1, 1, 2, 9]
    assert len(request) == life.alloc.committed(request.row) + 1


def test_a_retracted_request_that_gets_its_last_token_finishes() -> None:
    life = life_of(SPEC)
    request = decoding(life, limit=3)
    step = life.decode_plan([request])
    life.launch(step)
    life.retract(request)
    life.done(step)
    assert life.learn(step, {request: [1, 2, 3]}) == []
    assert (request.state, request.outputs) == (State.FINISHED, [1, 1, 2])
    life.alloc.audit()


def test_a_decode_that_does_not_fit_takes_nothing_and_evicts_only_what_helps() -> None:
    life = life_of(AllocSpec(128, 1, 5, 6, 8, 4, 1024, verify_width=4))
    cached = life.admit("cached", [9] * 130, 1)
    prefill(life, cached, budget=128)
    life.finish(cached)
    one, two = life.admit("one", [1] * 250, 100), life.admit("two", [2] * 250, 100)
    prefill(life, one)
    prefill(life, two)
    assert life.cache is not None
    assert (life.alloc.state.free(FULL), life.cache.nodes, life.cache.idle.full) == (0, 3, 1)
    tables = life.alloc.state.tables.copy()
    with pytest.raises(CapacityError, match="FULL pages: need 2, free 0"):
        life.decode_plan([one, two])
    assert (life.alloc.state.tables == tables).all()
    assert (life.cache.nodes, one.unlearned, two.unlearned) == (3, 0, 0)
    life.decode_plan([one])
    assert life.cache.nodes == 2, "the unread prefix went, because it was enough"
    assert life.alloc.allocated(one.row) == 384
    life.alloc.audit()


def test_admission_refuses_what_can_never_fit_and_changes_nothing() -> None:
    life = life_of(AllocSpec(128, 1, 8, 8, 8, 2, 1024, verify_width=4))
    with pytest.raises(CapacityError, match="needs a row of 1152 tokens: row_width = 1024"):
        life.admit("long", [1] * 1000, 20)
    life.check(1000, 16)
    small = life_of(AllocSpec(128, 1, 4, 8, 8, 2, 1024, verify_width=4))
    with pytest.raises(CapacityError, match="needs 5 FULL pages: 4 exist"):
        small.admit("r", [1] * 500, 10)
    for name in ("a", "b"):
        life.admit(name, [1], 1)
    with pytest.raises(CapacityError, match="request rows"):
        life.admit("c", [1], 1)
    assert set(life.requests) == {"a", "b"}
    with pytest.raises(OwnershipError, match="request 'a' is prefill already"):
        life.admit("a", [1], 1)
    for prompt, message in (([], "prompt of 0 tokens"), ([-1], "ids from -1"), ([0.5], "a list of integers")):
        with pytest.raises(InputError, match=message):
            life.admit("d", prompt, 1)  # type: ignore[arg-type]
    assert life.alloc.state.free(ROW) == 0


def test_a_request_of_exactly_the_row_width_is_served() -> None:
    life = life_of(AllocSpec(128, 1, 8, 8, 8, 1, 1024, verify_width=4))
    request = life.admit("r", [1] * 1000, 16)
    prefill(life, request)
    while request.state is State.DECODE:
        decode(life, request, [1, 1, 1, 1])
    assert request.num_outputs == 16
    assert life.alloc.allocated(request.row) == 1024
    life.finish(request)
    life.alloc.audit()


def test_wrong_arguments_are_refused() -> None:
    life = life_of(SPEC)
    request = decoding(life)
    other = life_of(SPEC)
    with pytest.raises(OwnershipError, match="another life cycle"):
        other.finish(request)
    with pytest.raises(InputError, match="each request is decoded once"):
        life.decode_plan([request, request])
    with pytest.raises(InputError, match="length = 0"):
        life.rewind(request, 0)
    with pytest.raises(OwnershipError, match="resume: request 'r' is decode"):
        life.resume(request, [1], 5)
    life.keep(request)
    with pytest.raises(InputError, match="keep = 200"):
        life.resume(request, [1], 5, keep=200)
    with pytest.raises(CapacityError, match="row_width"):
        life.resume(request, [1] * 2000, 5)
    assert (request.state, len(request)) == (State.KEPT, 101)
    with pytest.raises(InputError, match="same allocator"):
        Lifecycle(other.alloc, life.cache, rules=RollbackRules.of(SPEC, True))
    with pytest.raises(InputError, match="reserve = 7"):
        Lifecycle(other.alloc, rules=RollbackRules.of(SPEC, True), reserve=7)
    wide = AllocSpec(256, 1, 8, 8, 8, 2, 1024)
    with pytest.raises(InputError, match="page and C4 state owner"):
        Lifecycle(KVAllocator(wide, backend="python"), rules=RollbackRules.of(SPEC, True))


def test_the_window_follows_the_committed_length_with_its_lag() -> None:
    life = life_of(AllocSpec(128, 2, 32, 32, 32, 1, 2048, verify_width=4), cache=False)
    request = decoding(life, length=120, limit=600)
    previous = None
    while life.alloc.committed(request.row) < 600:
        step = life.decode_plan([request])
        life.launch(step)
        if previous is not None:
            before = life.alloc.committed(request.row)
            life.done(previous)
            life.learn(previous, {request: [1, 1, 1]})
            after = life.alloc.committed(request.row)
            assert after == before + 3
            assert life.alloc.state.evict_cursor[request.row] == max(0, after - 128) // 128
        previous = step
    assert life.alloc.usage()["SWA"][0] <= 3


def test_a_session_over_many_turns_leaves_nothing() -> None:
    life = life_of(SPEC)
    session = decoding(life, limit=10)
    rng = np.random.default_rng(1)
    for round_number in range(6):
        while session.state is State.DECODE:
            decode(life, session, [1] * int(rng.integers(1, 5)))
        life.keep(session)
        life.alloc.audit()
        held = life.alloc.allocated(session.row)
        assert held == -(-life.alloc.committed(session.row) // 128) * 128
        if round_number == 3:
            life.retract(session)
            assert session.row == 0
        start = life.resume(session, [2] * 20, 10)
        assert start <= len(session) - 20
        prefill(life, session)
    life.finish(session)
    assert life.cache is not None
    life.cache.clear()
    assert initial(life.alloc)


def test_a_turn_without_events_can_be_replayed_from_the_queue() -> None:
    life = life_of(SPEC)
    request = life.admit("r", [1] * 300, 5)
    turn(life, life.extend([(request, 128)]), {})
    life.retract(request)
    life.readmit(request)
    assert request.cached == 128, "what was complete stayed in the cache"
    prefill(life, request)
    assert request.state is State.DECODE
