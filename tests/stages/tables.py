"""The tables of docs/draft-stages.md, line by line, so that a test can make some of them anew."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from dsv4_npu.config import ModelSpec
from dsv4_npu.emulation.model import build_model
from dsv4_npu.emulation.stages import StageNet, build_stages
from tests.stages.order import LOST, RIGHT, UNACCEPTED, Case, explore
from tests.stages.stage_rows import LENGTHS, two_rounds

DOC = Path(__file__).parents[2] / "docs" / "draft-stages.md"
WIDTHS = range(1, 11)
OWN = "this round's"

#: Rings by name: ratio, owner of the banks, clear.
RINGS = {
    "C4 of a request (A5)": (4, "request", False),
    "C4 of an SWA page (A2, A3)": (4, "page", False),
    "C128": (128, "request", False),
    "C128 with the clear": (128, "request", True),
}
#: Measured shares of wrong windows with acceptance uniform in 1..D (a random sample): case -> wrong, windows.
MEASURED = {
    Case(128, 2, old=True): (32, 100),
    Case(128, 6, old=True): (57, 100),
    Case(4, 4, old=True): (0, 3500),
    Case(4, 5, old=True): (790, 3500),
    Case(4, 6, old=True): (1323, 3500),
    Case(4, 11, old=True): (1704, 3500),
    Case(4, 11): (1004, 3500),
}


def ring_line(name: str, width: int, old: bool) -> str:
    """One ring at one width under one rule."""
    ratio, owner, clear = RINGS[name]
    result = explore(Case(ratio, width, owner, old, clear))
    reads, states = result.reads, len(result.lengths)
    return (
        f"| {name} | {width} | {states:,} | {states * width:,} | {reads.total():,} | {reads[RIGHT]:,} | "
        f"{reads[UNACCEPTED]:,} | {reads[LOST]:,} |"
    )


def ring_lines(old: bool) -> list[str]:
    """Every ring and width; under the old rule a bank per page adds states but no other read, so it is left out."""
    names = [name for name in RINGS if not (old and RINGS[name][1] == "page")]
    return [ring_line(name, width, old) for name in names for width in WIDTHS]


def share_line(case: Case) -> str:
    """The exact share of wrong entries beside the measured one."""
    wrong, windows = MEASURED[case]
    rule = "old rule" if case.old else "pad rule"
    long_run = explore(case).share()
    return (
        f"| C{case.ratio}, D = {case.width}, {rule} | {wrong:,} of {windows:,} = {wrong / windows:.1%} | "
        f"{long_run:.1%} | {deviations(case, long_run, 1.0):.1f} | "
        f"{long_run * 6 / 7:.1%} | {deviations(case, long_run, 6 / 7):.1f} |"
    )


def deviations(case: Case, long_run: float, factor: float) -> float:
    """How many standard errors of independent windows lie between the measured share and ``factor · long_run``."""
    wrong, windows = MEASURED[case]
    share = long_run * factor
    error = math.sqrt(share * (1 - share) / windows)
    return abs(wrong / windows - share) / error if error else 0.0


def nets() -> dict[str, tuple[StageNet, ModelSpec]]:
    """The stages of both kinds on one target."""
    specs = {"mtp": ModelSpec.load("tiny"), "dspark": ModelSpec.load("tiny_dspark")}
    target = build_model(specs["mtp"])
    return {kind: (build_stages(target, spec), spec) for kind, spec in specs.items()}


def stage_line(kind: str, width: int, made: dict[str, tuple[StageNet, ModelSpec]]) -> str:
    """Rows that the stages of one kind read at one width, over all lengths and accept lengths of two rounds."""
    net, spec = made[kind]
    found: Counter[str] = Counter()
    for length in LENGTHS:
        found += two_rounds(net, spec, kind, width, length)
    return (
        f"| {kind} | {width} | {len(LENGTHS) * width * width:,} | {found.total():,} | {found['committed']:,} | "
        f"{found[OWN]:,} | {found['rejected']:,} |"
    )


def tables() -> dict[str, list[str]]:
    """All lines by the name of their table."""
    made = nets()
    return {
        "pad rule": ring_lines(False),
        "beyond the bound": [ring_line("C4 of a request (A5)", 11, False)],
        "old rule": ring_lines(True),
        "shares": [share_line(case) for case in MEASURED],
        "stage rows": [stage_line(kind, width, made) for kind in made for width in WIDTHS],
    }


def filled(text: str, lines: dict[str, list[str]]) -> str:
    """The page with the lines of each table between its marks."""
    for name, table in lines.items():
        begin, end = f"<!-- {name}: generated -->\n", f"\n<!-- end of {name} -->"
        head, _, rest = text.partition(begin)
        body, found, tail = rest.partition(end)
        if not found:
            raise ValueError(f"{DOC.name} has no marks of the table {name!r}")
        text = head + begin + "\n".join([*body.split("\n")[:2], *table]) + end + tail
    return text
