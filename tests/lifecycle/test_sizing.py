"""Reserve formulas: the worked numbers, and the branch bound against counting pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.config import SpeculationSpec
from dsv4_npu.errors import InputError
from dsv4_npu.spec import sizing


def test_worked_numbers() -> None:
    assert sizing.next_allocated(4352, 4099, 16, 128) == 4352
    assert sizing.next_allocated(256, 250, 8, 128) == 384
    assert sizing.next_allocated(256, 130, 8, 128) == 256
    assert sizing.row_width(2048, 8, 128) == 2176
    assert sizing.tail_start(4099, 128) == 4224
    assert sizing.tail_start(4099, 256) == 4352


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 64))
def test_a_branch_needs_its_worst_case(topk: int, steps: int, page: int) -> None:
    touched = max(len({(offset + i) // page for i in range(-offset, steps)}) for offset in range(page))
    assert sizing.branch_pages(steps, page) == touched
    got = sizing.alloc_len(steps, 1, page, topk)
    assert got == (topk * touched * page if topk > 1 and page > 1 else topk * steps)


@given(st.integers(0, 9))
def test_a_chain_agrees_with_the_configuration(drafts: int) -> None:
    spec = SpeculationSpec("chain", drafts)
    assert sizing.alloc_len(drafts, spec.verify_width, 128) == spec.alloc_len
    assert sizing.reserve(spec.alloc_len) == spec.reserve


@given(st.integers(1, 900), st.integers(2, 40))
def test_the_allocator_reserves_by_the_formula(committed: int, reserve: int) -> None:
    alloc = KVAllocator(AllocSpec(128, 16, 16, 16, 16, 1, 1024), backend="python")
    row = alloc.open("r")
    with alloc.transaction() as plan:
        plan.extend(row, committed)
        plan.commit()
    alloc.commit(row, committed)
    with alloc.transaction() as plan:
        plan.reserve_decode(row, reserve)
        plan.commit()
    assert alloc.allocated(row) == sizing.next_allocated(committed, committed, reserve, 128)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(InputError, match="steps = -1"):
        sizing.alloc_len(-1, 1, 1)
    with pytest.raises(InputError, match="committed = 9"):
        sizing.next_allocated(8, 9, 2, 128)
