"""``dsv4-npu replay``: serve a request trace through the allocator and report what its memory did."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from dsv4_npu.budget import DEFAULT_SWA_RATIO, sizes_for_tokens
from dsv4_npu.config import CacheConfig, PlatformSpec, SpeculationSpec
from dsv4_npu.errors import ConfigError, InputError
from dsv4_npu.options import (
    DEFAULT_DRAFTS,
    MOST_ROWS,
    above_zero,
    check_outputs,
    drafts_for,
    file_name,
    gib_above_zero,
    integer,
    model_for,
    options_named,
    positive,
    seed,
    share,
    share_above_zero,
    whole,
    widened,
    writing,
)
from dsv4_npu.replay.acceptance import SimulatedAcceptance
from dsv4_npu.replay.intake import Policy
from dsv4_npu.replay.report import write_report
from dsv4_npu.replay.runner import Deployment, Outcome, replay
from dsv4_npu.replay.sizing import GIB, sizes_for_bytes
from dsv4_npu.replay.summary import as_json, as_report, groups
from dsv4_npu.replay.trace import load_trace

DEFAULT_TOKENS = 2 * 2**20
#: The host keeps tables of every page: more tokens than any one device holds.
MOST_TOKENS = 2**31


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``replay``."""
    add = parser.add_argument
    add("trace", type=file_name, help="JSON lines in the Mooncake format")
    add("--limit", type=positive, metavar="N", help="read only the first N requests of the file")
    add("--model", default="v4_flash", help="a model name, or the path of a config.json or of its folder")
    add("--platform", default="a3", choices=("a2", "a3", "a5", "cpu"))
    add("--spec", default="chain", choices=tuple(DEFAULT_DRAFTS), help="speculative decode")
    add("--draft-tokens", type=integer, help="drafts per verify; D is one more (chain: 3, dspark: 5)")
    add("--accept-rate", type=share, default=0.7, help="SIMULATED: chance of each draft (default: 0.7)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--tokens", type=whole(1, MOST_TOKENS), help=f"tokens that the pools hold (default: {DEFAULT_TOKENS})"
    )
    size.add_argument(
        "--hbm-gib", type=gib_above_zero, metavar="GIB", help="device memory for all pools and states instead"
    )
    add("--swa-ratio", type=share_above_zero, default=DEFAULT_SWA_RATIO, help="SWA pages as a share of FULL pages")
    add("--context", type=positive, default=131072, help="longest request in tokens (default: 131072)")
    add("--c128-page-size", type=positive, default=16, help="C128 entries per page; below 16 for tests")
    add("--max-running", type=whole(1, MOST_ROWS), default=64, help="requests served at once (default: 64)")
    add("--prefill-chunk", type=positive, default=8192, help="prompt tokens of one prefill step")
    add(
        "--admission",
        default="whole",
        choices=("whole", "chunk"),
        help="let a request in when all of its prompt fits, or when its first chunk does (more retractions)",
    )
    add("--output-estimate", type=share, default=0.3, help="share of the outputs to come that admission keeps room for")
    add("--no-prefix-cache", action="store_true", help="share no prefixes")
    add("--no-overlap", action="store_true", help="learn each step before the next one is launched")
    add(
        "--sessions",
        default="off",
        choices=("off", "field", "infer"),
        help="keep rows between turns: of requests with the same session_id, or also of prompts that continue another",
    )
    add("--step-ms", type=above_zero, help="time of a step: requests then arrive by their timestamps")
    add("--audit", default="end", choices=("every", "end"), help="audit after every round, or at the end")
    add("--ledger", default="auto", choices=("auto", "cpp", "python"), help="implementation of the ledger")
    add("--seed", type=seed, default=0, help="of the simulated acceptance")
    add("--json", type=file_name, metavar="OUT", help="write every number to this file")
    add("--report", type=file_name, metavar="OUT.html", help="write the picture to this file")
    add("--quiet", action="store_true", help="no progress bar")


def deployment(args: argparse.Namespace) -> Deployment:
    """What the options describe; ConfigError says which one to change."""
    with options_named():
        return _deployment(args)


