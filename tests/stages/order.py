"""Which compressor rows a verify reads, by the log of the real compressor, for every state that a ring can reach.

A ring's content is followed as *codes*, one per row: what the row's value is worth to whoever reads it next. The codes
are put into the rows as their values, the real plan and the real compressor run over them, and a log of the state's
reads and writes says what was read, and in which order. After a round with ``accept`` rows the written rows below the
new length are right, and those behind it unaccepted; the real clear op empties the latter where it is on. Every length
modulo the ring, every accept length and every state that follows is visited until no new one appears: a round's reads
depend on nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._pytree import tree_map

from dsv4_npu import addressing, ops
from dsv4_npu.compressor import CompressorWeights, compress_batch, plan_ring

I64 = npt.NDArray[np.int64]

#: What a row is worth to its next reader: lost (nothing, or a row of an older position: the one that should be here was
#: not saved or was cleared), the accepted row of the position that reads it, a rejected draft's, or just written.
LOST, RIGHT, UNACCEPTED, NEW = range(4)
PAGE, DIM = 128, 2


class LoggedRows(torch.Tensor):
    """State rows that note every read and write by index: ``(what, rows, codes read)``."""

    log: list[tuple[str, torch.Tensor, torch.Tensor | None]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.as_subclass(torch.Tensor) if isinstance(value, LoggedRows) else value

        result = func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        if func is torch.Tensor.__getitem__:
            args[0].log.append(("read", args[1], codes_of(result)))
        if func is torch.Tensor.__setitem__:
            rows = args[1][0] if isinstance(args[1], tuple) else args[1]
            args[0].log.append(("write", torch.as_tensor(rows), None))
        return result


def codes_of(rows: torch.Tensor) -> torch.Tensor:
    """The codes in state rows ``[..., 2 · overlap · DIM]``; an empty row is one that cannot weigh in a window."""
    code = rows[..., 0].to(torch.int64)
    return torch.where(torch.isneginf(rows[..., -1]), LOST, code)


@dataclass(frozen=True)
class Case:
    """One ring under one rule: ``owner`` ("request" or "page") of its banks, old save rule, clear of C128 rows."""

    ratio: int
    width: int
    owner: str = "request"
    old: bool = False
    clear: bool = False

    @property
    def ring(self) -> int:
        return addressing.ring_size(self.ratio, True)

    @property
    def rows(self) -> int:
        """Rows that belong to one request: its bank, or the banks of the page it is in and of its neighbours."""
        return self.ring if self.owner == "request" else 3 * self.ring

    @property
    def period(self) -> int:
        """Lengths that differ by this see the same rows."""
        return math.lcm(self.ring, self.ratio) if self.owner == "request" else 3 * PAGE

    def slot(self, positions: Any) -> Any:
        if self.owner == "request":
            return positions % self.ring
        return positions // PAGE % 3 * self.ring + positions % self.ring


@dataclass(frozen=True)
class Round:
    """What one batch per state did: ``read [B, H]`` codes (-1: not read) of positions ``n - H ..``, rows afterwards."""

    read: I64
    after: I64
    order: tuple[str, ...]


def run_batch(case: Case, lengths: I64, codes: I64, news: I64) -> Round:
    """Run ``news[b]`` rows behind ``lengths[b]`` positions over rows that hold ``codes [B, rows]``."""
    batch, size = codes.shape
    overlap = addressing.OVERLAP[case.ratio]
    half, dummy = overlap * DIM, batch * size
    state = torch.zeros((batch * size + 1, 2 * half), dtype=torch.float64)
    flat = torch.from_numpy(codes).flatten()
    state[:-1, :half] = flat[:, None].to(torch.float64)
    state[:-1, half:] = torch.where(flat == LOST, float("-inf"), 0.0)[:, None].to(torch.float64)
    state[-1, half:] = float("-inf")
    bank = torch.arange(batch)[:, None] * size
    width = int(news.max())
    plan = plan_ring(
        case.ratio, case.ring, lengths.tolist(), news.tolist(), width, lambda at: bank + case.slot(at), dummy
    )
    logged = state.as_subclass(LoggedRows)
    logged.log = []
    weights = CompressorWeights(
        torch.zeros((case.ratio, half)), torch.ones(DIM), 1e-6, torch.zeros(DIM // 2, dtype=torch.float64)
    )
    new = torch.full((batch, width, half), float(NEW), dtype=torch.float64)
    compress_batch(logged, new, torch.zeros_like(new), plan, weights, torch.from_numpy(lengths))
    read = np.full((batch, overlap * case.ratio - 1), -1, dtype=np.int64)
    for what, rows, seen in logged.log:
        if what == "read":
            assert seen is not None
            read = np.where((rows != dummy).numpy(), seen.numpy(), -1)
    after = codes_of(state[:-1]).view(batch, size).numpy()
    return Round(read, after, tuple(what for what, _, _ in logged.log))


def cleared(case: Case, lengths: I64, accept: int, codes: I64) -> I64:
    """The codes after the real clear of the rows at offsets ``[accept, D)``."""
    batch, size = codes.shape
    state = torch.zeros((1, batch * size, 2), dtype=torch.float64)
    state[0, :, 0] = torch.from_numpy(codes).flatten().to(torch.float64)
    accepted = torch.full((batch,), accept)
    rows, starts = torch.arange(batch), torch.from_numpy(lengths)
    ops.clear_c128_draft_states_(state, rows, starts, accepted, case.ring, case.width)
    return codes_of(state[0]).view(batch, size).numpy()


def accepted(case: Case, lengths: I64, accept: int, after: I64) -> tuple[I64, I64]:
    """Lengths and codes that the next round finds when ``accept`` rows of each were accepted."""
    codes, batch = after.copy(), np.arange(len(after))
    for offset in range(case.width):
        slot = case.slot(lengths + offset)
        new = codes[batch, slot] == NEW
        codes[batch, slot] = np.where(new, RIGHT if offset < accept else UNACCEPTED, codes[batch, slot])
    if case.clear:
        codes = cleared(case, lengths, accept, codes)
    return settled(case, lengths + accept, codes)


def settled(case: Case, lengths: I64, codes: I64) -> tuple[I64, I64]:
    """What is neither read before its position ends nor a candidate of the next round is an older position's: lost."""
    first = np.maximum(0, (lengths // case.ratio - (addressing.OVERLAP[case.ratio] - 1)) * case.ratio)
    live = np.zeros(codes.shape, dtype=bool)
    for back in range(1, addressing.OVERLAP[case.ratio] * case.ratio):
        at = lengths - back
        live[np.arange(len(codes)), case.slot(np.maximum(at, 0))] |= at >= first
    ahead = np.zeros(codes.shape, dtype=bool)
    for offset in range(case.width):
        ahead[np.arange(len(codes)), case.slot(lengths + offset)] = True
    codes = np.where(live | (ahead & (codes == UNACCEPTED)), codes, LOST)
    wrapped = np.where(lengths >= 2 * case.period, lengths - case.period, lengths)
    return wrapped, codes


@dataclass(frozen=True)
class Result:
    """All reachable states of a case, their reads, and where each accept length leads.

    Attributes:
        lengths ``[S]``, follows ``[S, D]``: index of the state after each accept length.
        entries, wrong ``[S, D]``: compressed entries that become history with each accept length, and those of them
            that were made of anything but right rows.
        reads: ring rows read over all states, by code.
    """

    lengths: I64
    follows: I64
    entries: I64
    wrong: I64
    reads: Counter[int]

    def share(self, rounds: int = 700) -> float:
        """Share of wrong entries in the long run, accept lengths uniform in 1..D, every length as likely at first."""
        weight = np.zeros(len(self.lengths))
        # States are numbered from the prompts' on, by length: one state of each length of the second period.
        period = (int(self.lengths.max()) + 1) // 2
        weight[period - 1 : 2 * period - 1] = 1 / period
        width = self.follows.shape[1]
        made = bad = 0.0
        for index in range(rounds):
            if index >= rounds // 2:
                made += float((weight @ self.entries).sum())
                bad += float((weight @ self.wrong).sum())
            moved = np.zeros_like(weight)
            for accept in range(width):
                np.add.at(moved, self.follows[:, accept], weight / width)
            weight = moved
        return bad / made


def explore(case: Case) -> Result:
    """Visit every state that rounds of width D reach from any prompt, and log what each reads."""
    with pytest.MonkeyPatch.context() as patch:
        if case.old:
            patch.setattr(addressing, "save_start", old_rule)
        prompts = np.arange(1, 2 * case.period, dtype=np.int64)
        blank = np.full((len(prompts), case.rows), LOST, dtype=np.int64)
        filled = run_batch(case, np.zeros_like(prompts), blank, prompts).after
        filled = np.where(filled == NEW, RIGHT, filled)
        lengths, codes = settled(case, prompts, filled)
        return _closure(case, lengths, codes)


def old_rule(start: int, end: int, ratio: int, pad: int) -> int:
    """The save rule without the pad: rows before the last boundary in the batch are dropped."""
    return max(start, addressing.floor_to(end, ratio) - (addressing.OVERLAP[ratio] - 1) * ratio)


def _closure(case: Case, lengths: I64, codes: I64) -> Result:
    number: dict[bytes, int] = {}
    kept: list[I64] = []
    follows: list[I64] = []
    entries: list[I64] = []
    wrong: list[I64] = []
    reads: Counter[int] = Counter()

    def enter(lengths: I64, codes: I64) -> tuple[I64, I64]:
        """Numbers of the states, and a mask of those that are new."""
        packed = np.ascontiguousarray(np.concatenate((lengths[:, None], codes), axis=1).astype(np.int16))
        ids, fresh = np.zeros(len(packed), np.int64), np.zeros(len(packed), bool)
        for i, row in enumerate(packed):
            key = row.tobytes()
            fresh[i] = key not in number
            ids[i] = number.setdefault(key, len(number))
        return ids, fresh

    _, new = enter(lengths, codes)
    lengths, codes = lengths[new], codes[new]
    while len(lengths):
        kept.append(lengths)
        done = run_batch(case, lengths, codes, np.full_like(lengths, case.width))
        assert "read" not in done.order[1:], "every read comes before every write"
        values, counts = np.unique(done.read[done.read >= 0], return_counts=True)
        reads.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        made, bad = _entries(case, lengths, done.read)
        entries.append(made)
        wrong.append(bad)
        ahead, next_lengths, next_codes = [], [], []
        for accept in range(1, case.width + 1):
            n, c = accepted(case, lengths, accept, done.after)
            ids, new = enter(n, c)
            ahead.append(ids)
            next_lengths.append(n[new])
            next_codes.append(c[new])
        follows.append(np.stack(ahead, axis=1))
        lengths, codes = np.concatenate(next_lengths), np.concatenate(next_codes)
    every = [np.concatenate(one) for one in (kept, follows, entries, wrong)]
    return Result(every[0], every[1], every[2], every[3], reads)


def _entries(case: Case, lengths: I64, read: I64) -> tuple[I64, I64]:
    """Entries that become history with each accept length ``[B, D]``, and the wrong ones among them."""
    made = np.zeros((len(lengths), case.width), np.int64)
    bad = np.zeros_like(made)
    overlap, history = addressing.OVERLAP[case.ratio], read.shape[1]
    at = lengths[:, None] - history + np.arange(history)
    for window in range(-(-case.width // case.ratio)):
        entry = lengths // case.ratio + window
        closing = entry * case.ratio + case.ratio - 1
        used = (at >= ((entry - overlap + 1) * case.ratio)[:, None]) & (at >= 0)
        spoilt = (used & (read != RIGHT)).any(axis=1)
        for accept in range(1, case.width + 1):
            kept = closing < lengths + accept
            made[:, accept - 1] += kept
            bad[:, accept - 1] += kept & spoilt
    return made, bad
