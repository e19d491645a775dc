"""The HTML report: one file with everything in it, which opens without a network.

Its data is plain JSON of schema ``dsv4_npu.report/1``, documented in docs/replay/README.md; the module ``picture``
beside this one builds the parts that come from an allocator. Numbers and tables stand in the HTML itself; charts are
drawn by the script that the file carries.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from dsv4_npu.errors import InputError
from dsv4_npu.replay.picture import KINDS, LETTERS

SCHEMA = "dsv4_npu.report/1"
#: Numbers shown as tiles at the top of the page.
MOST_TILES = 6

Report = Mapping[str, Any]


def render_report(data: Report) -> str:
    """The HTML of ``data``; InputError names the key that is missing or wrong."""
    check_report(data)
    verdict = data["verdict"]
    parts = {
        "TITLE": html.escape(data["title"]),
        "SUBTITLE": html.escape(data["subtitle"]),
        "NOTES": "".join(f"<li>{html.escape(note)}</li>" for note in data["notes"]),
        "VERDICT_CLASS": "ok" if verdict["ok"] else "bad",
        "VERDICT": html.escape(verdict["text"]),
        "TILES": "".join(map(_tile, [one for one in data["numbers"] if one.get("tile")][:MOST_TILES])),
        "TABLES": _number_tables(data["numbers"]) + "".join(map(_table, data.get("tables", []))),
        "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "CSS": _template("report.css"),
        "JS": _template("report.js"),
    }
    page = _template("report.html").split("@@")
    return "".join(part if index % 2 == 0 else parts[part] for index, part in enumerate(page))


def write_report(data: Report, path: str | Path) -> None:
    """Render ``data`` to a file."""
    page = render_report(data)
    Path(path).write_text(page, encoding="utf-8")


def check_report(data: Report) -> None:
    """Refuse (InputError) data that is not of the schema."""
    if data.get("schema") != SCHEMA:
        raise InputError(f"report: schema = {data.get('schema')!r}: {SCHEMA!r} is needed")
    for key, kind in (
        ("title", str),
        ("subtitle", str),
        ("notes", Sequence),
        ("verdict", Mapping),
        ("time", Mapping),
        ("families", Sequence),
        ("snapshots", Sequence),
        ("numbers", Sequence),
    ):
        if not isinstance(data.get(key), kind):
            raise InputError(f"report: {key} = {data.get(key)!r:.80}: a {kind.__name__} is needed")
    _keys(data["verdict"], "verdict", "ok", "text")
    _keys(data["time"], "time", "unit", "values")
    samples = len(data["time"]["values"])
    if not data["families"]:
        raise InputError("report: families = []: at least one is needed")
    totals = {}
    for family in data["families"]:
        _keys(family, "families", "name", "total", "used")
        totals[family["name"]] = family["total"]
        lines = {"used": family["used"], **family.get("kinds", {})}
        for name, values in lines.items():
            if name not in ("used", *KINDS):
                raise InputError(f"report: families: kind {name!r}: one of {list(KINDS)} is needed")
            _length(values, samples, f"families: {family['name']}: {name}")
    for line in data.get("series", []):
        _keys(line, "series", "name", "values")
        _length(line["values"], samples, f"series: {line['name']}")
    for snapshot in data["snapshots"]:
        _keys(snapshot, "snapshots", "time", "label", "maps", "c128_refcounts")
        for name, runs in snapshot["maps"].items():
            _check_runs(name, runs, totals)
    for number in data["numbers"]:
        _keys(number, "numbers", "group", "name", "value")
    for table in data.get("tables", []):
        _keys(table, "tables", "title", "columns", "rows")


def _keys(data: Mapping[str, Any], where: str, *keys: str) -> None:
    missing = [key for key in keys if key not in data]
    if missing:
        raise InputError(f"report: {where}: {missing[0]} is missing in {dict(data)!r:.120}")


def _length(values: Sequence[object], samples: int, where: str) -> None:
    if len(values) != samples:
        raise InputError(f"report: {where} has {len(values)} values: {samples}, one per time, are needed")


def _check_runs(name: str, runs: object, totals: Mapping[str, int]) -> None:
    if name not in totals:
        raise InputError(f"report: snapshots: map of {name!r}: one of the families {sorted(totals)} is needed")
    if not isinstance(runs, str) or not re.fullmatch(f"([{LETTERS}][0-9]+)*", runs):
        raise InputError(
            f"report: snapshots: {name}: {runs!r:.60}: runs of a letter of {LETTERS!r} and a number are needed"
        )
    pages = sum(map(int, re.findall("[0-9]+", runs)))
    if pages != totals[name] + 1:
        raise InputError(f"report: snapshots: {name}: {pages} pages: {totals[name]} and the dummy page are needed")


def _template(name: str) -> str:
    return resources.files("dsv4_npu.replay").joinpath("template", name).read_text(encoding="utf-8")


def shown(value: object) -> str:
    """A value as the report prints it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def _cell(value: object, unit: str | None = None) -> str:
    """A table cell; numbers, and texts that stand among numbers (``unit`` given), are set to the right."""
    kind = ' class="number"' if unit is not None or isinstance(value, (int, float)) else ""
    tail = f' <span class="unit">{html.escape(unit)}</span>' if unit else ""
    return f"<td{kind}>{html.escape(shown(value))}{tail}</td>"


def _tile(number: Mapping[str, Any]) -> str:
    unit = number.get("unit", "")
    of_total = unit.startswith("of ")
    value = shown(number["value"]) + (f" {unit}" if unit and not of_total else "")
    name = number["name"] + (f" {unit}" if of_total else "")
    return f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'


def _number_tables(numbers: Sequence[Mapping[str, Any]]) -> str:
    groups: dict[str, list[str]] = {}
    for number in numbers:
        row = (
            f"<tr><th scope=row>{html.escape(number['name'])}</th>{_cell(number['value'], number.get('unit', ''))}</tr>"
        )
        groups.setdefault(number["group"], []).append(row)
    return "".join(
        f"<table><caption>{html.escape(group)}</caption><tbody>{''.join(rows)}</tbody></table>"
        for group, rows in groups.items()
    )


def _table(table: Mapping[str, Any]) -> str:
    numeric = [all(isinstance(row[i], (int, float)) for row in table["rows"]) for i in range(len(table["columns"]))]
    head = "".join(
        f"<th scope=col{' class=number' if number and table['rows'] else ''}>{html.escape(column)}</th>"
        for column, number in zip(table["columns"], numeric, strict=True)
    )
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table["rows"])
    if not table["rows"]:
        rows = f'<tr><td colspan="{len(table["columns"])}">none</td></tr>'
    return (
        f'<div class="wide"><table><caption>{html.escape(table["title"])}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
