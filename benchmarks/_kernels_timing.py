"""How benchmarks/kernels.py measures: what the card can do, and the time of one call in three ways.

python  what the host pays: calls issued one after the other until the device has done the last, over their number
events  on the device's own clock, L2 flushed before each call, the host ahead by the flush (triton.testing.do_bench)
graph   a replay of a CUDA graph of many calls, which leaves the device's time alone

Calls go round several input sets that together exceed the L2.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.testing import do_bench

REPEATS = 11
Run = Callable[[Any], object]


@dataclass(frozen=True)
class Card:
    """Measured here and now; bytes per second and microseconds."""

    name: str
    fill: float
    copy: float
    read: float
    launch: tuple[float, float, float]


def from_python(runs: Sequence[Run], sets: Sequence[Any], calls: int) -> list[float]:
    """Microseconds per call of each of ``runs``, taken in turns: a host's speed drifts, a turn's runs share it."""
    for run in runs:
        for x in sets:
            run(x)
    torch.cuda.synchronize()
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(REPEATS):
        for run, mine in zip(runs, times, strict=True):
            start = time.perf_counter()
            for x in itertools.islice(itertools.cycle(sets), calls):
                run(x)
            torch.cuda.synchronize()
            mine.append((time.perf_counter() - start) / calls * 1e6)
    return [statistics.median(mine) for mine in times]


def in_graph(run: Run, sets: Sequence[Any], calls: int) -> float:
    """Microseconds per call."""
    for x in sets:
        run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in itertools.islice(itertools.cycle(sets), calls):
            run(x)
    times = []
    for _ in range(REPEATS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[2:])


def by_events(run: Run, sets: Sequence[Any]) -> float:
    """Microseconds per call."""
    turn = itertools.cycle(sets)
    return 1e3 * float(do_bench(lambda: run(next(turn)), warmup=20, rep=60, return_mode="median"))


def measure_card(empty_launch: Callable[[torch.Tensor], object]) -> Card:
    """Bandwidths over 2 GiB each, and the cost of launching a kernel that does nothing."""
    big = torch.randn(2**29, device="cuda")
    other = torch.empty_like(big)
    size = big.numel() * big.element_size()
    fill = size / by_events(lambda _: other.zero_(), [None]) * 1e6
    copy = 2 * size / by_events(lambda _: other.copy_(big), [None]) * 1e6
    read = size / by_events(lambda _: big.sum(), [None]) * 1e6
    one = big[:16]
    empty: Run = lambda _: empty_launch(one)  # noqa: E731
    return Card(
        torch.cuda.get_device_name(),
        fill,
        copy,
        read,
        (from_python([empty], [None], 400)[0], by_events(empty, [None]), in_graph(empty, [None], 400)),
    )
