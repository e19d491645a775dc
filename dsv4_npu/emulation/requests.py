"""What is asked of the engine and what comes out: options, requests, records of rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import torch

from dsv4_npu.alloc.request import Request


@dataclass(eq=False)
class RequestRun:
    """One request, or one session: what was asked, what came out, how the rounds went.

    Attributes:
        rid: number in the order of submission.
        prompt: tokens given by the user in this turn, after the history of earlier turns.
        outputs: tokens produced in this turn.
        logits: the target's logits behind each output, in host memory.
        accepts: rows accepted -> verify rounds.
        cached: leading tokens found in the prefix cache at the last admission.
        finish: "stop", "length" or "abort" once the turn is over.
        session: whether the row is kept for another turn.
        life: the request in the life cycle, from the first admission on.
    """

    rid: int
    prompt: list[int]
    max_new: int
    session: bool = False
    outputs: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    accepts: Counter[int] = field(default_factory=Counter)
    cached: int = 0
    finish: str = ""
    life: Request | None = None

    @property
    def request(self) -> Request:
        """The admitted request."""
        assert self.life is not None
        return self.life

    @property
    def row(self) -> int:
        """The request row, 0 without one."""
        return self.life.row if self.life else 0

    @property
    def rounds(self) -> int:
        """Verify rounds so far."""
        return sum(self.accepts.values())

    @property
    def retractions(self) -> int:
        """How often the request gave its memory back to start again."""
        return self.life.retractions if self.life else 0


@dataclass(frozen=True)
class RoundRecord:
    """One verify round: request rows, committed lengths before it, rows accepted (all ``[bs]``)."""

    rows: list[int]
    seq_lens: list[int]
    accept_lens: list[int]


@dataclass(frozen=True)
class EngineOptions:
    """How the loop runs.

    Attributes:
        batch: most requests that run at once.
        chunk: tokens of a prompt that one forward prefills.
        accept: "greedy" or "rejection" (which draws with ``temperature``).
        temperature: 0 makes the target's distribution one-hot.
        clear: run the clear of rejected C128 rows.
        prefix_cache: keep complete prefixes of finished requests for later ones.
        early_exit_layers: layers that the early-exit drafter runs; None: all but the last.
        stop: token ids that end a request.
        seed: of the coins.
        device: "cpu", or "npu" for the emulated one (:mod:`dsv4_npu.emulation.device`).
        overlap: launch a verify round before the one before it is learned.
        retract: how a request gets its history back that had to give up its pages: "recompute" it, or restore a
            "snapshot" from host memory.
        host_bytes: most host memory for snapshots; the least recently used one gives way and is recomputed.
    """

    batch: int = 8
    chunk: int = 256
    accept: Literal["greedy", "rejection"] = "greedy"
    temperature: float = 0.0
    clear: bool = True
    prefix_cache: bool = True
    early_exit_layers: int | None = None
    stop: tuple[int, ...] = ()
    seed: int = 0
    device: str = "cpu"
    overlap: bool = False
    retract: Literal["recompute", "snapshot"] = "recompute"
    host_bytes: int = 1 << 30
