"""The options of ``dsv4-npu plan`` and the deployment that they describe."""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from fractions import Fraction
from typing import NoReturn

from dsv4_npu.budget import DEFAULT_SWA_RATIO, GIB, draft_stages
from dsv4_npu.config import CacheConfig, PlatformSpec, SpeculationSpec
from dsv4_npu.errors import InputError
from dsv4_npu.options import (
    DEFAULT_DRAFTS,
    MOST_ROWS,
    MOST_TOKENS,
    drafts_for,
    gib,
    gib_above_zero,
    integer,
    model_for,
    options_named,
    positive,
    share_above_zero,
    stages,
    whole,
)
from dsv4_npu.planning.plan import Deployment, Plan, make_plan

#: Options of which one replaces the other.
_INSTEAD = {"swa_ratio": "swa_tokens", "swa_tokens": "swa_ratio"}


@dataclass(frozen=True)
class Memory:
    """One device's memory in GiB, as given; ``hbm`` is None where only tokens were asked for."""

    hbm: Fraction | None
    weights: Fraction
    reserve: Fraction
    tp: int


@dataclass(frozen=True)
class Answer:
    """A plan, the memory that it was made for, and what the user should know about it."""

    plan: Plan
    memory: Memory
    notes: tuple[str, ...]


def add_deployment(parser: argparse.ArgumentParser) -> None:
    """The options that describe one deployment."""
    add = parser.add_argument
    add(
        "--model",
        default="v4_flash",
        help="a model name, or the path of a config.json or of its folder (default: v4_flash)",
    )
    add("--platform", default="a3", choices=("a2", "a3", "a5", "cpu"), help="row formats and ownership (default: a3)")
    add("--hbm-gib", type=gib_above_zero, metavar="GIB", help="memory of ONE device, in GiB")
    add(
        "--weights-gib",
        type=gib,
        metavar="GIB",
        help="weights on one device after TP, PP and EP have split them (default: 0); taken off --hbm-gib as it stands",
    )
    add(
        "--reserve-gib",
        type=gib,
        metavar="GIB",
        help="kept free on each device for activations, graphs, communication buffers (default: 0)",
    )
    add(
        "--tp",
        type=positive,
        default=1,
        metavar="N",
        help="tensor-parallel ranks (default: 1). DeepSeek-V4 has one KV head, which cannot be split: every rank holds "
        "all KV memory, so it is not divided by N; only --weights-gib falls with N, and that is given per device",
    )
    add(
        "--tokens",
        type=whole(1, MOST_TOKENS),
        metavar="N",
        help="plan for N tokens instead of the most that fit; checked if both",
    )
    add("--context", type=positive, default=131072, metavar="N", help="longest request in tokens (default: 131072)")
    add("--max-running", type=whole(1, MOST_ROWS), default=64, metavar="N", help="request slots (default: 64)")
    add("--spec", default="chain", choices=tuple(DEFAULT_DRAFTS), help="speculative decode (default: chain)")
    add(
        "--draft-tokens",
        type=integer,
        metavar="K",
        help="drafts per verify; D = K + 1 (chain: 3, dspark: the block size)",
    )
    add(
        "--swa-ratio",
        type=share_above_zero,
        metavar="R",
        help=f"SWA pages as a share of FULL's (default: {DEFAULT_SWA_RATIO})",
    )
    add("--swa-tokens", type=positive, metavar="N", help="SWA for N tokens instead of a share")
    add("--page-size", type=positive, metavar="N", help="tokens per page (default: the platform's, 128 on an NPU)")
    add("--c128-page-size", type=positive, default=16, metavar="N", help="C128 entries per page (default: 16)")


