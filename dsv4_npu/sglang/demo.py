"""SGLang's real engine over our memory on a CPU, compared with Hugging Face token by token.

SGLANG_PLATFORM=dsv4_npu_emulated python -m dsv4_npu.sglang.demo [--draft-tokens 3] [--spoil NAME] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from dsv4_npu.errors import Dsv4NpuError, UnavailableError
from dsv4_npu.sglang import activation, engine_npu
from dsv4_npu.sglang.engine_forward import ForwardSetup
from dsv4_npu.sglang.engine_launch import EmulatedEngine
from dsv4_npu.sglang.engine_scenarios import Outcome, Scenarios
from dsv4_npu.sglang.engine_tampers import TAMPERS


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    out = argparse.ArgumentParser(prog="python -m dsv4_npu.sglang.demo", description=__doc__.split("\n\n")[0])
    out.add_argument("--draft-tokens", type=int, default=0, help="drafts per verify; 0: no speculation")
    out.add_argument("--algorithm", choices=("EAGLE", "DSPARK"), default="EAGLE", help="SGLang's worker for the drafts")
    out.add_argument("--device", choices=("cpu", "npu"), default="cpu", help="npu: the emulated device")
    out.add_argument("--seed", type=int, default=0, help="of the prompts")
    out.add_argument("--spoil", choices=sorted(TAMPERS), help="spoil the memory of the prefix scenario: it must show")
    out.add_argument("--start-method", choices=("spawn", "fork"), default="fork", help="of SGLang's processes")
    out.add_argument("--log-level", default="error", help="of SGLang")
    out.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return out


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start the engine, run the scenarios, flush; what came out."""
    began = time.perf_counter()
    setup = ForwardSetup(draft_tokens=options.draft_tokens, algorithm=options.algorithm)
    engine = EmulatedEngine(setup, options.start_method, options.device, log_level=options.log_level)
    try:
        started = time.perf_counter()
        scenarios = Scenarios(engine, options.seed)
        outcomes = scenarios.chunked()
        if options.spoil:
            engine.tamper(options.spoil)
        outcomes += scenarios.prefix()
        if not options.spoil:
            outcomes += scenarios.divided() + scenarios.retracted() + scenarios.aborted()
        flushed = engine.flush()
        report = engine.report()
    finally:
        engine.shutdown()
    return {
        "outcomes": [dataclasses.asdict(one) | {"right": one.right} for one in outcomes],
        "report": report,
        "flushed": flushed,
        "right": all(one.right for one in outcomes),
        "sound": flushed and not report["violations"] and not any(report["held"].values()),
        "seconds": {"start": started - began, "run": time.perf_counter() - started},
    }


def show(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [
        f"{'scenario':30} {'prompt':>6} {'cached':>6} {'out':>4} {'retracted':>9}  identical  {'logits':>8}  margin"
    ]
    for raw in result["outcomes"]:
        one = Outcome(**{key: value for key, value in raw.items() if key != "right"})
        same = "yes" if one.right else "NO"
        lines.append(
            f"{one.scenario:30} {one.prompt:6} {one.cached:6} {one.outputs:4} {one.retracted:9}  {same:9}  "
            f"{one.difference:8.1e}  {one.margin:.1e}"
        )
    report = result["report"]
    lines += [
        "",
        "classes    "
        + ", ".join(f"{what}: {name}" for what, name in report["classes"].items() if what != "components"),
        "forwards   " + ", ".join(f"{name}: {count}" for name, count in report["forwards"].items()),
        f"audit      {len(report['violations'])} violations"
        + "".join(f"\n  {one}" for one in report["violations"][:5]),
        "held       " + ", ".join(f"{what}: {count}" for what, count in report["held"].items()) + " after the flush",
        f"seconds    {result['seconds']['start']:.0f} to start, {result['seconds']['run']:.0f} to run and compare",
        "",
        "every output is Hugging Face's, and nothing is held"
        if result["right"] and result["sound"]
        else "NOT IDENTICAL"
        if not result["right"]
        else "MEMORY IS NOT SOUND",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all is identical and sound, 1 if not, 2 if the engine cannot be had here."""
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    try:
        if options.device == "npu":
            engine_npu.prepare()
        wanted = activation.NPU if options.device == "npu" else activation.EMULATED
        if activation.active() != wanted:
            raise UnavailableError(
                f"the engine on {options.device} runs on another platform: set SGLANG_PLATFORM={wanted}"
            )
        result = run(options)
    except (Dsv4NpuError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=1) if options.json else show(result))
    return 0 if result["right"] and result["sound"] else 1


if __name__ == "__main__":
    sys.exit(main())
