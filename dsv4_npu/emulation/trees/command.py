"""``dsv4-npu run`` for models with plain attention: chains and trees over a full-KV pool."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console

from dsv4_npu.config import configuration_file, require_integer
from dsv4_npu.emulation import tokenizer
from dsv4_npu.emulation.agreement import RankOutcome, Seat, check_ranks, run_on_ranks
from dsv4_npu.emulation.oracle import Oracle
from dsv4_npu.emulation.printing import print_result, print_summary
from dsv4_npu.emulation.result import RunResult
from dsv4_npu.emulation.trees.drafting import ScriptedTrees, TreeDrafter
from dsv4_npu.emulation.trees.engine import TreeEngine
from dsv4_npu.emulation.trees.model import BUILT_IN, TINY_NAME, build_target, is_plain
from dsv4_npu.emulation.trees.options import TreeOptions
from dsv4_npu.emulation.trees.result import summarise_trees
from dsv4_npu.errors import ConfigError
from dsv4_npu.options import OPTIONS, check_outputs, check_tokens, integer, options_named, whole, writing
from dsv4_npu.spec.trees import TreeSpec, most_nodes

#: Values of ``--spec`` that a plain model takes.
SPECS = ("none", "chain", "tree")
DRAFTERS = ("eagle", "scripted")
DEFAULT_TOPK, DEFAULT_STEPS, DEFAULT_PAGE = 4, 3, 16
MOST_BRANCHES, MOST_STEPS = 64, 64
_OPTIONS = {
    **OPTIONS,
    "topk": "--topk",
    "steps": "--steps",
    "context_len": "--max-new-tokens on top of the longest of --prompts: context",
    "simulated_tokens": "--simulated-tokens",
    "simulated_length": "--simulated-length",
}


def add_tree_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``run`` that trees and ranks bring along."""
    parser.add_argument("--topk", type=integer, help=f"branches per node of --spec tree (default: {DEFAULT_TOPK})")
    parser.add_argument("--steps", type=integer, help=f"levels of --spec tree (default: {DEFAULT_STEPS})")
    parser.add_argument(
        "--simulated-length", type=integer, help="rows per round of --accept simulated (default: random)"
    )
    parser.add_argument(
        "--simulated-tokens",
        choices=("fixed", "drafts"),
        help="what --accept simulated outputs: one token (default), or (chains only) the drafts",
    )
    parser.add_argument(
        "--tp", type=whole(1), default=1, metavar="N", help="N processes with a replica each; rank 0 decides for all"
    )


def plain_model(source: str) -> Mapping[str, Any] | None:
    """The configuration of a model with plain attention: built in, or a ``config.json``; None for any other."""
    if source in BUILT_IN:
        return BUILT_IN[source]
    path = configuration_file(source)
    if path is None:
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        # Whoever reads it as a DeepSeek-V4 configuration says what is wrong with it.
        return None
    return raw if isinstance(raw, dict) and is_plain(raw) else None


def refuse_trees(args: argparse.Namespace) -> None:
    """Raise ConfigError for options of trees with a DeepSeek-V4 model."""
    _check_ranges(args)
    if "tree" in (args.spec or []) or (args.topk or 1) > 1:
        asked = "--spec tree" if "tree" in (args.spec or []) else f"--topk {args.topk}"
        raise ConfigError(
            f"{asked} with --model {args.model}: DeepSeek-V4 takes chains only, because the compressor ring is "
            "addressed by absolute position, so two tree nodes of one depth would share a state row; "
            f"use --spec chain, or --model {TINY_NAME}"
        )
    given = {
        "--topk": args.topk,
        "--steps": args.steps,
        "--simulated-length": args.simulated_length,
        "--simulated-tokens": args.simulated_tokens,
        "--drafter eagle": args.drafter == "eagle" or None,
        "--accept target-only": args.accept == "target-only" or None,
        "--accept simulated": args.accept == "simulated" or None,
    }
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name} with --model {args.model}: it goes with --model {TINY_NAME}")


