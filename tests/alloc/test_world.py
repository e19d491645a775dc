"""Random serving: the compiled ledger against its twin, the audit, and the content of memory, after every operation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from .conftest import BACKENDS
from .world import OPERATIONS, SPECS, World, random_run

NUMBER = st.integers(0, 2**16 - 1)


def make_machine() -> type[RuleBasedStateMachine]:
    def begin(self: Any, name: str) -> None:
        self.world = World(SPECS[name], tuple(BACKENDS))

    def check(self: Any) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self: Any) -> None:
        if hasattr(self, "world"):
            self.world.drain()

    def operation(name: str) -> Any:
        def run(self: Any, a: int, b: int, c: int) -> None:
            getattr(self.world, name)(a, b, c)

        run.__name__ = name
        return rule(a=NUMBER, b=NUMBER, c=NUMBER)(run)

    body: dict[str, Any] = {name: operation(name) for name in OPERATIONS}
    body["begin"] = initialize(name=st.sampled_from(sorted(SPECS)))(begin)
    body["check"] = invariant()(check)
    body["teardown"] = teardown
    return type("Machine", (RuleBasedStateMachine,), body)


def test_any_order_of_operations() -> None:
    run_state_machine_as_test(
        make_machine(),
        settings=settings(
            max_examples=12, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("name", sorted(SPECS))
def test_random_serving(name: str) -> None:
    world = World(SPECS[name], tuple(BACKENDS))
    random_run(world, seed=11, steps=400)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SPECS))
def test_ten_thousand_operations(name: str) -> None:
    world = World(SPECS[name], tuple(BACKENDS))
    random_run(world, seed=5, steps=10_000)
    assert world.operations > 10_000
    for event in ("prefix hit", "prefix adopted", "take over", "eviction", "overlapped verify", "freed in flight"):
        assert world.events[event] > 2, f"the run never showed: {event}"
    assert {"CapacityError", "OwnershipError", "InputError"} <= set(world.refused)


@pytest.mark.slow
def test_state_machine_long() -> None:
    run_state_machine_as_test(
        make_machine(),
        settings=settings(
            max_examples=100, stateful_step_count=120, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
