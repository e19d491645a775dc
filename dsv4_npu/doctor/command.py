"""``dsv4-npu doctor``: what is there, what fits, what is missing, and the command that mends it."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from dataclasses import asdict

from dsv4_npu.doctor.facts import gather
from dsv4_npu.doctor.rules import OK, PURPOSES, Line, blockers, judge

#: torch's function on which the emulated npu device stands (dsv4_npu.emulation.device).
HOOK = "_setup_privateuseone_for_python_backend"
#: Columns of the name and of the state.
_NAME, _STATE = 34, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``doctor``."""
    meant = "; ".join(f"{name}: {text}" for name, text in PURPOSES.items())
    parser.add_argument(
        "--for",
        dest="purpose",
        choices=tuple(PURPOSES),
        help="what the exit status is about (default: serving where torch_npu or CANN is installed, else emulation). "
        + meant,
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--quick", action="store_true", help="metadata and files alone: start no other process")


def run(args: argparse.Namespace) -> int:
    """Look and print; exit status 0 only if the machine is usable for ``--for``, else 1."""
    facts = gather(args.quick, HOOK)
    purpose = args.purpose or ("serving" if "torch_npu" in facts.versions or facts.cann[0] else "emulation")
    lines = judge(facts)
    stops = {name: blockers(lines, name) for name in PURPOSES}
    usable = {name: not found for name, found in stops.items()}
    if args.json:
        data = {"for": purpose, "usable": usable, "quick": args.quick, "lines": [asdict(one) for one in lines]}
        print(json.dumps(data, indent=1))
    else:
        _show(lines, stops)
    return 0 if usable[purpose] else 1


def _show(lines: list[Line], stops: dict[str, list[Line]]) -> None:
    width = max(shutil.get_terminal_size((120, 24)).columns, 60) if sys.stdout.isatty() else 120
    margin = " " * (_STATE + 1)
    for line in lines:
        begin = f"{line.state:<{_STATE}} {line.name:<{_NAME}} "
        print(textwrap.fill(line.found, width, initial_indent=begin, subsequent_indent=margin + "  "))
        if line.state != OK and line.mend:
            print(textwrap.fill(line.mend, width, initial_indent=margin + "→ ", subsequent_indent=margin + "  "))
    print()
    for purpose, found in stops.items():
        names = ", ".join(line.name for line in found)
        text = "usable" if not found else f"not usable: {names}"
        print(textwrap.fill(text, width, initial_indent=f"for {purpose:<16} ", subsequent_indent=" " * 21))
