"""Two processes joined by torch.distributed over gloo; forked, so that neither has to import anything again."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _child(rank: int, meeting: Path, work: Callable[[], Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
        pipe.send((True, work()))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def two_processes(folder: Path, first: Callable[[], Any], second: Callable[[], Any], limit: float = 90) -> list[Any]:
    """What ``first`` (rank 0) and ``second`` (rank 1) return; an error in one of them fails the test."""
    context = multiprocessing.get_context("fork")
    pipes, children = [], []
    for rank, work in enumerate((first, second)):
        ours, theirs = context.Pipe()
        child = context.Process(target=_child, args=(rank, folder / "meeting", work, theirs), daemon=True)
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(limit), f"process {rank} did not answer in {limit} s"
            results.append(pipe.recv())
    finally:
        for child in children:
            child.join(5)
            if child.is_alive():
                child.kill()
    for done, value in results:
        assert done, value
    return [value for _, value in results]
