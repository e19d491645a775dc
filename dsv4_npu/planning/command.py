"""``dsv4-npu plan``: how many tokens and requests of full context a deployment holds, and what takes the memory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from dsv4_npu.options import check_outputs, file_name, widened, writing
from dsv4_npu.planning.options import add_deployment, answer, other_arguments
from dsv4_npu.planning.show import as_json, show, show_both

_STDOUT = Path("-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``plan``."""
    add_deployment(parser)
    parser.add_argument(
        "--compare",
        metavar="OPTION=VALUE,...",
        help="a second deployment: these options changed ('platform=a5,spec=none')",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        type=file_name,
        const=_STDOUT,
        metavar="OUT",
        help="print every number as JSON, or write it to this file",
    )


def run(args: argparse.Namespace) -> int:
    """Plan and print; bad input is raised, so the exit status is 0."""
    if args.json not in (None, _STDOUT):
        check_outputs(("--json", args.json))
    answers = [answer(args)]
    if args.compare is not None:
        answers.append(answer(other_arguments(args, args.compare), f"--compare {args.compare!r}: "))
    if args.json is not None:
        numbers = [as_json(one) for one in answers]
        text = json.dumps(numbers[0] if len(numbers) == 1 else {"plans": numbers}, indent=1)
        if args.json == _STDOUT:
            print(text)
            return 0
        with writing("--json", args.json):
            args.json.write_text(text + "\n", encoding="utf-8")
    console = widened(Console(highlight=False))
    if len(answers) == 1:
        show(console, answers[0])
    else:
        show_both(console, answers[0], answers[1], args.compare)
    if args.json is not None:
        console.print(f"numbers written to {args.json}")
    return 0
