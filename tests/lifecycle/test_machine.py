"""Every operation and event of the life cycle in any legal order, over a device that checks each read."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from dsv4_npu.alloc import compiled_ledger_available
from tests.lifecycle.truth import Shape
from tests.lifecycle.world import World

SHAPES = st.builds(
    Shape,
    owner=st.sampled_from(["swa_page", "request"]),
    c128_page=st.sampled_from([1, 2]),
    width=st.sampled_from([1, 2, 4, 6, 10]),
    swa=st.sampled_from([8, 14, 26]),
    rows=st.integers(2, 5),
    capture=st.booleans(),
    cache=st.sampled_from([True, True, True, False]),
    backend=st.sampled_from(["python", "cpp"] if compiled_ledger_available() else ["python"]),
)


class LifeMachine(RuleBasedStateMachine):
    """The rules are the operations of :class:`World`; all checks run after each."""

    world: World

    @initialize(shape=SHAPES)
    def begin(self, shape: Shape) -> None:
        self.world = World(shape)

    @rule(name=st.sampled_from(World.OPERATIONS), data=st.data())
    def operate(self, name: str, data: st.DataObject) -> None:
        self.world.perform(name, lambda n: data.draw(st.integers(0, n - 1)))

    @rule(data=st.data(), turns=st.integers(1, 6))
    def serve(self, data: st.DataObject, turns: int) -> None:
        def draw(n: int) -> int:
            return data.draw(st.integers(0, n - 1))

        for _ in range(turns):
            for name in ("prefill", "decode", "turn", "turn"):
                self.world.perform(name, draw)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.shut_down()


def run_machine(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        LifeMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def walk(shape: Shape, seed: int, steps: int) -> World:
    """A seeded random walk, then the end of everything."""
    world, rng = World(shape), random.Random(seed)
    for _ in range(steps):
        world.step(rng.randrange)
    world.shut_down()
    return world


def test_any_legal_order() -> None:
    run_machine(10, 30)


@pytest.mark.slow
def test_any_legal_order_ten_thousand_steps() -> None:
    run_machine(210, 50)


WALKS = [
    Shape(owner=owner, width=width, c128_page=page)
    for owner in ("swa_page", "request")
    for width, page in ((1, 2), (4, 1), (6, 1), (10, 2))
]


@pytest.mark.parametrize("shape", WALKS[1:6:4], ids=lambda shape: f"{shape.owner}-{shape.width}")
def test_a_short_walk_serves_requests(shape: Shape) -> None:
    world = walk(shape, 4, 600)
    assert min(world.hits, world.finished, world.moved) > 0, "the walk must reach hits, finishes and rewinds"


@pytest.mark.slow
@pytest.mark.parametrize("shape", WALKS, ids=lambda shape: f"{shape.owner}-{shape.width}")
def test_a_long_walk(shape: Shape) -> None:
    world = walk(shape, 11, 2500)
    assert min(world.hits, world.finished, world.moved) > 2


@pytest.mark.skipif(not compiled_ledger_available(), reason="the compiled ledger is not built")
def test_the_compiled_ledger_walks_the_same_way() -> None:
    one, other = (walk(Shape(c128_page=2, backend=backend), 3, 400) for backend in ("python", "cpp"))
    for name, array in one.alloc.state.arrays().items():
        assert (array == other.alloc.state.arrays()[name]).all(), name
    assert (one.hits, one.finished, one.moved) == (other.hits, other.finished, other.moved)
