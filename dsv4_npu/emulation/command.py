"""``dsv4-npu run``: decode text prompts speculatively from the pools and compare with the oracle."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dsv4_npu.budget import PoolSizes, sizes_for_tokens
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec
from dsv4_npu.emulation import device as emulated
from dsv4_npu.emulation import tokenizer
from dsv4_npu.emulation.agreement import RankOutcome, Seat, check_ranks, run_on_ranks
from dsv4_npu.emulation.drafters import Drafter, ScriptedDrafter, make_drafter
from dsv4_npu.emulation.engine import Engine, EngineOptions
from dsv4_npu.emulation.model import build_model
from dsv4_npu.emulation.native import PlainDecode
from dsv4_npu.emulation.oracle import Oracle
from dsv4_npu.emulation.picture import RunPicture, report_path
from dsv4_npu.emulation.printing import print_result, print_summary
from dsv4_npu.emulation.result import RunResult, summarise
from dsv4_npu.emulation.stages import OwnDrafter
from dsv4_npu.emulation.stages.command import SPECS, drafter_of, model_of, own_drafter, rule_of, watched
from dsv4_npu.emulation.trees.command import add_tree_arguments, plain_model, refuse_trees, run_plain
from dsv4_npu.errors import ConfigError
from dsv4_npu.options import (
    OPTIONS,
    PLAIN_MODELS,
    check_outputs,
    check_tokens,
    drafts_for,
    file_name,
    finite,
    integer,
    options_named,
    positive,
    seed,
    share_above_zero,
    whole,
    widened,
    writing,
)

#: More requests at once than a float64 emulation on a CPU can be meant for.
MAX_BATCH = 1024
HOST_MIB = 1024
PROMPTS = Path(__file__).with_name("prompts.txt")
#: Fields that messages name, and the options that set them; the context is the longest prompt and what follows it.
_OPTIONS = {
    **OPTIONS,
    "context_len": "--max-new-tokens on top of the longest of --prompts: context",
    "request_rows": "--batch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``run``."""
    parser.add_argument(
        "--model", default="tiny", help="a model name, or the path of a config.json or of its folder (default: tiny)"
    )
    parser.add_argument(
        "--platform", action="append", choices=("a2", "a3", "a5", "cpu"), help="may be repeated (default: a3)"
    )
    parser.add_argument(
        "--spec",
        action="append",
        choices=(*SPECS, "tree"),
        help="may be repeated (default: chain); mtp: a chain from the model's own stage, see docs/draft-stages.md",
    )
    parser.add_argument(
        "--draft-tokens", type=integer, help="drafts per verify; D is one more (chain, mtp: 3, dspark: 5)"
    )
    parser.add_argument(
        "--drafter",
        choices=("ngram", "early-exit", "scripted", "own", "eagle"),
        help="own: the model's draft stages, with memory of their own (default: early-exit, own for mtp, eagle for "
        "tiny-llama)",
    )
    parser.add_argument("--prompts", type=file_name, default=PROMPTS, help="text file, one prompt per paragraph")
    parser.add_argument("--batch", type=whole(1, MAX_BATCH), default=4, help="requests that run at once")
    parser.add_argument("--max-new-tokens", type=positive, default=32)
    parser.add_argument("--accept", choices=("greedy", "rejection", "target-only", "simulated"), default="greedy")
    parser.add_argument("--temperature", type=finite, default=0.0, help="of rejection sampling; 0 is one-hot")
    parser.add_argument("--chunk", type=positive, default=256, help="prompt tokens per prefill forward")
    parser.add_argument("--page-size", type=positive, help="tokens per page (default: the platform's)")
    parser.add_argument("--c128-page-size", type=positive, default=16, help="C128 entries per page; below 16 for tests")
    parser.add_argument("--swa-ratio", type=share_above_zero, default=1.0, help="SWA pages as a share of FULL pages")
    parser.add_argument(
        "--device",
        choices=("cpu", emulated.NAME),
        default="cpu",
        help="npu: the emulated one; see docs/emulated-npu.md",
    )
    parser.add_argument(
        "--rows",
        choices=("fp64", "native"),
        default="fp64",
        help="native: the platform's row formats and float32 states, compared with a plain decode over the same rows; "
        "see docs/native-rows.md",
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        help="positions that the pages of all requests hold (default: every request row filled); few make requests "
        "give theirs back",
    )
    parser.add_argument(
        "--retract",
        choices=("recompute", "snapshot"),
        default="recompute",
        help="how a request that gave its pages back gets its history: computed again, or from host memory",
    )
    parser.add_argument(
        "--host-mib",
        type=positive,
        help=f"host memory for snapshots (default: {HOST_MIB}); the oldest one gives way",
    )
    parser.add_argument("--overlap", action="store_true", help="launch a round before the one before it is learned")
    parser.add_argument("--seed", type=seed, default=0, help="of the model's weights and of the coins")
    add_tree_arguments(parser)
    parser.add_argument("--json", type=file_name, metavar="OUT", help="write every number to this file")
    parser.add_argument(
        "--report", type=file_name, metavar="OUT.html", help="write a picture of the run's memory (HTML)"
    )


