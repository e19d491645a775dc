"""Micro-timings of the allocator: host time per call, by batch size and by context length.

``python benchmarks/alloc_micro.py [--backend cpp|python] [--repeat N] [--json OUT]``. Each cell is the median over the
repeats; a call covers the whole batch. Nothing is flushed to a device unless the row says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dsv4_npu.alloc import AllocSpec, KVAllocator

PAGE, C128_PAGE, WIDTH = 128, 16, 4
RESERVE = 2 * WIDTH
BATCHES = (1, 16, 64, 256)
CONTEXTS = (4096, 65536, 1048576)


@dataclass(frozen=True)
class Cell:
    """One measured call."""

    name: str
    batch: int
    context: int
    median_us: float
    min_us: float


def build(batch: int, context: int, backend: str, slack: int = 64) -> KVAllocator:
    """An allocator whose rows hold ``context`` tokens and some pages more."""
    row = context + 8192
    pages = batch * (context // PAGE + slack) + slack
    c128 = batch * (context // (PAGE * C128_PAGE) + 8) + 64
    spec = AllocSpec(PAGE, C128_PAGE, pages, pages, c128, batch + 1, row, verify_width=WIDTH)
    return KVAllocator(spec, backend=backend)  # type: ignore[arg-type]


def fill(alloc: KVAllocator, batch: int, length: int) -> np.ndarray:
    """``batch`` rows of ``length`` committed tokens."""
    rows = np.array([alloc.open(i) for i in range(batch)], np.int64)
    with alloc.transaction() as tx:
        tx.extend_batch(rows, np.full(batch, length, np.int64))
        tx.commit(slots=False)
    alloc.commit_batch(rows, np.full(batch, length, np.int64))
    alloc.flush()
    return rows


def measure(call: Callable[[], object], repeat: int, before: Callable[[], object] | None = None) -> tuple[float, float]:
    """Median and minimum of the call in microseconds; ``before`` runs outside of the clock."""
    times = []
    for _ in range(repeat):
        if before:
            before()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(times), min(times)


def decode_cells(batch: int, context: int, backend: str, repeat: int) -> list[Cell]:
    alloc = build(batch, context, backend)
    rows = fill(alloc, batch, context - 64)
    alloc.decode_step(rows, RESERVE)
    cells = [Cell("decode, no new page", batch, context, *measure(lambda: alloc.decode_step(rows, RESERVE), repeat))]

    at_edge = np.full(batch, context - 4, np.int64)
    alloc.commit_batch(rows, at_edge)

    def back() -> None:
        for row in rows.tolist():
            alloc.trim(row, context)
        alloc.flush()

    timing = measure(lambda: alloc.decode_step(rows, RESERVE), repeat // 4 + 1, back)
    cells.append(Cell("decode, each row a new page", batch, context, *timing))

    def step_and_flush() -> None:
        alloc.decode_step(rows, RESERVE)
        alloc.flush()

    cells.append(Cell("the same and flush", batch, context, *measure(step_and_flush, repeat // 4 + 1, back)))
    lens = alloc.state.committed[rows].copy()
    cells.append(Cell("commit", batch, context, *measure(lambda: alloc.commit_batch(rows, lens), repeat)))
    evict = measure(lambda: [alloc.evict_window(row) for row in rows.tolist()], repeat)
    cells.append(Cell("evict window (nothing to do)", batch, context, *evict))
    return cells


def extend_cells(batch: int, context: int, backend: str, repeat: int) -> list[Cell]:
    alloc = build(batch, context, backend)
    rows = fill(alloc, batch, context)
    cells = []
    for new in (128, 512, 2048):

        def extend(new: int = new) -> None:
            with alloc.transaction() as tx:
                tx.extend_batch(rows, np.full(batch, context + new, np.int64))
                tx.commit()

        def back() -> None:
            for row in rows.tolist():
                alloc.trim(row, context)
            alloc.flush()

        cells.append(Cell(f"extend by {new} tokens", batch, context, *measure(extend, repeat // 4 + 1, back)))
    return cells


def life_cells(batch: int, context: int, backend: str, repeat: int) -> list[Cell]:
    alloc = build(batch, context, backend)
    held: list[np.ndarray] = [fill(alloc, batch, context)]

    def close() -> None:
        for row in held[0].tolist():
            alloc.close(row)

    def reopen() -> None:
        if alloc.rows():
            return
        alloc.flush()
        held[0] = fill(alloc, batch, context)

    cells = [Cell("close every row", batch, context, *measure(close, max(3, repeat // 50), reopen))]
    reopen()
    rows = held[0]
    columns = alloc.spec.group_tokens * 2 // PAGE
    prefix = {row: alloc.take_over(row, columns) for row in rows.tolist()}
    same = {row: pages for row, (_, pages) in prefix.items()}

    def replace() -> None:
        for row, pages in same.items():
            alloc.replace_c128_prefix(row, pages)

    cells.append(Cell("replace C128 prefix, unchanged", batch, context, *measure(replace, repeat // 4 + 1)))
    everyone = list(same.values())
    turn = [0]

    def rotate() -> None:
        turn[0] += 1
        for i, row in enumerate(same):
            alloc.replace_c128_prefix(row, everyone[(i + turn[0]) % len(everyone)])

    cells.append(Cell("replace C128 prefix, 2 pages", batch, context, *measure(rotate, repeat // 4 + 1)))
    pages = np.concatenate(everyone).astype(np.int64)
    cells.append(Cell("retain", batch, context, *measure(lambda: alloc.retain_c128(pages), 50)))
    cells.append(Cell("release, none freed", batch, context, *measure(lambda: alloc.release_c128(pages), 50)))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="auto", choices=("auto", "cpp", "python"))
    parser.add_argument("--repeat", type=int, default=400)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cells: list[Cell] = []
    for batch in BATCHES:
        for part in (decode_cells, extend_cells, life_cells):
            cells += part(batch, 4096, args.backend, args.repeat)
    for context in CONTEXTS[1:]:
        for part in (decode_cells, extend_cells, life_cells):
            cells += part(16, context, args.backend, args.repeat)
    print(f"{'call':34} {'batch':>6} {'context':>9} {'median us':>10} {'min us':>9}")
    for cell in cells:
        print(f"{cell.name:34} {cell.batch:6} {cell.context:9} {cell.median_us:10.1f} {cell.min_us:9.1f}")
    if args.json:
        with open(args.json, "w") as out:
            json.dump([vars(cell) for cell in cells], out, indent=1)


if __name__ == "__main__":
    main()