def _refuse_dsv4(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that a plain model has no use for."""
    given = {
        "--platform": bool(args.platform),
        "--c128-page-size": args.c128_page_size != 16,
        "--swa-ratio": args.swa_ratio != 1.0,
        "--rows native": args.rows != "fp64",
        "--retract snapshot": args.retract != "recompute",
        "--overlap": args.overlap,
        f"--device {args.device}": args.device != "cpu",
        "--report": args.report is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise ConfigError(f"{name} with --model {args.model}: it goes with DeepSeek-V4 models only")
    for spec in args.spec or []:
        if spec not in SPECS:
            raise ConfigError(f"--spec {spec} with --model {args.model}; one of {', '.join(SPECS)} is needed")
    if args.drafter is not None and args.drafter not in DRAFTERS:
        raise ConfigError(f"--drafter {args.drafter} with --model {args.model}; eagle or scripted is needed")
    if args.accept == "rejection":
        raise ConfigError(
            f"--accept rejection with --model {args.model}: trees have no draft probabilities; use --accept target-only"
        )
    if args.temperature and args.accept != "target-only":
        raise ConfigError(f"--temperature {args.temperature} with --accept {args.accept}; use --accept target-only")
    if args.drafter == "scripted" and (args.temperature or args.accept == "simulated"):
        raise ConfigError(
            "--drafter scripted follows the greedy oracle; it goes with --temperature 0 and without --accept simulated"
        )
    for name, value in (("length", args.simulated_length), ("tokens", args.simulated_tokens)):
        if value is not None and args.accept != "simulated":
            raise ConfigError(f"--simulated-{name} {value} with --accept {args.accept}; use simulated")
    if args.spec == ["none"]:
        for name, value in (("topk", args.topk), ("steps", args.steps), ("draft-tokens", args.draft_tokens)):
            if value is not None:
                raise ConfigError(f"--{name} {value} with --spec none; leave it out, or choose chain or tree")


def _check_ranges(args: argparse.Namespace) -> None:
    for name, value, most in (("--topk", args.topk, MOST_BRANCHES), ("--steps", args.steps, MOST_STEPS)):
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"{name} {value}; 1 to {most} is needed")


def tree_spec(args: argparse.Namespace, kind: str) -> TreeSpec:
    """The shape of a round for one value of ``--spec``.

    Raises:
        ConfigError: numbers out of range, or that do not go with ``kind``.
    """
    drafts = args.draft_tokens
    if kind == "none":
        return TreeSpec(1, 0, 1)
    if drafts is not None and drafts < 1:
        raise ConfigError(f"--draft-tokens {drafts} with --spec {kind}; at least 1 is needed")
    if kind == "chain":
        if args.topk not in (None, 1):
            raise ConfigError(f"--topk {args.topk} with --spec chain; 1, or --spec tree, is needed")
        steps = next((one for one in (args.steps, drafts) if one is not None), DEFAULT_STEPS)
        if drafts is not None and drafts > steps:
            raise ConfigError(
                f"--draft-tokens {drafts} with --spec chain and --steps {steps}: a chain has one draft per step; at "
                f"most {steps} is needed, or more --steps"
            )
        return TreeSpec(1, steps, (steps if drafts is None else drafts) + 1)
    topk = DEFAULT_TOPK if args.topk is None else args.topk
    steps = DEFAULT_STEPS if args.steps is None else args.steps
    if drafts is None:
        drafts = min(most_nodes(topk, steps), topk * (steps + 1)) - 1
    return TreeSpec(topk, steps, drafts + 1)


def run_plain(args: argparse.Namespace, raw: Mapping[str, Any], console: Console) -> int:
    """Run every ``--spec``; exit status 0 only if all are identical and clean."""
    _check_ranges(args)
    _refuse_dsv4(args)
    check_ranks(args.tp, args.device)
    kinds = args.spec or ["tree"]
    with options_named(_OPTIONS):
        for kind in kinds:
            spec = tree_spec(args, kind)
            _options(args, args.seed).check(spec.topk)
            _check_length(args.simulated_length, kind, spec)
    if "vocab_size" not in raw:
        raise ConfigError(f"model {args.model}: vocab_size is missing from the configuration")
    require_integer(raw["vocab_size"], f"model {args.model}: vocab_size")
    if raw["vocab_size"] < tokenizer.BYTES:
        raise ConfigError(f"model {args.model}: vocab_size = {raw['vocab_size']}; bytes need 256 token ids")
    longest = max(len(tokenizer.encode(text)) for text in tokenizer.read_prompts(args.prompts, "--prompts"))
    page = args.page_size or DEFAULT_PAGE
    reserve = max(tree_spec(args, kind).reserve(page) for kind in kinds)
    check_tokens(args.tokens, page, longest, args.max_new_tokens, reserve)
    check_outputs(("--json", args.json), read={"--prompts": args.prompts})
    if args.tp > 1:
        results = run_on_ranks(args.tp, _rank, args, dict(raw))
    else:
        results = [result for result, _ in _run_kinds(args, raw, None)]
    for result in results:
        print_result(console, result)
    if args.json:
        with writing("--json", args.json):
            args.json.write_text(
                json.dumps({"runs": [r.to_json() for r in results]}, indent=1) + "\n", encoding="utf-8"
            )
        console.print(f"numbers written to {args.json}")
    print_summary(console, results)
    return 0 if all(r.ok for r in results) else 1


def _check_length(length: int | None, kind: str, spec: TreeSpec) -> None:
    most = min(spec.depth, spec.width)
    if length is not None and length > most:
        raise ConfigError(
            f"--simulated-length {length} with --spec {kind}; 1 to {most} is needed: no path has more rows, the root "
            "included"
        )


def _rank(rank: int, args: argparse.Namespace, raw: Mapping[str, Any]) -> list[RankOutcome]:
    """One rank's runs."""
    return [seat.outcome(result) for result, seat in _run_kinds(args, raw, rank) if seat is not None]


def _options(args: argparse.Namespace, seed: int) -> TreeOptions:
    return TreeOptions(
        batch=args.batch,
        chunk=args.chunk,
        accept=args.accept,
        temperature=args.temperature,
        seed=seed,
        head_seed=args.seed,
        simulated_length=args.simulated_length,
        simulated_tokens=args.simulated_tokens or "fixed",
    )


def _run_kinds(
    args: argparse.Namespace, raw: Mapping[str, Any], rank: int | None
) -> list[tuple[RunResult, Seat | None]]:
    torch.set_num_threads(1)
    model = build_target(raw, args.seed)
    oracle = Oracle(model)
    prompts = [tokenizer.encode(text) for text in tokenizer.read_prompts(args.prompts)]
    results = []
    for kind in args.spec or ["tree"]:
        seat = None if rank is None else Seat(rank)
        with options_named(_OPTIONS):
            results.append((_run_one(args, model, oracle, prompts, kind, seat), seat))
    return results


def _run_one(
    args: argparse.Namespace, model: Any, oracle: Oracle, prompts: Sequence[list[int]], kind: str, seat: Seat | None
) -> RunResult:
    spec = tree_spec(args, kind)
    options = _options(args, args.seed if seat is None else seat.seed(args.seed))
    page = args.page_size or DEFAULT_PAGE
    engine = TreeEngine(
        model,
        spec,
        context_len=max(map(len, prompts)) + args.max_new_tokens,
        page=page,
        pages=None if args.tokens is None else args.tokens // page,
        drafter=_scripted(oracle, prompts, spec, model.config.vocab_size) if args.drafter == "scripted" else None,
        options=options,
        replica=None if seat is None else seat.replica(args.batch, spec.width, spec.depth, args.seed),
    )
    for prompt in prompts:
        engine.submit(prompt, args.max_new_tokens)
    began = time.perf_counter()
    requests = engine.run()
    seconds = time.perf_counter() - began
    if seat is not None:
        seat.history = engine.history
    return summarise_trees(engine, requests, oracle, _label(args, kind, spec), seconds)


def _label(args: argparse.Namespace, kind: str, spec: TreeSpec) -> str:
    label = f"{args.model}, {kind}"
    if spec.width > 1:
        shape = f" topk={spec.topk} steps={spec.steps}" if kind == "tree" else ""
        label += f"{shape} D={spec.width}, {args.drafter or 'eagle'} drafts"
    if args.accept == "target-only":
        label += f", target-only sampling at temperature {args.temperature:g}"
    if args.accept == "simulated":
        length = "random lengths" if args.simulated_length is None else f"length {args.simulated_length}"
        label += f", simulated acceptance ({length}, {args.simulated_tokens or 'fixed'} tokens)"
    return label


def _scripted(oracle: Oracle, prompts: Sequence[list[int]], spec: TreeSpec, vocab: int) -> TreeDrafter:
    by_length = sorted(prompts, key=len, reverse=True)

    def continuation(history: Sequence[int], count: int) -> list[int]:
        prompt = next(p for p in by_length if list(history[: len(p)]) == p)
        done = len(history) - len(prompt)
        return oracle.greedy(prompt, done + count).tokens[done:]

    return ScriptedTrees(continuation, spec, vocab)
