"""SGLang's real engine over our memory: its tokens and logits are Hugging Face's, and nothing stays held.

One engine serves without speculation, one with EAGLE and one with DSpark; each is started once, so the order of the
tests matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dsv4_npu.sglang.engine_forward import ForwardSetup
from dsv4_npu.sglang.engine_launch import EmulatedEngine
from dsv4_npu.sglang.engine_scenarios import Outcome, Scenarios

pytestmark = pytest.mark.slow

OURS = {
    "pool": "dsv4_npu.sglang.kv_pool.KVPool",
    "allocator": "dsv4_npu.sglang.allocator.KVAllocator",
    "request rows": "dsv4_npu.sglang.req_pool.RequestPool",
}


@pytest.fixture(scope="module", params=[(0, "EAGLE"), (3, "EAGLE"), (3, "DSPARK")], ids=["plain", "eagle", "dspark"])
def scenarios(request: pytest.FixtureRequest) -> Iterator[Scenarios]:
    drafts, algorithm = request.param
    engine = EmulatedEngine(ForwardSetup(draft_tokens=drafts, algorithm=algorithm), "fork")
    try:
        yield Scenarios(engine)
    finally:
        engine.shutdown()


def sound(scenarios: Scenarios) -> dict[str, Any]:
    """The engine's report, in which the audit of every forward found nothing."""
    report = scenarios.engine.report()
    assert report["violations"] == []
    return report


def all_right(outcomes: list[Outcome]) -> None:
    wrong = [one for one in outcomes if not one.right]
    assert not wrong
    # A choice between two logits closer than what is called equal would prove nothing.
    assert min(one.margin for one in outcomes) > 1e-8


def test_prompts_in_chunks_beside_each_other(scenarios: Scenarios) -> None:
    outcomes = scenarios.chunked()
    all_right(outcomes)
    assert [(one.cached, one.finish) for one in outcomes] == [(0, "length")] * 2
    report = sound(scenarios)
    assert OURS.items() <= report["classes"].items()
    assert "dsv4_npu.sglang.c128_component.C128Component" in report["classes"]["components"]
    assert report["rows in"] == "the pools of the KV pool"
    drafts = scenarios.engine.setup.draft_tokens
    # 11 tokens of the longer request come from decodes, each of which verifies at least one row.
    rounds = report["forwards"]["target_verify" if drafts else "decode"]
    assert rounds < 11 if drafts else rounds == 11


def test_a_prefix_is_served_from_the_cache(scenarios: Scenarios) -> None:
    outcomes = scenarios.prefix()
    all_right(outcomes)
    # One C128 group, the last rows of which were written by decodes.
    assert [one.cached for one in outcomes] == [2048, 2048]
    held = sound(scenarios)["held"]
    assert held["FULL pages"] == 8
    assert held["C128 holders"] == 1


def test_retracted_requests_compute_their_history_again(scenarios: Scenarios) -> None:
    outcomes = scenarios.retracted()
    all_right(outcomes)
    assert sum(one.retracted for one in outcomes) >= 1
    sound(scenarios)


def test_an_abort_leaves_the_others_alone(scenarios: Scenarios) -> None:
    outcomes = scenarios.aborted()
    all_right(outcomes)
    assert [one.finish for one in outcomes] == ["abort", "length", "length"]
    sound(scenarios)


def test_nothing_is_held_after_a_flush(scenarios: Scenarios) -> None:
    assert scenarios.engine.flush()
    assert not any(sound(scenarios)["held"].values())


def test_wrong_memory_shows(scenarios: Scenarios) -> None:
    engine = scenarios.engine
    if engine.setup.draft_tokens:
        pytest.skip("a verify closes windows itself: spoilt decodes are looked at without speculation")
    all_right(scenarios.chunked())
    # The last one spoils the cached prefix itself.
    for spoil in ("wrong_c128_page", "doubled_full_page", "no_c128_state", "no_overlap_rows"):
        engine.tamper(spoil)
        outcomes = scenarios.prefix()
        engine.tamper()
        assert any(not one.right for one in outcomes), spoil


def test_a_shifted_mapping_shows(scenarios: Scenarios) -> None:
    engine = scenarios.engine
    if engine.setup.draft_tokens:
        pytest.skip("as above")
    engine.tamper("shifted_swa")
    outcomes = scenarios.divided()
    engine.tamper()
    assert any(not one.right for one in outcomes)
    assert engine.flush()