class _CompareParser(argparse.ArgumentParser):
    """The options again, with errors that are raised."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"--compare: {message}")


def other_arguments(args: argparse.Namespace, text: str) -> argparse.Namespace:
    """The arguments changed by ``text``: ``option=value`` pairs between commas, as in 'platform=a5,spec=none'.

    A changed speculation takes its own default of draft tokens. Raises InputError that names --compare.
    """
    parser = _CompareParser(prog="--compare", add_help=False, allow_abbrev=False)
    add_deployment(parser)
    other = copy.copy(args)
    words: list[str] = []
    seen: set[str] = set()
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not name or not equals or not value:
            raise InputError(f"--compare {text!r}: {pair!r} is not option=value, as in 'platform=a5,spec=chain'")
        name = name.removeprefix("--").replace("_", "-")
        if name in seen:
            raise InputError(f"--compare {text!r}: {name} is given twice; a comparison is of two deployments")
        seen.add(name)
        words.append(f"--{name}={value}")
        replaced = _INSTEAD.get(name.replace("-", "_"))
        if replaced is not None:
            setattr(other, replaced, None)
        if name == "spec":
            other.draft_tokens = None
    return parser.parse_args(words, other)


def answer(args: argparse.Namespace, where: str = "") -> Answer:
    """The plan of the deployment that the arguments describe.

    Errors name the option where the library names its field, after ``where``, the option that the arguments came from.
    """
    with options_named(where=where):
        return _answer(args)


def _answer(args: argparse.Namespace) -> Answer:
    model, notes = model_for(args.model, args.spec, "planned for")
    config = CacheConfig(
        model,
        PlatformSpec.load(args.platform),
        SpeculationSpec(args.spec, drafts_for(args.spec, args.draft_tokens, model)),
        page_size=args.page_size,
        c128_page_size=args.c128_page_size,
        context_len=args.context,
        request_rows=args.max_running,
    )
    if args.swa_ratio is not None and args.swa_tokens is not None:
        raise InputError("--swa-ratio and --swa-tokens: give one of them")
    if model.num_heads % args.tp:
        raise InputError(f"--tp = {args.tp}: the {model.num_heads} attention heads of {model.name} do not divide by it")
    memory = Memory(args.hbm_gib, args.weights_gib or Fraction(0), args.reserve_gib or Fraction(0), args.tp)
    ratio = DEFAULT_SWA_RATIO if args.swa_ratio is None else args.swa_ratio
    plan = make_plan(Deployment(config, _pool_bytes(args, memory), args.tokens, ratio, args.swa_tokens))
    return Answer(plan, memory, (*notes, *_notes(plan, memory)))


def _pool_bytes(args: argparse.Namespace, memory: Memory) -> int | None:
    if memory.hbm is None:
        if args.tokens is None:
            raise InputError("give --hbm-gib, the memory of one device, or --tokens")
        if args.weights_gib is not None or args.reserve_gib is not None:
            raise InputError("--weights-gib and --reserve-gib are taken off --hbm-gib: give that too")
        return None
    left = memory.hbm - memory.weights - memory.reserve
    if left <= 0:
        raise InputError(
            f"--hbm-gib = {float(memory.hbm):g}: nothing is left for pools after --weights-gib "
            f"{float(memory.weights):g} and --reserve-gib {float(memory.reserve):g}: raise --hbm-gib, or lower "
            "--weights-gib by splitting the weights over more devices"
        )
    return int(left * GIB)


def _notes(plan: Plan, memory: Memory) -> list[str]:
    notes = []
    slots = plan.deployment.config.request_rows
    if plan.windows < slots:
        notes.append(
            f"SWA holds the windows of {plan.windows} running requests, fewer than the {slots} slots: "
            "raise --swa-ratio or --swa-tokens, or lower --max-running"
        )
    if draft_stages(plan.deployment.config):
        notes.append(f"{stages(plan.deployment.config.model)} with SWA rows of their own on the target's SWA pages")
    if memory.tp > 1:
        notes.append(f"one KV head cannot be split: each of the {memory.tp} ranks holds all of these bytes")
    if memory.hbm is not None and not memory.reserve:
        notes.append("nothing is kept for activations, graphs and communication buffers: see --reserve-gib")
    return notes
