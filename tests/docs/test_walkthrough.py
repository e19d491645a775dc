"""docs/walkthrough.md tells what the run of tests/docs/walk.py finds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.docs.pages import blocks, read, wrong_references, wrong_values

PAGE = "walkthrough.md"
RENEW = "renew the blocks with: python -m tests.docs"


@pytest.fixture(scope="module")
def walk(bench: Any) -> Any:
    from tests.docs.walk import walk

    return walk(bench)


def test_blocks_are_those_of_the_run(walk: Any) -> None:
    assert blocks(read(PAGE), "text") == walk.blocks, RENEW


def test_values_are_those_of_the_run(walk: Any) -> None:
    text = read(PAGE)
    assert not wrong_values(text, walk.facts)
    assert wrong_values(text.replace("`accept_lens = 3`", "`accept_lens = 2`"), walk.facts)
    assert wrong_values(text, {**walk.facts, "page": 5})
    unused = [name for name, value in walk.facts.items() if f"`{name} = {value}`" not in text]
    assert not unused, "every value is told"


def test_references_exist() -> None:
    assert not wrong_references(read(PAGE))


def test_the_run_sees_a_missing_clear(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_npu.emulation.states import StateKeeper
    from tests.docs.walk import walk

    monkeypatch.setattr(StateKeeper, "clear_rejected", lambda *_: None)
    with pytest.raises(AssertionError, match="state row"):
        walk(bench)
