"""The table of docs/native-rows.md is measured again."""

from __future__ import annotations

import re

from tests.emulation import native_tables
from tests.emulation.harness import Bench

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


def same_table(text: str, again: str) -> bool:
    """The same words, and numbers within a twentieth: the last digit shown depends on a CPU's vector instructions."""
    if NUMBER.sub("#", text) != NUMBER.sub("#", again):
        return False
    pairs = zip(map(float, NUMBER.findall(text)), map(float, NUMBER.findall(again)), strict=True)
    return all(abs(a - b) <= 0.05 * max(abs(a), abs(b)) for a, b in pairs)


def test_the_table_is_what_the_formats_cost(bench: Bench) -> None:
    page = native_tables.DOC.read_text(encoding="utf-8")
    found = re.search(r"<!-- table -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert found
    table = native_tables.tables(bench)
    assert same_table(found[1], table), f"python -m tests.emulation.native_tables writes:\n{table}"
    # The comparison sees one wrong digit.
    assert not same_table(found[1], table.replace("4.0e-02", "4.6e-02", 1))
    assert not same_table(found[1], table.replace("fp8_packed", "bf16", 1))