def deployment(args: argparse.Namespace, model: ModelSpec, platform: str, spec: str, longest: int) -> CacheConfig:
    """The cache configuration that the options describe, for prompts of up to ``longest`` tokens."""
    rule = rule_of(spec)
    drafts = drafts_for(rule, None if spec == "none" else args.draft_tokens)
    return CacheConfig(
        model_of(model, spec, drafter_of(args.drafter, spec)),
        PlatformSpec.load(platform),
        SpeculationSpec(rule, drafts),
        page_size=args.page_size,
        c128_page_size=args.c128_page_size,
        context_len=longest + args.max_new_tokens,
        request_rows=args.batch,
        kv_row="fp64" if args.rows == "fp64" else None,
        indexer_row="fp64" if args.rows == "fp64" else None,
        emulated_kernels=args.c128_page_size < 16,
    )


def pool_sizes(config: CacheConfig, swa_ratio: float, tokens: int | None = None) -> PoolSizes:
    """Pages for ``tokens`` positions, at most (and if None) for every request row filled to its width."""
    most = config.request_rows * config.width
    return sizes_for_tokens(config, min(tokens or most, most), swa_ratio)


def scripted_drafter(oracle: Oracle | PlainDecode, prompts: list[list[int]], vocab: int) -> Drafter:
    """Accept every length in turn: the drafts are the oracle's tokens up to a length that cycles with the history."""
    by_length = sorted(prompts, key=len, reverse=True)

    def continuation(history: Any, count: int) -> list[int]:
        prompt = next(p for p in by_length if list(history[: len(p)]) == p)
        done = len(history) - len(prompt)
        right = oracle.greedy(prompt, done + count).tokens[done:]
        # A plain decode ends with the context; what lies behind it is never accepted.
        return right + [0] * (count - len(right))

    return ScriptedDrafter(continuation, lambda b, length: b + length, vocab)


def run(args: argparse.Namespace) -> int:
    """Run every combination of platform and speculation; exit status 0 only if all are identical and clean."""
    console = widened(Console())
    if args.temperature < 0:
        raise ConfigError(f"--temperature {args.temperature}; 0 or more is needed")
    if args.host_mib is not None and args.retract != "snapshot":
        raise ConfigError(f"--host-mib {args.host_mib} with --retract {args.retract}; it goes with --retract snapshot")
    for name in ("platform", "spec"):
        if getattr(args, name):
            setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    if args.drafter is not None and args.spec == ["none"]:
        raise ConfigError(f"--drafter {args.drafter} with --spec none: nothing is drafted; leave it out")
    plain = plain_model(args.model)
    if plain is not None:
        return run_plain(args, plain, console)
    refuse_trees(args)
    check_ranks(args.tp, args.device)
    if args.draft_tokens and args.spec == ["none"]:
        raise ConfigError(
            f"--draft-tokens {args.draft_tokens} with --spec none; leave it out or choose chain or dspark"
        )
    if args.temperature and args.accept == "greedy":
        raise ConfigError(f"--temperature {args.temperature} with greedy acceptance; use --accept rejection")
    if args.temperature and args.drafter == "scripted":
        raise ConfigError("the scripted drafter follows the greedy oracle; use it with --temperature 0")
    if args.rows == "native" and args.accept == "simulated":
        raise ConfigError(
            "--rows native with --accept simulated: made-up tokens cannot be compared; use --accept greedy"
        )
    if args.rows == "native" and args.temperature:
        raise ConfigError(
            f"--rows native with --temperature {args.temperature}: tokens are compared with a plain greedy decode; "
            "use --temperature 0"
        )
    if args.overlap and args.drafter in ("ngram", "scripted") and args.spec != ["none"]:
        raise ConfigError(
            f"--overlap with --drafter {args.drafter}: it looks at the history, which the host has one round late; "
            "use --drafter early-exit or own"
        )
    if args.device == emulated.NAME:
        emulated.activate()
    torch.set_num_threads(1)
    spec_model = ModelSpec.load(args.model, PLAIN_MODELS)
    if spec_model.vocab_size < tokenizer.BYTES:
        raise ConfigError(f"model {spec_model.name}: vocab_size = {spec_model.vocab_size}; bytes need 256 token ids")
    texts = tokenizer.read_prompts(args.prompts, "--prompts")
    prompts = [tokenizer.encode(text) for text in texts]
    longest = max(map(len, prompts))
    combinations = list(itertools.product(args.platform or ["a3"], args.spec or ["chain"]))
    # Every configuration is checked before anything runs.
    with options_named(_OPTIONS):
        configs = [deployment(args, spec_model, platform, spec, longest) for platform, spec in combinations]
        for config in configs:
            pool_sizes(config, args.swa_ratio, args.tokens)
    for config in sorted(configs, key=lambda one: -one.width):
        check_tokens(args.tokens, config.page, longest, args.max_new_tokens, config.reserve)
    check_outputs(("--json", args.json), ("--report", args.report), read={"--prompts": args.prompts})
    work = (args, spec_model, list(zip(configs, combinations, strict=True)), prompts)
    if args.tp > 1:
        results = run_on_ranks(args.tp, _rank, *work)
        for result in results:
            print_result(console, result)
    else:
        results = [result for result, _ in _run_all(console, None, *work)]
    if args.json:
        with writing("--json", args.json):
            args.json.write_text(
                json.dumps({"runs": [r.to_json() for r in results]}, indent=1) + "\n", encoding="utf-8"
            )
        console.print(f"numbers written to {args.json}")
    print_summary(console, results)
    return 0 if all(r.ok for r in results) else 1


