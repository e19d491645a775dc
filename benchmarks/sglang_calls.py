"""What SGLang's calls of its DSV4 NPU memory cost, on its own classes and on ours: one process, one CPU thread.

Both sides do the same with the same lengths; the free slots of both are compared after each case. A time is the CPU
time of the calling thread for one call on the whole batch, repeated with everything warm; what prepares a call and what
undoes it are not timed. The fastest of the repeats counts, in microseconds, since the machine may be shared. It runs
where SGLang 0.5.23 is installed (``make sglang-test`` makes that environment):

    python -W ignore benchmarks/sglang_calls.py [--batch 64] [--repeat 30] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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

from tests.sglang.sides import UNIT, Side, prepare  # noqa: E402

BASE, LENGTH = 4096, 4352
Step = Callable[[Any], object]
Times = dict[str, dict[str, list[float]]]


class Bench(Side):
    """One side with a batch of requests of LENGTH tokens, and the arguments that SGLang has at hand for a call."""

    def admit(self, batch: int, length: int = LENGTH) -> None:
        """Requests of ``length`` tokens."""
        self.reqs = self.open(batch) or []
        self.extend(self.reqs, [length] * batch)
        self.rows = torch.tensor([req.kv.req_pool_idx for req in self.reqs])

    def plan(self, old: int, new: int) -> None:
        """A growth of every request."""
        self.old, self.new = torch.full((len(self.reqs),), old), torch.full((len(self.reqs),), new)
        self.last = self.table.req_to_token[self.rows, old - 1].long()

    def extension(self) -> None:
        """The timed allocation of an extension."""
        self.bundle = self.alloc.alloc_extend(
            self.old,
            self.old,
            self.new,
            self.new,
            self.last,
            int((self.new - self.old).sum()),
            req_pool_indices=self.rows,
            req_to_token_pool=self.table,
        )

    def decode_step(self) -> None:
        """The timed allocation of a decode."""
        self.bundle = self.alloc.alloc_decode(
            self.new, self.new, self.last, req_pool_indices=self.rows, req_to_token_pool=self.table
        )

    def write(self) -> None:
        """The timed table write of an extension."""
        batch = self._batch(self.bundle, self.rows)
        self.parts.hooks["maybe_write_dsv4_extend"](batch, self.rows, self.old, self.new)

    def write_decode(self) -> None:
        """The timed table write of a decode."""
        self.parts.hooks["maybe_write_dsv4_decode"](self._batch(self.bundle, self.rows), self.new, 1)

    def take_back(self) -> None:
        """Undo an allocation that was not written to the tables."""
        slots = self.bundle.out_full_loc.long().view(len(self.reqs), -1)
        for row in slots:
            self.alloc.free_segment(row, start_pos=0)
        if self.ours:
            self.alloc.give_back(self.bundle)
        elif self.bundle.out_c128_loc.numel():
            pages = torch.unique(self.bundle.out_c128_loc // UNIT)
            self.alloc.c128_attn_allocator._release_page_ids(pages[self.alloc.c128_page_refcount[pages] == 0].long())

    def unwrite(self) -> None:
        """Undo an allocation that was."""
        for row in self.bundle.out_full_loc.long().view(len(self.reqs), -1):
            self.alloc.free_segment(row, start_pos=0)
        kept = BASE // 128 // UNIT
        for row in self.rows.tolist():
            pages = self.table.req_to_c128_sidecar[row, kept:]
            self.alloc.release_c128_pages(pages[pages > 0].clone())
            pages.zero_()

    def wait(self) -> None:
        """New requests that matched two cached C128 pages each."""
        kept = self.table.req_to_c128_sidecar[self.rows, :2]
        self.waiting = [types.SimpleNamespace(kv=ReqKvInfo(), c128_prefix_page_ids=pages.clone()) for pages in kept]

    def leave(self) -> None:
        """Their rows again; SGLang releases a row only of a request with a length."""
        for req in self.waiting:
            req.kv.kv_allocated_len = BASE
            self.table.free(req)

    def flip(self) -> None:
        """Every request gets the two prefix pages of its neighbour."""
        self.prefixes = self.table.req_to_c128_sidecar[self.rows.roll(1), :2].clone()
        self.alloc.retain_c128_pages(self.table.req_to_c128_sidecar[self.rows, :2].clone().view(-1))
        self.kept = self.table.req_to_c128_sidecar[self.rows, :2].clone().view(-1)

    def replace(self) -> None:
        """The timed replacement, request by request."""
        for row, pages in zip(self.rows.tolist(), self.prefixes, strict=True):
            self.alloc.replace_req_c128_prefix(row, pages, self.table)

    def replace_batch(self) -> None:
        """The timed replacement as a batch gets its rows; SGLang does it request by request."""
        if not self.ours:
            self.replace()
            return
        self.table.replace_prefixes(dict(zip(self.rows.tolist(), self.prefixes.numpy(), strict=True)))

    def unflip(self) -> None:
        """The cache lets go of the pages that it kept meanwhile."""
        if self.ours:
            self.alloc.release_c128_pages(self.kept)
        else:
            for page in self.kept.view(-1, 2):
                self.alloc.release_c128_pages(page)

    def free_pages(self) -> None:
        """The timed release of every page."""
        for slots in self.held:
            self.alloc.free_segment(slots, start_pos=0)

    def free_rows(self) -> None:
        """The timed release of every row."""
        for req in self.reqs:
            self.table.free(req)

    def slots_held(self) -> None:
        """What the release of the pages is called with."""
        self.held = [self.table.req_to_token[row, :LENGTH].long() for row in self.rows.tolist()]


class Race:
    """Runs a case on both sides, in turns, and keeps the times."""

    def __init__(self, batch: int, repeat: int) -> None:
        pages = batch * 64 + 256
        sizes: dict[str, Any] = {
            "full_pages": pages,
            "c128_pages": pages // 16 + 6 * batch,
            "rows": 2 * batch,
            "context": 16384,
        }
        self.sides = {"SGLang": Bench(False, **sizes), "dsv4_npu": Bench(True, **sizes)}
        self.batch, self.repeat = batch, repeat
        self.times: Times = {}

    def case(self, name: str, before: list[Step], call: Step, after: list[Step]) -> None:
        """``before`` and ``after`` each call, untimed; the first two rounds do not count."""
        for side_name, side in self.sides.items():
            for turn in range(self.repeat + 2):
                for step in before:
                    step(side)
                begin = time.thread_time_ns()
                call(side)
                elapsed = (time.thread_time_ns() - begin) / 1e3
                if turn > 1:
                    self.times.setdefault(name, {}).setdefault(side_name, []).append(elapsed)
                for step in after:
                    step(side)
        theirs, ours = (side.counts() for side in self.sides.values())
        if theirs != ours:
            raise SystemExit(f"{name}: the sides differ: SGLang {theirs}, dsv4_npu {ours}")

    def run(self) -> Times:
        """Every case."""
        for side in self.sides.values():
            side.admit(self.batch, BASE)
        for tokens in (128, 512, 2048):
            plan: Step = lambda side, n=tokens: side.plan(BASE, BASE + n)  # noqa: E731
            self.case(f"extend +{tokens}", [plan], Bench.extension, [Bench.take_back])
            self.case(f"table writes of +{tokens}", [plan, Bench.extension], Bench.write, [Bench.unwrite])
        for side in self.sides.values():
            side.extend(side.reqs, [LENGTH] * self.batch)
        for name, old in (("no new page", 4226), ("C128 closes", 4351)):
            step: Step = lambda side, n=old: side.plan(n, n + 1)  # noqa: E731
            self.case(f"decode: {name}", [step], Bench.decode_step, [])
        self.case("table writes of C128 closes", [], Bench.write_decode, [])
        fresh: Step = lambda side: side.plan(LENGTH, LENGTH + 1)  # noqa: E731
        self.case("decode: new page", [fresh], Bench.decode_step, [Bench.take_back])
        self.case(
            "prefixes of 2 pages, new rows", [Bench.wait], lambda side: side.table.alloc(side.waiting), [Bench.leave]
        )
        self.case("prefixes of 2 pages, as one batch", [Bench.flip], Bench.replace_batch, [Bench.unflip])
        self.case("prefixes of 2 pages, one by one", [Bench.flip], Bench.replace, [Bench.unflip])
        again: list[Step] = [lambda side: side.admit(self.batch)]
        self.case("finish: pages", [Bench.slots_held], Bench.free_pages, [Bench.free_rows, *again])
        self.case("finish: rows", [Bench.slots_held, Bench.free_pages], Bench.free_rows, again)
        return self.times


def main(argv: list[str]) -> None:
    """Run, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    prepare()
    fastest = {
        case: {name: min(values) for name, values in sides.items()}
        for case, sides in Race(options.batch, options.repeat).run().items()
    }
    parts = {"decode: no new page": 126, "decode: C128 closes": 1, "decode: new page": 1}
    fastest["decode: mean over 128 steps"] = {
        name: sum(count * fastest[case][name] for case, count in parts.items()) / 128 for name in ("SGLang", "dsv4_npu")
    }
    print(f"| call, batch {options.batch} | dsv4_npu | SGLang | ratio |\n|---|---|---|---|")
    for case, sides in fastest.items():
        ours, theirs = sides["dsv4_npu"], sides["SGLang"]
        print(f"| {case} | {ours:,.0f} | {theirs:,.0f} | {theirs / ours:.3g} |")
    if options.json:
        about = {
            "batch": options.batch,
            "repeat": options.repeat,
            "torch": torch.__version__,
            "cpu": platform.machine(),
        }
        rounded = {case: {name: round(value, 1) for name, value in sides.items()} for case, sides in fastest.items()}
        options.json.write_text(json.dumps({**about, "microseconds": rounded}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
