"""Commit: make the accepted input rows the valid history.

Outputs and committed KV have the same length and are one token apart: with root R, accepted A, C and bonus X the
outputs are [A, C, X] and the KV of [R, A, C] becomes history. X has no KV until the next forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsv4_npu.errors import InputError
from dsv4_npu.spec.verify import VerifyResult

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CommitPlan:
    """Slots of one commit, all int64, requests joined in batch order: ``KV[targets] <- KV[sources]``.

    ``new_lens``: committed length per request after the commit.
    """

    sources: I64
    targets: I64
    new_lens: I64

    @property
    def moves(self) -> tuple[I64, I64]:
        """(targets, sources) of the rows that are not in place; empty for a chain."""
        away = self.sources != self.targets
        return self.targets[away], self.sources[away]


def accepted_rows(result: VerifyResult) -> list[list[int]]:
    """Accepted verify rows of each request, by length.

    Raises:
        InputError: a length outside of 1 to the width of ``accept_index``.
    """
    lens, index = result.accept_lens.tolist(), result.accept_index.tolist()
    for b, (row, n) in enumerate(zip(index, lens, strict=True)):
        if not 1 <= n <= len(row):
            raise InputError(f"request {b}: accept_lens = {n}; 1 to {len(row)}, the width of accept_index, is needed")
    return [row[:n] for row, n in zip(index, lens, strict=True)]


def accepted_tokens(result: VerifyResult) -> list[list[int]]:
    """Tokens appended to each request's output: the accepted drafts, then the bonus.

    Raises:
        InputError: a negative token, which acceptance reports where the target's row has no positive entry.
    """
    predict = result.predict.tolist()
    tokens = [[predict[row] for row in rows] for rows in accepted_rows(result)]
    for b, run in enumerate(tokens):
        if min(run) < 0:
            raise InputError(f"request {b}: no token could be drawn, its target row holds no positive probability")
    return tokens


def plan_commit(window_slots: I64, seq_lens: I64, rows: list[list[int]]) -> CommitPlan:
    """Sources and targets of a commit, from the verify window alone.

    The request's row of the block table is not read again: under overlap it may belong to somebody else by now.

    Args:
        window_slots: int64 ``[bs, D]``; the slot of position ``seq_len + j`` (``out_cache_loc`` of the verify).
        seq_lens: int64 ``[bs]``; committed lengths before the verify.
        rows: accepted verify rows per request, ``b · D + j`` (:func:`accepted_rows`).

    Raises:
        InputError: shapes that do not fit, a row outside of its request's window, a first row that is not the root, a
            row that is accepted twice, or more rows than the window has.
    """
    if window_slots.ndim != 2 or seq_lens.shape != window_slots.shape[:1]:
        raise InputError(
            f"window_slots of shape {window_slots.shape} and seq_lens of shape {seq_lens.shape}; "
            "[bs, D] and [bs] are needed"
        )
    batch, width = window_slots.shape
    if len(rows) != batch:
        raise InputError(f"{len(rows)} lists of accepted rows for {batch} requests; one each is needed")
    flat = window_slots.reshape(-1)
    sources, targets = [], []
    for b, accepted in enumerate(rows):
        if not 1 <= len(accepted) <= width:
            raise InputError(f"request {b}: {len(accepted)} accepted rows; 1 to {width} are possible")
        bad = [row for row in accepted if not b * width <= row < (b + 1) * width]
        if bad:
            raise InputError(f"request {b}: verify row {bad[0]}; {b * width} to {(b + 1) * width - 1} are its rows")
        if accepted[0] != b * width:
            raise InputError(f"request {b}: first accepted row {accepted[0]}; the root, row {b * width}, is needed")
        if len(set(accepted)) != len(accepted):
            raise InputError(f"request {b}: accepted rows {accepted}; each row can be accepted once")
        sources.append(flat[accepted])
        targets.append(window_slots[b, : len(accepted)])
    new_lens = seq_lens + np.array([len(accepted) for accepted in rows], dtype=np.int64)
    empty = np.zeros(0, np.int64)
    return CommitPlan(np.concatenate([*sources, empty]), np.concatenate([*targets, empty]), new_lens)
