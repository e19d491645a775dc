"""The picture of an allocator, and the HTML report: parsed, and drawn by a real browser where there is one."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.errors import InputError
from dsv4_npu.replay.picture import KINDS, FamilySeries, owner_kinds, run_lengths, snapshot
from dsv4_npu.replay.report import SCHEMA, render_report, write_report

SPEC = AllocSpec(
    page_size=128, c128_page_size=2, full_pages=64, swa_pages=40, c128_pages=40, request_rows=6, row_width=4096
)


class Page(HTMLParser):
    """Tables (caption to rows of cell texts), the embedded data, and everything that could reach for the network."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.script: dict[str, str] = {}
        self.links: list[str] = []
        self.texts: dict[str, str] = {}
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self._caption = ""
        self._cells: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._open.append((tag, found))
        self.links += [str(found[key]) for key in ("src", "href", "action", "data") if found.get(key)]
        if tag == "caption":
            self._caption = ""
        if tag == "tr":
            self._cells = []
        if tag in ("td", "th") and self._cells is not None:
            self._cells.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass
        if tag == "tr" and self._cells is not None:
            self.tables.setdefault(self._caption, []).append(self._cells)

    def handle_data(self, text: str) -> None:
        tag, attrs = self._open[-1] if self._open else ("", {})
        if tag == "script":
            self.script[attrs.get("id") or "code"] = text
        elif tag == "caption":
            self._caption += text
        elif self._cells and any(one in ("td", "th") for one, _ in self._open):
            self._cells[-1] += text
        if attrs.get("id"):
            self.texts[str(attrs["id"])] = text

    def number(self, group: str, name: str) -> str:
        return next(row[1] for row in self.tables[group] if row[0] == name)


def used_allocator() -> KVAllocator:
    """Rows, a shared prefix, a cached page without readers, a quarantined row and an open reservation."""
    alloc = KVAllocator(SPEC, backend="python")
    for rid, tokens in (("a", 1024), ("b", 300), ("c", 700)):
        row = alloc.open(rid)
        with alloc.transaction() as plan:
            plan.extend(row, tokens)
            plan.commit()
        alloc.commit(row, tokens)
    first = alloc.row_of("a")
    full, c128 = alloc.take_over(first, 4)
    reader = alloc.open("d")
    alloc.attach_prefix(reader, full[:2], c128[:1], 256)
    alloc.close(first)
    alloc.launch()
    alloc.close(alloc.row_of("c"))
    return alloc


def test_owner_kinds_name_every_page() -> None:
    alloc = used_allocator()
    with alloc.transaction() as plan:
        plan.extend(alloc.row_of("b"), 900)
        plan.reserve()
        kinds = owner_kinds(alloc)
        counts = {name: Counter(KINDS[kind] for kind in values.tolist()) for name, values in kinds.items()}
    # b: 3 pages; a's prefix: 2 pages read by d, 2 by nobody; c's 6 wait; b's extension to 8 pages is reserved
    full = {"dummy": 1, "request": 3, "shared": 2, "cache": 2, "quarantine": 6, "transaction": 5, "free": 46}
    assert counts["FULL"] == full
    assert counts["SWA"] == {**full, "free": full["free"] - 24}
    assert counts["C128"] == {
        "dummy": 1,
        "request": 1,
        "shared": 1,
        "cache": 1,
        "quarantine": 3,
        "transaction": 3,
        "free": 31,
    }


def test_run_lengths_are_the_kinds() -> None:
    kinds = np.array([6, 0, 0, 1, 1, 1, 0, 5], np.uint8)
    runs = run_lengths(kinds)
    assert runs == "d1f2r3f1q1"


def test_the_histogram_counts_holders() -> None:
    alloc = used_allocator()
    picture = snapshot(alloc, 7, "here")
    expected = Counter(int(count) for count in alloc.state.c128_count[1:] if count)
    assert {int(count): pages for count, pages in picture["c128_refcounts"].items()} == expected
    assert expected[2] == 1


