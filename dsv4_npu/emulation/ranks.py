"""Processes of a tensor-parallel group on one machine, over gloo."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsv4_npu.errors import Dsv4NpuError

#: A rank that waits longer than this for the others gives up.
PATIENCE = timedelta(minutes=10)
#: Seconds that the other ranks get to report an error of their own once one has failed.
GRACE = 5.0


class RankError(Dsv4NpuError):
    """A rank ended without a result, for a reason that is none of our errors."""


def on_ranks(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """``work(rank, *args)`` in ``world`` new processes with a default process group; the results by rank.

    ``work`` is a function of a module, since the processes import it; arguments and results are pickled.

    Raises:
        Dsv4NpuError: the first one that a rank raised; the others are ended.
        KeyboardInterrupt: Ctrl-C, which the ranks do not see; they are ended at once.
        RankError: a rank failed otherwise.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="dsv4-npu-ranks-") as folder:
        processes, ends = [], []
        for rank in range(world):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(rank, world, str(Path(folder) / "store"), there, work, args), daemon=True
            )
            with _without_interrupts():
                process.start()
            there.close()
            processes.append(process)
            ends.append(here)
        try:
            return _collect(ends)
        except KeyboardInterrupt:
            for process in processes:
                process.kill()
            raise
        finally:
            for process in processes:
                process.join(GRACE)
                if process.is_alive():
                    process.kill()
                    process.join()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that start inside never see Ctrl-C, which the terminal sends to all: one of them has to tell of it."""
    # Starting the tracker unblocks the signal, so it has to be there before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(rank: int, world: int, store: str, end: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=PATIENCE)
        outcome = ("result", work(rank, *args))
    except Dsv4NpuError as error:
        outcome = ("error", error)
    except Exception as error:
        outcome = ("failure", f"rank {rank}: {type(error).__name__}: {error}")
    end.send(outcome)
    end.close()
    if dist.is_initialized() and outcome[0] == "result":
        dist.destroy_process_group()


def _collect(ends: list[Connection]) -> list[Any]:
    results: list[Any] = [None] * len(ends)
    left = dict(zip(ends, range(len(ends)), strict=True))
    failure = ""
    while left:
        ready = wait(list(left), GRACE if failure else None)
        if not ready:
            break
        for end in ready:
            assert isinstance(end, Connection)
            rank = left.pop(end)
            try:
                kind, value = end.recv()
            except EOFError:
                kind, value = "failure", f"rank {rank}: the process ended without a result"
            if kind == "error":
                raise value
            if kind == "failure":
                failure = failure or value
            results[rank] = value
    if failure:
        raise RankError(failure)
    return results
