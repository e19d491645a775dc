"""Each rule switched off: some checker of the random serving world must see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dsv4_npu.alloc.py_ledger import PyLedger
from dsv4_npu.alloc.py_pages import PyPages
from dsv4_npu.alloc.state import C128
from dsv4_npu.errors import AuditError

from .world import SPECS, World, WorldError, random_run

STEPS = 2500
Mutate = Callable[[pytest.MonkeyPatch], None]


def caught(name: str, seeds: tuple[int, ...] = (1, 2)) -> bool:
    for seed in seeds:
        try:
            random_run(World(SPECS[name]), seed, STEPS)
        except (AuditError, WorldError):
            return True
    return False


def no_rollback_of_c128(patch: pytest.MonkeyPatch) -> None:
    real = PyPages.untake
    patch.setattr(PyPages, "untake", lambda self, full, swa, c128: real(self, full, swa, c128[:0]))


def release_before_retain(patch: pytest.MonkeyPatch) -> None:
    def replace(self: Any, row: int, pages: Any) -> None:
        state = self.state
        old = state.c128_table[row, : len(pages)]
        self._release(old[old > 0].astype(np.int64))
        for page in pages.tolist():
            state.c128_count[page] += 1
        self._put_sidecar(row, np.arange(len(pages)), pages)
        state.c128_cols[row] = max(int(state.c128_cols[row]), len(pages))

    patch.setattr(PyLedger, "_replace_c128", replace)


def early_return_at_length_zero(patch: pytest.MonkeyPatch) -> None:
    real = PyLedger.close

    def close(self: Any, row: int) -> Any:
        if self.state.committed[row] == 0 and self.state.page_state[3][row] == 1:
            self.state.block_table[row] = 0
            self.state.held_cols[row] = self.state.allocated[row] = 0
        return real(self, row)

    patch.setattr(PyLedger, "close", close)


def free_without_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PyPages, "set_tag", lambda self, epoch: None)


def drain_too_early(patch: pytest.MonkeyPatch) -> None:
    real = PyPages.drain
    patch.setattr(PyPages, "drain", lambda self, horizon: real(self, horizon + 1))


def tail_reclaim_without_alignment(patch: pytest.MonkeyPatch) -> None:
    real = PyLedger.trim

    def trim(self: Any, row: int, boundary: int) -> None:
        low = int(self.state.shared_cols[row]) * self.spec.page_size
        committed = int(self.state.committed[row])
        real(self, row, max(low, boundary // self.spec.page_size * self.spec.page_size))
        self.state.committed[row] = min(committed, boundary)

    patch.setattr(PyLedger, "trim", trim)


def swa_mapping_not_cleared(patch: pytest.MonkeyPatch) -> None:
    real = PyPages._unmap

    def unmap(self: Any, full: Any) -> Any:
        kept = self.state.full_to_swa[full].copy()
        freed = real(self, full)
        self.state.full_to_swa[full] = kept
        return freed

    patch.setattr(PyPages, "_unmap", unmap)


def eviction_by_the_speculative_end(patch: pytest.MonkeyPatch) -> None:
    real = PyLedger.evict

    def evict(self: Any, row: int, width: int) -> int:
        committed = int(self.state.committed[row])
        self.state.committed[row] = self.state.allocated[row]
        try:
            return real(self, row, width)
        finally:
            self.state.committed[row] = committed

    patch.setattr(PyLedger, "evict", evict)


def eviction_without_the_window(patch: pytest.MonkeyPatch) -> None:
    real = PyLedger.evict

    def evict(self: Any, row: int, width: int) -> int:
        window = self.spec.window
        object.__setattr__(self.spec, "window", 1)
        try:
            return real(self, row, width)
        finally:
            object.__setattr__(self.spec, "window", window)

    patch.setattr(PyLedger, "evict", evict)


def eviction_of_shared_pages(patch: pytest.MonkeyPatch) -> None:
    real = PyLedger.evict

    def evict(self: Any, row: int, width: int) -> int:
        shared = int(self.state.shared_cols[row])
        self.state.shared_cols[row] = 0
        try:
            return real(self, row, width)
        finally:
            self.state.shared_cols[row] = shared

    patch.setattr(PyLedger, "evict", evict)


def close_frees_shared_pages(patch: pytest.MonkeyPatch) -> None:
    real = PyLedger.close

    def close(self: Any, row: int) -> Any:
        state = self.state
        pages = state.block_table[row, : state.shared_cols[row]]
        state.page_state[0][pages] = 1
        state.full_owner[pages] = row
        return real(self, row)

    patch.setattr(PyLedger, "close", close)


def take_over_without_retain(patch: pytest.MonkeyPatch) -> None:
    real = PyLedger.take_over

    def take_over(self: Any, row: int, columns: int) -> Any:
        pages, c128 = real(self, row, columns)
        self.state.c128_count[c128] -= 1
        return pages, c128

    patch.setattr(PyLedger, "take_over", take_over)


def count_not_set_at_allocation(patch: pytest.MonkeyPatch) -> None:
    real = PyLedger._write_row

    def write(self: Any, row: int, new: int, tail: int, full: Any, swa: Any, c128: Any) -> None:
        real(self, row, new, tail, full, swa, c128)
        self.state.c128_count[c128] = 0

    patch.setattr(PyLedger, "_write_row", write)


def mirror_entry_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = PyPages._mark
    patch.setattr(PyPages, "_mark", lambda self, index: real(self, index[:-1]))


def trim_keeps_c128(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PyLedger, "_cut_c128", lambda self, row, keep: None)


def row_reused_in_flight(patch: pytest.MonkeyPatch) -> None:
    real = PyPages._put

    def put(self: Any, family: int, pages: Any) -> None:
        if family == C128:
            self._push(family, pages)
        else:
            real(self, family, pages)

    patch.setattr(PyPages, "_put", put)


MUTATIONS: dict[str, tuple[Mutate, str]] = {
    mutate.__name__: (mutate, spec)
    for mutate, spec in (
        (no_rollback_of_c128, "group of 2 pages"),
        (release_before_retain, "group of 2 pages"),
        (early_return_at_length_zero, "group of 16 pages"),
        (free_without_epoch, "group of 2 pages"),
        (drain_too_early, "group of 2 pages"),
        (tail_reclaim_without_alignment, "group of 2 pages"),
        (swa_mapping_not_cleared, "group of 2 pages"),
        (eviction_by_the_speculative_end, "group of 2 pages"),
        (eviction_without_the_window, "page of 2 groups"),
        (eviction_of_shared_pages, "group of 2 pages"),
        (close_frees_shared_pages, "page of 2 groups"),
        (take_over_without_retain, "group of 2 pages"),
        (count_not_set_at_allocation, "group of 2 pages"),
        (mirror_entry_forgotten, "group of 2 pages"),
        (trim_keeps_c128, "page of 2 groups"),
        (row_reused_in_flight, "page of 2 groups"),
    )
}


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_mutation_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, spec = MUTATIONS[name]
    with monkeypatch.context() as patch:
        mutate(patch)
        assert caught(spec), f"{name} went unseen"


@pytest.mark.parametrize("name", sorted({spec for _, spec in MUTATIONS.values()}))
def test_without_mutation_nothing_is_seen(name: str) -> None:
    random_run(World(SPECS[name]), 1, 500)