def _deployment(args: argparse.Namespace) -> Deployment:
    model, notes = model_for(args.model, args.spec, "replayed with")
    rows = args.max_running if args.sessions == "off" else 2 * args.max_running
    config = CacheConfig(
        model,
        PlatformSpec.load(args.platform),
        SpeculationSpec(args.spec, drafts_for(args.spec, args.draft_tokens, model)),
        c128_page_size=args.c128_page_size,
        context_len=args.context,
        request_rows=rows,
        emulated_kernels=args.c128_page_size % 16 != 0,
    )
    if args.hbm_gib is not None:
        sizes = sizes_for_bytes(config, int(args.hbm_gib * GIB), args.swa_ratio)
    else:
        sizes = sizes_for_tokens(config, args.tokens or DEFAULT_TOKENS, args.swa_ratio)
    if sizes.full_pages * config.page > MOST_TOKENS:
        raise ConfigError(
            f"--hbm-gib {float(args.hbm_gib):g}: {sizes.full_pages * config.page:,} tokens; a replay keeps tables of "
            f"every page on the host: at most {MOST_TOKENS:,} tokens"
        )
    policy = Policy(
        max_running=args.max_running,
        prefill_chunk=args.prefill_chunk,
        admission=args.admission,
        output_estimate=args.output_estimate,
        overlap=not args.no_overlap,
        step_ms=args.step_ms,
    )
    acceptance = SimulatedAcceptance(args.seed, args.accept_rate, config.verify_width)
    cache = not args.no_prefix_cache
    return Deployment(config, sizes, acceptance, policy, args.sessions, cache, args.ledger, tuple(notes))


def run(args: argparse.Namespace) -> int:
    """Serve the trace; exit status 0 only if something was served, the audit is clean and nothing leaked."""
    console = widened(Console(highlight=False))
    what = deployment(args)
    trace = load_trace(args.trace, args.limit)
    if not trace:
        raise InputError(f"trace {args.trace}: it holds no request")
    check_outputs(("--json", args.json), ("--report", args.report), read={"the trace": args.trace})
    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=args.quiet) as bar:
        task = bar.add_task("replay", total=len(trace))
        outcome = replay(trace, what, args.audit, lambda over: bar.update(task, completed=over))
    report = as_report(args.trace.name, what, outcome)
    if args.json is not None:
        with writing("--json", args.json):
            _write_json(args.json, as_json(args.trace.name, what, outcome))
    if args.report is not None:
        with writing("--report", args.report):
            write_report(report, args.report)
    _show(console, report, outcome, args)
    return 0 if outcome.clean and outcome.counters.served else 1


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _refusal(reason: str, args: argparse.Namespace) -> str:
    """A refusal that names the option behind the number that was too small."""
    if args.hbm_gib is not None:
        size = f"--hbm-gib {float(args.hbm_gib):g}"
    else:
        size = f"--tokens {args.tokens or DEFAULT_TOKENS}"
    told = re.sub(r"row_width = (\d+)", rf"--context {args.context} gives rows of \1", reason)
    return re.sub(r"(?<= pages: )(\d+) exist", rf"{size} gives \1", told)


def _show(console: Console, report: dict[str, Any], outcome: Outcome, args: argparse.Namespace) -> None:
    console.print(f"[bold]{report['title']}[/bold]  {report['subtitle']}", soft_wrap=True)
    for note in report["notes"]:
        console.print(note, soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for justify in ("left", "left", "right", "left"):
        table.add_column(justify=justify)
    for title, numbers in groups(report["numbers"]).items():
        for index, (label, value, unit) in enumerate(numbers):
            table.add_row("" if index else f"[bold]{title}[/bold]", label, value, unit)
    console.print(table)
    for reason, count in outcome.reasons():
        console.print(f"refused {count}: {_refusal(reason, args)}", soft_wrap=True)
    for problem in outcome.problems:
        console.print(f"[red]{problem}[/red]", soft_wrap=True)
    console.print(f"verdict: {report['verdict']['text']}")
