"""docs/troubleshooting.md tells the truth: its messages are produced again, and its references exist."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dsv4_npu.alloc import compiled_ledger_available
from tests.docs import faults_accept, faults_life, faults_pages  # noqa: F401
from tests.docs.faults import FAULTS, Fault
from tests.docs.pages import blocks, read, with_blocks, wrong_references

PAGE = "troubleshooting.md"
RENEW = "renew the page with: python -m tests.docs"
LEDGERS = ["python", "cpp"] if compiled_ledger_available() else ["python"]
OF_LEDGER = [fault for fault in FAULTS.values() if fault.needs == "backend"]


def is_quoted(fault: Fault, given: Any) -> None:
    assert fault.text(True, given) == blocks(read(PAGE), "text")[fault.name], RENEW
    assert not fault.text(False, given), "without the fault nothing may be seen"


@pytest.mark.parametrize("ledger", LEDGERS)
@pytest.mark.parametrize("fault", OF_LEDGER, ids=lambda fault: fault.name)
def test_messages_of_the_ledger(fault: Fault, ledger: str) -> None:
    is_quoted(fault, ledger)


def test_what_only_a_computation_shows(bench: Any) -> None:
    from tests.docs import faults_engine  # noqa: F401

    computed = [fault for fault in FAULTS.values() if fault.needs == "bench"]
    assert computed
    for fault in computed:
        is_quoted(fault, bench)


def test_every_block_has_its_fault(bench: Any) -> None:
    from tests.docs import faults_engine  # noqa: F401

    assert set(blocks(read(PAGE), "text")) == set(FAULTS)


def test_references_exist() -> None:
    assert not wrong_references(read(PAGE))
    assert wrong_references("`alloc/audit.py:find_nothing`"), "a wrong reference must be seen"
    assert wrong_references("`tests/docs/nothing.py`"), "a wrong file must be seen"


def test_links_to_sections_exist() -> None:
    text = read(PAGE)
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) == anchors - {"ask-first"}


def test_every_section_answers_the_three_questions() -> None:
    sections = re.split(r"^## ", read(PAGE), flags=re.MULTILINE)[2:]
    assert len(sections) == 13
    for section in sections:
        assert "**Three questions.**" in section, section.splitlines()[0]


def test_a_changed_message_is_seen() -> None:
    fault = FAULTS["closed-twice"]
    page = read(PAGE).replace("row 1 is not open", "row 2 is not open")
    assert blocks(page, "text")[fault.name] != fault.text(True, "python")
    assert (
        with_blocks("```text closed-twice\nold\n```\n", {"closed-twice": "new\n"}) == "```text closed-twice\nnew\n```\n"
    )
