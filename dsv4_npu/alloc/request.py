"""A request as its life cycle sees it: tokens, counters, row, and the forwards that have not been learned."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from dsv4_npu.alloc.rollback import RingLog
from dsv4_npu.alloc.state import I32, I64
from dsv4_npu.alloc.transaction import OutCacheLoc
from dsv4_npu.errors import InputError

TokenIds = Sequence[int] | npt.NDArray[np.integer]
Ending = Literal["finish", "abort", "retract", "keep"]


class State(enum.Enum):
    """Where a request is."""

    QUEUED = "queued"  # no row: retracted, or a session whose row was taken
    PREFILL = "prefill"  # has a row; tokens before its end have no KV yet
    DECODE = "decode"  # prompt + outputs = committed + 1
    ENDED = "ended"  # stop token or length reached; still has its row
    CLOSING = "closing"  # to be released as soon as its last forward is learned
    KEPT = "kept"  # a session owns the row between turns
    FINISHED = "finished"
    ABORTED = "aborted"


#: States in which the request has a row.
WITH_ROW = frozenset({State.PREFILL, State.DECODE, State.ENDED, State.CLOSING, State.KEPT})


@dataclass(eq=False)
class Request:
    """One request, or one session over its turns.

    ``tokens``: prompt and outputs, all with a known value. ``prompt_len``: tokens given by the user in this turn and
    before. ``cached``: leading tokens that the last admission found in the prefix cache. ``restore``: what the cache
    captured of the C4 rows before ``cached``: the engine copies it into the bank of ``row`` before the first forward.
    ``planned``: end of the last planned prefill chunk. ``unlearned``: steps planned or launched and not learned.
    ``discarded``: decodes since the row was opened or moved back whose outcome nobody wanted.
    ``reason``: why it ended, ``stop`` or ``length``.
    """

    rid: Hashable
    max_new_tokens: int
    stop_ids: frozenset[int]
    log: RingLog
    prompt_len: int = 0
    state: State = State.QUEUED
    row: int = 0
    cached: int = 0
    restore: object | None = None
    planned: int = 0
    unlearned: int = 0
    discarded: int = 0
    reason: Literal["stop", "length"] | None = None
    ending: Ending | None = None
    retractions: int = 0
    _buffer: I32 = field(default_factory=lambda: np.zeros(0, np.int32), repr=False)
    _length: int = 0

    @property
    def tokens(self) -> I32:
        """Prompt and outputs, int32; a view that the next change may leave behind."""
        return self._buffer[: self._length]

    @property
    def outputs(self) -> list[int]:
        """Tokens produced in this turn."""
        return [int(token) for token in self._buffer[self.prompt_len : self._length]]

    @property
    def num_outputs(self) -> int:
        """How many tokens were produced in this turn."""
        return self._length - self.prompt_len

    def __len__(self) -> int:
        return self._length

    def append(self, tokens: Sequence[int] | I32) -> None:
        """Append known tokens."""
        start = self._length
        end = start + len(tokens)
        if end > len(self._buffer):
            grown = np.zeros(max(64, 2 * end), np.int32)
            grown[:start] = self._buffer[:start]
            self._buffer = grown
        self._buffer[start:end] = tokens
        self._length = end

    def cut(self, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        self._length = length
        self.prompt_len = min(self.prompt_len, length)

    def take_outputs(self, run: Sequence[int]) -> None:
        """Append an accepted run up to its end: a stop token in it wins over the length cap.

        Sets ``reason`` when the request has its last token. Later tokens of the run are dropped.
        """
        room = self.max_new_tokens - self.num_outputs
        if len(run) < room and self.stop_ids.isdisjoint(run):
            self.append(run)
            return
        taken = list(run[:room])
        for index, token in enumerate(taken):
            if token in self.stop_ids:
                self.reason = "stop"
                del taken[index + 1 :]
                break
        self.append(taken)
        if self.reason is None and self.num_outputs >= self.max_new_tokens:
            self.reason = "length"


@dataclass(eq=False)
class Step:
    """One forward over a batch, from plan to learn.

    ``rows``: int64 request rows, padded with row 0. ``starts``, ``ends``: int64 positions that it computes, as far as
    the host knows (a decode behind an unlearned one starts up to ``verify_width`` later on the device). ``loc``: slots
    of these positions, requests joined in batch order.
    """

    number: int
    kind: Literal["prefill", "decode"]
    requests: list[Request]
    rows: I64
    starts: I64
    ends: I64
    loc: OutCacheLoc
    epoch: int = 0
    launched: bool = False
    done: bool = False


def token_array(name: str, tokens: TokenIds) -> I32:
    """Token ids as int32; raises InputError for another shape or ids that int32 cannot hold."""
    array = np.asarray(tokens)
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(f"{name} of shape {array.shape} and dtype {array.dtype}: a list of integers is needed")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > np.iinfo(np.int32).max:
        raise InputError(f"{name} holds ids from {low} to {high}: 0 to 2**31 - 1 is allowed")
    return array.astype(np.int32)