def report() -> dict[str, Any]:
    alloc = used_allocator()
    series = FamilySeries(alloc)
    series.sample(0)
    series.sample(10)
    return {
        "schema": SCHEMA,
        "title": "A <title> & more",
        "subtitle": "tiny on a3",
        "notes": ["acceptance is SIMULATED"],
        "verdict": {"ok": True, "text": "no leaks"},
        **series.as_data(),
        "series": [{"name": "running requests", "values": [1, 2]}],
        "snapshots": [snapshot(alloc, 0), snapshot(alloc, 10, "peak FULL </script><b>")],
        "numbers": [
            {"group": "Requests", "name": "served", "value": 12031, "tile": True},
            {"group": "Requests", "name": "hit rate", "value": 0.4125, "unit": "of <all>"},
        ],
        "tables": [{"title": "Refused", "columns": ["reason", "requests"], "rows": [["too <long>", 3]]}],
    }


def test_the_report_contains_its_numbers_and_its_data() -> None:
    data = report()
    page = Page(render_report(data))
    assert page.number("Requests", "served") == "12,031"
    assert page.number("Requests", "hit rate") == "0.412 of <all>"
    assert page.tables["Refused"] == [["reason", "requests"], ["too <long>", "3"]]
    assert json.loads(page.script["data"]) == json.loads(json.dumps(data))
    assert page.texts["verdict"] == "no leaks"


def test_the_report_asks_the_network_for_nothing() -> None:
    text = render_report(report())
    page = Page(text)
    assert page.links == []
    assert "default-src 'none'" in text
    for word in ("http://", "https://", "url(", "@import", "fetch(", "XMLHttpRequest", "import("):
        assert word not in text.replace("http://www.w3.org/2000/svg", "")


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    data = copy.deepcopy(report())
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema="other/1"), "schema = 'other/1'"),
        (lambda d: d.pop("numbers"), "numbers = None"),
        (lambda d: d["verdict"].pop("ok"), "verdict: ok is missing"),
        (lambda d: d["families"].clear(), "families"),
        (lambda d: d["families"][0]["used"].append(1), "FULL: used has 3 values: 2"),
        (lambda d: d["families"][0]["kinds"].update(loan=[1, 2]), "kind 'loan'"),
        (lambda d: d["series"][0]["values"].pop(), "running requests has 1 values"),
        (
            lambda d: d["snapshots"][0]["maps"].update(FULL=d["snapshots"][0]["maps"]["FULL"] + "f1"),
            "FULL: 66 pages: 64 and the dummy",
        ),
        (lambda d: d["snapshots"][0]["maps"].update(SWA="d1x40"), "SWA: 'd1x40'"),
        (lambda d: d["snapshots"][0]["maps"].update(MORE=""), "map of 'MORE'"),
        (lambda d: d["numbers"][0].pop("value"), "numbers: value is missing"),
    ],
)
def test_wrong_data_is_refused_by_name(change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        render_report(broken(change))
    assert message in str(caught.value)


CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


def drawn(data: dict[str, Any], folder: Path) -> str:
    """The document that a browser made of the report."""
    write_report(data, folder / "report.html")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--virtual-time-budget=2000",
        "--dump-dom",
    ]
    command = [str(CHROMIUM), *flags, f"--user-data-dir={folder / 'profile'}", (folder / "report.html").as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_a_browser_draws_the_charts(tmp_path: Path) -> None:
    """The script runs to its end: charts, maps and the histogram are in the document."""
    page = drawn(report(), tmp_path)
    assert page.count('aria-label="page map of') == 3
    assert page.count('over time"') == 4
    assert "peak FULL </script>" not in page
    assert "(2 of 2)" in page
    assert 'aria-label="C128 reference counts"' in page


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_a_browser_draws_what_there_is(tmp_path: Path) -> None:
    """Only what the schema demands: no owner kinds, no page maps, no series."""
    data = {**report(), "snapshots": []}
    data["families"] = [{key: one[key] for key in ("name", "total", "used")} for one in data["families"]]
    for key in ("series", "tables"):
        del data[key]
    page = drawn(data, tmp_path)
    assert page.count('over time"') == 3
    assert page.count('aria-label="page map of') == 0
    assert '<section id="moment" hidden' in page
