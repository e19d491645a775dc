"""What the engine's forward is made of, without an engine: the audit of SGLang's tables, the cut, the chain kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu.errors import InputError
from dsv4_npu.sglang.engine_forward import pieces
from dsv4_npu.sglang.engine_kernels import assign_req_to_token_pool_func, build_tree_kernel_efficient_func
from dsv4_npu.sglang.engine_tables import EngineTables

PAGE, WINDOW = 256, 128
#: FULL, SWA and C128 pages of rows 1 and 2, which have 600 and 2200 tokens.
FULL = {1: [3, 4, 5], 2: [6, 7, 8, 9, 10, 11, 12, 13, 14]}
SWA = {page: 30 - page for pages in FULL.values() for page in pages}
C128 = {1: [2], 2: [3, 4]}
ENDS = {1: 600, 2: 2200}


class FreeList:
    """A sub-allocator as the audit sees it."""

    def __init__(self, num_pages: int, held: set[int]) -> None:
        self.num_pages = num_pages
        self.pages = [page for page in range(1, num_pages + 1) if page not in held]

    def get_all_free_pages(self) -> torch.Tensor:
        return torch.tensor(self.pages)


def memory() -> tuple[Any, Any]:
    """A request pool and an allocator with two sound requests."""
    req_to_token = torch.zeros((4, 3072), dtype=torch.int32)
    sidecar = torch.zeros((4, 2), dtype=torch.int32)
    mapping = torch.zeros(20 * PAGE + PAGE + 1, dtype=torch.int64)
    refcount = torch.zeros(9, dtype=torch.int32)
    for row, pages in FULL.items():
        slots = torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])[: ENDS[row]]
        req_to_token[row, : ENDS[row]] = slots.to(torch.int32)
        for page in pages:
            mapping[page * PAGE : (page + 1) * PAGE] = torch.arange(SWA[page] * PAGE, (SWA[page] + 1) * PAGE)
        sidecar[row, : len(C128[row])] = torch.tensor(C128[row], dtype=torch.int32)
        refcount[C128[row]] = 1
    mapping[-1] = -1
    held = {page for pages in FULL.values() for page in pages}
    allocator = SimpleNamespace(
        page_size=PAGE,
        full_to_swa_index_mapping=mapping,
        c128_page_refcount=refcount,
        full_attn_allocator=FreeList(20, held),
        swa_attn_allocator=FreeList(40, set(SWA.values())),
        c128_attn_allocator=FreeList(8, {2, 3, 4}),
    )
    rows = SimpleNamespace(req_to_token=req_to_token, req_to_c128_sidecar=sidecar, c128_page_size=16)
    return rows, allocator


def look(rows: Any, allocator: Any, starts: tuple[int, int] = (590, 2090)) -> list[str]:
    tables = EngineTables(rows, allocator, WINDOW)
    lengths = [ENDS[1] - starts[0], ENDS[2] - starts[1]]
    written = torch.cat([rows.req_to_token[row, start : ENDS[row]] for row, start in zip((1, 2), starts, strict=True)])
    return tables.violations([1, 2], list(starts), lengths, written)


def test_sound_tables_have_no_violation() -> None:
    assert look(*memory()) == []


def out_of_order(rows: Any, _allocator: Any) -> None:
    rows.req_to_token[1, 5] += 1


def unmapped(_rows: Any, allocator: Any) -> None:
    allocator.full_to_swa_index_mapping[5 * PAGE : 6 * PAGE] = 0


def half_mapped(_rows: Any, allocator: Any) -> None:
    allocator.full_to_swa_index_mapping[5 * PAGE + 30 : 6 * PAGE] += PAGE


def hole(rows: Any, _allocator: Any) -> None:
    rows.req_to_c128_sidecar[2, 0] = 0


def shared_full(rows: Any, _allocator: Any) -> None:
    rows.req_to_token[1, 512:600] = 14 * PAGE + torch.arange(88, dtype=torch.int32)


def shared_swa(_rows: Any, allocator: Any) -> None:
    mapping = allocator.full_to_swa_index_mapping
    mapping[5 * PAGE : 6 * PAGE] = mapping[14 * PAGE : 15 * PAGE]


def held_twice(_rows: Any, allocator: Any) -> None:
    allocator.c128_page_refcount[4] = 2


def free_full(_rows: Any, allocator: Any) -> None:
    allocator.full_attn_allocator.pages.append(7)


def free_swa(_rows: Any, allocator: Any) -> None:
    allocator.swa_attn_allocator.pages.append(SWA[5])


def free_c128(_rows: Any, allocator: Any) -> None:
    allocator.c128_attn_allocator.pages.append(3)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (out_of_order, "row 1: FULL slots"),
        (unmapped, "row 1: SWA slots"),
        (half_mapped, "row 1: SWA slots"),
        (hole, "row 2: the sidecar has a hole"),
        (shared_full, "FULL page 14 is written by rows 1 and 2"),
        (shared_swa, "is written by rows 1 and 2"),
        (held_twice, "C128 page 4, which row 2 writes, is held 2 times"),
        (free_full, "row 2: FULL pages [7] are in use and free"),
        (free_swa, "row 1: SWA pages [25] are in use and free"),
        (free_c128, "row 2: C128 pages [3] are in use and free"),
    ],
)
def test_each_wrong_table_is_named(spoil: Callable[[Any, Any], None], message: str) -> None:
    rows, allocator = memory()
    spoil(rows, allocator)
    # Row 2 closes a C128 window here, so it writes its second C128 page.
    found = look(rows, allocator, (590, 2090))
    assert any(message in one for one in found), found


def test_slots_that_are_not_the_batch_s_are_named() -> None:
    rows, allocator = memory()
    tables = EngineTables(rows, allocator, WINDOW)
    written = rows.req_to_token[1, 591:601]
    assert tables.violations([1], [590], [10], written) == [
        "row 1: req_to_token of positions 590 to 599 is not out_cache_loc"
    ]


def test_tables_are_those_of_our_addressing() -> None:
    rows, allocator = memory()
    tables = EngineTables(rows, allocator, WINDOW).tables()
    assert tables.block_table[1, :3].tolist() == FULL[1]
    assert [int(tables.full_to_swa[page]) for page in FULL[2]] == [SWA[page] for page in FULL[2]]


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 3000)), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_pieces_cover_the_batch_and_end_at_groups(batch: list[tuple[int, int]]) -> None:
    starts, lengths = [s for s, _ in batch], [n for _, n in batch]
    at = list(starts)
    for piece in pieces(starts, lengths, 2048):
        for b, start, length in zip(piece.index, piece.starts, piece.lengths, strict=True):
            assert start == at[b]
            assert length > 0
            assert start // 2048 == (start + length - 1) // 2048, "a forward crosses a group"
            at[b] += length
    assert at == [s + n for s, n in batch]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_slots_are_written_to_each_row(batch: list[tuple[int, int]]) -> None:
    rows = torch.randperm(len(batch)) + 1
    start = torch.tensor([s for s, _ in batch], dtype=torch.int32)
    count = [n for _, n in batch]
    slots = torch.arange(sum(count)) + 1000
    table = torch.zeros((len(batch) + 1, 64), dtype=torch.int32)
    want = table.clone()
    at = 0
    for row, (first, n) in zip(rows.tolist(), batch, strict=True):
        want[row, first : first + n] = slots[at : at + n].to(torch.int32)
        at += n
    end = start + torch.tensor(count, dtype=torch.int32)
    assign_req_to_token_pool_func(rows, table, start, end, slots, len(batch))
    assert torch.equal(table, want)


def chain(topk: int = 1) -> list[torch.Tensor]:
    index, following, sibling = (torch.full((2, 4), -7) for _ in range(3))
    positions = torch.empty(8, dtype=torch.int64)
    build_tree_kernel_efficient_func(
        None, None, torch.tensor([10, 20]), torch.ones(1), positions, index, following, sibling, topk, 3, 4, None
    )
    return [index, following, sibling, positions]


def test_a_chain_is_laid_out_row_after_row() -> None:
    index, following, sibling, positions = chain()
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert following.tolist() == [[1, 2, 3, -1]] * 2
    assert sibling.tolist() == [[-1] * 4] * 2
    assert positions.tolist() == [10, 11, 12, 13, 20, 21, 22, 23]
    with pytest.raises(InputError, match="topk = 2; 1 is needed"):
        chain(topk=2)
