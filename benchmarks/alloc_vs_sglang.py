"""Our allocator against SGLang 0.5.23's own DSV4 NPU allocator, in one process on one CPU thread.

Both sides do the same operations on the same lengths, one after the other, step by step; pages in use and the offsets
of the slots are compared before a time counts. Times are medians of one run, in microseconds per batch. `make
bench-alloc` runs it in its own environment; `--ours` runs our side alone, without SGLang.

    python benchmarks/alloc_vs_sglang.py [--batches 1,16,64,256] [--contexts 4,64,256,1024] [--json OUT] [--ours]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _our_side import OurSide
from _sglang_side import C128_PAGE, PAGE, SglangSide, prepare

Times = dict[str, dict[str, list[float]]]
BASE = 4096
#: One page of decode steps: how often each case comes up.
PARTS = {"decode: new page": 1, "decode: C128 closes": 1, "decode: no new page": PAGE - 2}
MEAN = "decode: mean over 128 steps"
GROUP = 128 * C128_PAGE


class Race:
    """Runs each operation on every side and keeps the times by case and side."""

    def __init__(self, sides: Sequence[Any]) -> None:
        self.sides = sides
        self.times: Times = {}

    def run(self, case: str | None, call: Callable[[Any], object]) -> None:
        """Time ``call`` on each side under ``case``; the sides take turns in going first."""
        order = self.sides if len(self.times.get(case or "", {}).get(self.sides[0].name, [])) % 2 else self.sides[::-1]
        for side in order:
            begin = time.perf_counter_ns()
            call(side)
            elapsed = (time.perf_counter_ns() - begin) / 1e3
            side.between()
            if case is not None:
                self.times.setdefault(case, {}).setdefault(side.name, []).append(elapsed)

    def check(self, slots: bool = True) -> None:
        """Every side has the same number of pages in use, and the same slots up to the choice of pages.

        We take the C128 page of a FULL page together with it, SGLang when the entry closes: in between, C128 differs.
        """
        first = self.sides[0]
        families = 3 if int(first.lens[0]) % PAGE == 0 else 2
        for side in self.sides[1:]:
            if side.used()[:families] != first.used()[:families]:
                raise SystemExit(f"pages in use differ: {first.name} {first.used()}, {side.name} {side.used()}")
            if slots:
                for family, mine, theirs in zip(
                    ("FULL", "SWA", "C4", "C128"), first.slots(), side.slots(), strict=True
                ):
                    if not torch.equal(mine, theirs):
                        raise SystemExit(f"{family} slots differ: {first.name} {mine}, {side.name} {theirs}")

    def median(self, case: str, name: str) -> float:
        """Median time of a case; of the mean over 128 decode steps, the medians of its parts by their frequency."""
        if case != MEAN:
            return statistics.median(self.times[case][name])
        return sum(count * self.median(part, name) for part, count in PARTS.items()) / PAGE


def decode_case(position: int) -> str:
    """What one decode at ``position`` has to do."""
    if position % PAGE == 0:
        return "decode: new page"
    return "decode: C128 closes" if position % 128 == 127 else "decode: no new page"


def decode_run(race: Race, steps: int) -> None:
    for _ in range(steps):
        case = decode_case(int(race.sides[0].lens[0]))
        race.run(case, lambda side: side.decode())
        race.check()


def extend_run(race: Race, tokens: int, rounds: int) -> None:
    length = int(race.sides[0].lens[0])
    for index in range(rounds + 1):  # the first round warms up
        race.run(f"extend +{tokens}" if index else None, lambda side: (side.allocate(tokens), side.write_tables()))
        race.check()
        race.run(None, lambda side: side.shrink(length))
        race.check(slots=False)
    for _ in range(rounds):
        race.run(None, lambda side: side.allocate(tokens))
        race.run(f"table writes of +{tokens}", lambda side: side.write_tables())
        race.check()
        race.run(None, lambda side: side.shrink(length))


def prefix_run(race: Race, rounds: int) -> None:
    race.run(None, lambda side: side.prepare_prefixes())
    for _ in range(rounds):
        race.run("prefix replacement, 2 pages", lambda side: side.replace())
        race.check(slots=False)


def finish_run(race: Race, length: int, rounds: int) -> None:
    for index in range(rounds):
        race.run("finish" if index else None, lambda side: side.finish())
        race.check(slots=False)
        race.run(None, lambda side: side.open())
        race.run(None, lambda side: (side.allocate(length), side.write_tables()))
        race.check()


def make_sides(batch: int, context: int, ours: bool, backend: str) -> list[Any]:
    pages = batch * (context + GROUP) // PAGE + 2 * 32 * batch
    width = context + 2 * GROUP
    sides: list[Any] = [OurSide(batch, width, pages, backend)]
    if not ours:
        sides.append(SglangSide(batch, width, pages))
    return sides


def started(batch: int, context: int, length: int, ours: bool, backend: str) -> Race:
    race = Race(make_sides(batch, context, ours, backend))
    race.run(None, lambda side: side.open())
    race.run(None, lambda side: (side.allocate(length), side.write_tables()))
    race.check()
    return race


def batch_table(batch: int, ours: bool, backend: str) -> Race:
    """All cases of one batch size, at 4096 tokens of history."""
    race = started(batch, BASE + 2 * GROUP, BASE, ours, backend)
    for tokens, rounds in ((128, 40), (512, 20), (2048, 10)):
        extend_run(race, tokens, rounds)
    decode_run(race, 2 * GROUP)
    race.run(None, lambda side: side.shrink(BASE))
    finish_run(race, BASE, 20)
    prefix_run(race, 100)
    return race


def context_table(batch: int, context: int, ours: bool, backend: str) -> Race:
    """The cases whose cost must not depend on the length of the history."""
    length = context - GROUP
    race = started(batch, context, length, ours, backend)
    extend_run(race, 128, 40)
    decode_run(race, 1024)
    prefix_run(race, 100)
    return race


def show(title: str, races: dict[str, Race], ours: bool) -> list[dict[str, Any]]:
    rows = []
    head = f"{'case':36s} {'':>12s} {'dsv4_npu':>12s}" + ("" if ours else f" {'SGLang':>12s} {'ratio':>8s}")
    print(f"\n{title}\n{head}")
    cases = list(dict.fromkeys(case for race in races.values() for case in race.times))
    cases.insert(cases.index(next(reversed(PARTS))) + 1, MEAN)
    for case in cases:
        for label, race in races.items():
            mine = race.median(case, OurSide.name)
            row: dict[str, Any] = {"case": case, "at": label, "dsv4_npu_us": round(mine, 2)}
            line = f"{case:36s} {label:>12s} {mine:12.1f}"
            if not ours:
                theirs = race.median(case, SglangSide.name)
                row |= {"sglang_us": round(theirs, 2), "ratio": round(theirs / mine, 2)}
                line += f" {theirs:12.1f} {theirs / mine:7.1f}x"
            row["samples"] = len(race.times.get(case, {}).get(OurSide.name, ())) or PAGE
            rows.append(row)
            print(line)
    return rows


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=numbers, default=[1, 16, 64, 256], metavar="N,N,..")
    parser.add_argument("--contexts", type=numbers, default=[4, 64, 256, 1024], metavar="KI,KI,..", help="Ki tokens")
    parser.add_argument("--context-batch", type=int, default=8, help="requests in the table over context lengths")
    parser.add_argument("--backend", choices=("auto", "cpp", "python"), default="auto", help="our ledger")
    parser.add_argument("--ours", action="store_true", help="our side alone; needs no SGLang")
    parser.add_argument("--json", metavar="OUT", help="write the numbers to a file")
    args = parser.parse_args()

    torch.set_num_threads(1)
    if not args.ours:
        prepare()
    by_batch, by_context = {}, {}
    gc.disable()
    for batch in args.batches:
        by_batch[f"batch {batch}"] = batch_table(batch, args.ours, args.backend)
        gc.collect()
    for context in args.contexts:
        by_context[f"{context} Ki"] = context_table(args.context_batch, context * 1024, args.ours, args.backend)
        gc.collect()
    ledger = next(iter((by_batch | by_context).values())).sides[0].alloc.ledger.backend
    about = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": 1,
        "ledger": ledger,
        "unit": "microseconds per batch, median of one run",
    }
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    result: dict[str, Any] = {"about": about}
    if by_batch:
        result["by_batch"] = show(f"by batch, {BASE} tokens of history", by_batch, args.ours)
    if by_context:
        title = f"by context length, batch {args.context_batch}"
        result["by_context"] = show(title, by_context, args.ours)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump(result, out, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