def _rank(rank: int, *work: Any) -> list[RankOutcome]:
    """One tensor-parallel rank's runs."""
    return [seat.outcome(result) for result, seat in _run_all(Console(quiet=True), rank, *work) if seat is not None]


def _run_all(
    console: Console,
    rank: int | None,
    args: argparse.Namespace,
    spec_model: ModelSpec,
    combinations: list[tuple[CacheConfig, tuple[str, str]]],
    prompts: list[list[int]],
) -> list[tuple[RunResult, Seat | None]]:
    torch.set_num_threads(1)
    model = build_model(spec_model, args.seed)
    oracle = Oracle(model)
    results = []
    for config, (_, spec) in combinations:
        seat = None if rank is None else Seat(rank)
        result = _run_one(args, console, model, oracle, config, spec, prompts, seat)
        results.append((result, seat))
        print_result(console, result)
    return results


def _run_one(
    args: argparse.Namespace,
    console: Console,
    model: Any,
    oracle: Oracle,
    config: CacheConfig,
    name: str,
    prompts: list[list[int]],
    seat: Seat | None = None,
) -> RunResult:
    spec, source = config.speculation, drafter_of(args.drafter, name)
    label = f"{config.model.name} on {config.platform.name}, {name}" + (
        f" D={spec.verify_width}, {source} drafts" if spec.speculative else ""
    )
    if args.accept == "rejection":
        label += f", rejection sampling at temperature {args.temperature:g}"
    if args.device != "cpu":
        label += f", device {args.device} (emulated)"
    if args.overlap:
        label += ", overlap"
    if args.rows == "native":
        label += f", rows {config.kv_row}, keys {config.indexer_row}"
    options = EngineOptions(
        batch=args.batch,
        chunk=args.chunk,
        accept=args.accept,
        temperature=args.temperature,
        seed=args.seed if seat is None else seat.seed(args.seed),
        device=args.device,
        overlap=args.overlap,
        retract=args.retract,
        host_bytes=(args.host_mib or HOST_MIB) << 20,
    )
    plain = None
    if args.rows == "native":
        plain = PlainDecode(model, config, options)
        plain.prepare(prompts, args.max_new_tokens + spec.verify_width)
    drafter: Drafter | OwnDrafter | None = None
    if spec.verify_width > 1:
        if source == "own":
            drafter = own_drafter(model, config.model, name, args.seed)
        elif source == "scripted":
            drafter = scripted_drafter(plain or oracle, prompts, config.model.vocab_size)
        else:
            drafter = make_drafter(source)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        decode = progress.add_task(f"{label}: decode", total=len(prompts) * args.max_new_tokens)

        def tick(engine: Engine) -> None:
            picture.sample()
            if seat is not None and engine.last_round is not None:
                seat.history.append(engine.last_round)
            done = sum(len(r.outputs) for r in [*engine.finished, *engine.running])
            progress.update(decode, completed=done)

        engine = Engine(model, config, pool_sizes(config, args.swa_ratio, args.tokens), drafter, options, on_round=tick)
        picture = RunPicture(engine)
        if seat is not None:
            engine.device.replica = seat.replica(args.batch, spec.verify_width, spec.verify_width, args.seed)
        watch = watched(engine)
        for prompt in prompts:
            engine.submit(prompt, args.max_new_tokens)
        began = time.perf_counter()
        requests = engine.run()
        seconds = time.perf_counter() - began
        check = progress.add_task(f"{label}: oracle", total=len(requests))
        if plain is None and not args.temperature:
            for request in requests:
                oracle.greedy(request.prompt, len(request.outputs))
                progress.advance(check)
        drafts = None if watch is None else watch.compare()
        result = summarise(engine, requests, oracle, label, bool(args.temperature), seconds, plain, drafts)
        if args.report and (seat is None or seat.rank == 0):
            several = len(args.platform or [0]) * len(args.spec or [0]) > 1
            report = report_path(args.report, config.platform.name, name, several)
            with writing("--report", report):
                picture.write(result, report)
        return result
