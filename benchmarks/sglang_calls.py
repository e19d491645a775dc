"""What SGLang's calls of its DSV4 NPU memory cost, on its own classes and on ours: one process, one CPU thread.

Both sides do the same, step by step, and the numbers of free slots are compared before a time counts. Times are medians
in microseconds per batch. It runs where SGLang 0.5.23 is installed (``make sglang-test`` makes that environment):

    python -W ignore benchmarks/sglang_calls.py [--batch 64] [--repeat 40] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["SGLANG_PLATFORM"] = "dsv4_npu_emulated"

import torch  # noqa: E402
from sglang.srt.managers.schedule_batch import ReqKvInfo  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402

load_plugins()

from tests.sglang.sides import PAGE, Side, prepare  # noqa: E402

BASE = 4096
Times = dict[str, dict[str, list[float]]]


class Race:
    """Runs a call on each side in turn and keeps the times of those that count."""

    def __init__(self, batch: int) -> None:
        pages = batch * 64 + 256
        sizes = {"full_pages": pages, "c128_pages": pages // 16 + 6 * batch, "rows": 2 * batch, "context": 16384}
        self.sides = {"SGLang": Side(False, **sizes), "dsv4_npu": Side(True, **sizes)}
        self.batch = batch
        self.times: Times = {}

    def each(self, case: str | None, call: Callable[[Side], object]) -> None:
        """Time ``call`` on each side under ``case`` (None: untimed)."""
        for name, side in self.sides.items():
            begin = time.thread_time_ns()
            call(side)
            elapsed = (time.thread_time_ns() - begin) / 1e3
            if case is not None:
                self.times.setdefault(case, {}).setdefault(name, []).append(elapsed)

    def check(self) -> None:
        """Both sides have the same number of free slots and holders."""
        theirs, ours = (side.counts() for side in self.sides.values())
        if theirs != ours:
            raise SystemExit(f"the sides differ: SGLang {theirs}, dsv4_npu {ours}")


def admit(side: Side, batch: int) -> None:
    """Requests of BASE tokens each."""
    side.reqs = side.open(batch)
    side.extend(side.reqs, [BASE] * batch)
    side.rows = torch.tensor([req.kv.req_pool_idx for req in side.reqs])


def plan_extension(side: Side, tokens: int) -> None:
    """Arguments of the next extension, as SGLang has them at hand."""
    old = torch.tensor([req.kv.kv_allocated_len for req in side.reqs])
    side.old, side.new = old, old + tokens
    side.last = side.table.req_to_token[side.rows, old - 1].long()


def extension(side: Side) -> None:
    count = int((side.new - side.old).sum())
    side.bundle = side.alloc.alloc_extend(
        side.old,
        side.old,
        side.new,
        side.new,
        side.last,
        count,
        req_pool_indices=side.rows,
        req_to_token_pool=side.table,
    )


def table_write(side: Side) -> None:
    side.parts.hooks["maybe_write_dsv4_extend"](side._batch(side.bundle, side.rows), side.rows, side.old, side.new)


def grown(side: Side) -> None:
    """SGLang's own write of the token table, the same on both sides, and the new lengths."""
    slots = side.bundle.out_full_loc.to(torch.int32)
    at = 0
    for req, start, end in zip(side.reqs, side.old.tolist(), side.new.tolist(), strict=True):
        side.table.write((req.kv.req_pool_idx, slice(start, end)), slots[at : at + end - start])
        at += end - start
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end


def decode(side: Side) -> None:
    side.bundle = side.alloc.alloc_decode(
        side.new, side.new, side.last, req_pool_indices=side.rows, req_to_token_pool=side.table
    )


def decode_write(side: Side) -> None:
    side.parts.hooks["maybe_write_dsv4_decode"](side._batch(side.bundle, side.rows), side.new, 1)


def decode_case(position: int) -> str:
    """What a decode at ``position`` has to do."""
    if position % PAGE == 0:
        return "decode: new page"
    return "decode: C128 closes" if position % 128 == 127 else "decode: no new page"


def free_pages(side: Side) -> None:
    for req in side.reqs:
        slots = side.table.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len].long()
        side.alloc.free_segment(slots, start_pos=0)


def free_rows(side: Side) -> None:
    for req in side.reqs:
        side.table.free(req)


def carry_prefixes(side: Side, batch: int) -> None:
    """New requests that matched two cached C128 pages each."""
    kept = side.table.req_to_c128_sidecar[side.rows, :2].clone()
    side.waiting = [
        types.SimpleNamespace(kv=ReqKvInfo(), evicted=0, c128_prefix_page_ids=pages.clone()) for pages in kept
    ]


def measure(batch: int, repeat: int) -> Times:
    """Times of every case."""
    race = Race(batch)
    for round_ in range(repeat):
        timed = round_ > 1
        for tokens in (128, 512, 2048):
            race.each(None, lambda side: admit(side, batch))
            race.each(None, lambda side, n=tokens: plan_extension(side, n))
            race.each(f"extend +{tokens}" if timed else None, extension)
            race.each(f"table writes of +{tokens}" if timed else None, table_write)
            race.each(None, grown)
            race.check()
            if tokens == 128:
                race.each("table writes, nothing new" if timed else None, table_write)
                race.each(None, lambda side: carry_prefixes(side, batch))
                race.each(
                    "rows with prefixes of 2 pages" if timed else None, lambda side: side.table.alloc(side.waiting)
                )
                race.check()
                race.each(None, lambda side: [side.table.free(req) for req in swap_lengths(side.waiting)])
            if tokens == 512 and round_ % 10 == 2:
                for _ in range(PAGE):
                    race.each(None, lambda side: plan_extension(side, 1))
                    case = decode_case(int(race.sides["SGLang"].old[0]))
                    race.each(case if timed else None, decode)
                    race.each(f"table writes of {case}" if timed else None, decode_write)
                    race.each(None, grown)
                race.check()
            if tokens == 2048:
                race.each("finish: pages" if timed else None, free_pages)
                race.each("finish: rows" if timed else None, free_rows)
            else:
                race.each(None, free_pages)
                race.each(None, free_rows)
            race.check()
    return race.times


def swap_lengths(reqs: list[Any]) -> list[Any]:
    """SGLang releases a row only of a request with a length."""
    for req in reqs:
        req.kv.kv_allocated_len = BASE
    return reqs


def main(argv: list[str]) -> None:
    """Run, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=24)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    prepare()
    medians = {
        case: {name: statistics.median(values) for name, values in sides.items()}
        for case, sides in measure(options.batch, options.repeat).items()
    }
    print(f"| call, batch {options.batch} | dsv4_npu | SGLang | ratio |\n|---|---|---|---|")
    for case, sides in sorted(medians.items()):
        ours, theirs = sides["dsv4_npu"], sides["SGLang"]
        print(f"| {case} | {ours:,.0f} | {theirs:,.0f} | {theirs / ours:.3g} |")
    if options.json:
        options.json.write_text(json.dumps({"batch": options.batch, "microseconds": medians}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
