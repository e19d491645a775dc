"""Positions, slots, pages and ring rows against models that keep a dictionary and count."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu import addressing
from dsv4_npu.addressing import (
    c4_slots,
    c128_columns,
    c128_slot_checked,
    c128_slots,
    ceil_to,
    compressed_len,
    floor_to,
    full_slots,
    pages_for,
    request_state_rows,
    ring_size,
    save_start,
    sidecar_width,
    state_pool_rows,
    swa_slots,
    swa_state_rows,
    verify_rows,
    write_pad,
)
from dsv4_npu.errors import InputError

torch.set_num_threads(1)
OVERLAP = {4: 2, 128: 1}

# -- rounding ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(value=st.integers(0, 10**9), unit=st.integers(1, 5000))
def test_rounding(value: int, unit: int) -> None:
    low, high = floor_to(value, unit), ceil_to(value, unit)
    assert low % unit == high % unit == 0
    assert low <= value <= high < low + 2 * unit
    assert high - low == (0 if value % unit == 0 else unit)
    assert pages_for(value, unit) * unit == high


@settings(deadline=None)
@given(tokens=st.integers(0, 10_000), c128_page=st.sampled_from([1, 2, 16, 64]))
def test_entries_and_columns_by_counting(tokens: int, c128_page: int) -> None:
    for ratio in (4, 128):
        assert compressed_len(tokens, ratio) == sum(1 for p in range(tokens) if p % ratio == ratio - 1)
    columns = {(p // 128) // c128_page for p in range(127, tokens, 128)}
    assert c128_columns(tokens, c128_page) == len(columns)
    width = max(tokens, 1)
    assert sidecar_width(width, c128_page) == len({p // (128 * c128_page) for p in range(width)})


def test_shared_prefix_numbers() -> None:
    assert compressed_len(2047, 128) // 16 == 0, "2047 of 2048 shared tokens complete no C128 page"
    assert compressed_len(2048, 128) // 16 == 1
    assert (compressed_len(5000, 128), c128_columns(5000, 16), compressed_len(5000, 4)) == (39, 3, 1250)
    assert sidecar_width(2176, 16) == 2


# -- slots ------------------------------------------------------------------------------------------------------------


class World:
    """Requests whose every position was given a page by a dictionary; the tables are written from it."""

    def __init__(self, seed: int, page: int, c128_page: int, lengths: list[int]) -> None:
        random = np.random.default_rng(seed)
        self.page, self.c128_page, self.lengths = page, c128_page, lengths
        columns = pages_for(max(lengths, default=0) + 1, page)
        sidecar = max(1, c128_columns(columns * page, c128_page))
        rows = len(lengths) + 1
        full_ids = list(random.permutation(np.arange(1, 1 + rows * columns)))
        c128_ids = list(random.permutation(np.arange(1, 1 + rows * sidecar)))
        swa_ids = list(random.permutation(np.arange(1, 1 + rows * columns)))
        self.block_table = torch.zeros(rows, columns, dtype=torch.int32)
        self.c128_table = torch.zeros(rows, sidecar, dtype=torch.int32)
        self.full_to_swa = torch.zeros(1 + rows * columns, dtype=torch.int32)
        #: (row, position) -> FULL slot, SWA slot or -1; (row, entry) -> C128 slot.
        self.full: dict[tuple[int, int], int] = {}
        self.swa: dict[tuple[int, int], int] = {}
        self.c128: dict[tuple[int, int], int] = {}
        for row, length in enumerate(lengths, start=1):
            for column in range(pages_for(length, page)):
                full, resident = int(full_ids.pop()), bool(random.integers(2))
                swa = int(swa_ids.pop()) if resident else 0
                self.block_table[row, column], self.full_to_swa[full] = full, swa
                for offset in range(page):
                    at = row, column * page + offset
                    self.full[at] = full * page + offset
                    self.swa[at] = swa * page + offset if resident else -1
            for column in range(c128_columns(length, c128_page)):
                if random.integers(4):
                    page_id = int(c128_ids.pop())
                    self.c128_table[row, column] = page_id
                    for offset in range(c128_page):
                        self.c128[row, column * c128_page + offset] = page_id * c128_page + offset

    def check(self) -> None:
        for row, length in enumerate(self.lengths, start=1):
            at = torch.arange(length)
            full = full_slots(self.block_table, torch.tensor(row), at, self.page)
            swa = swa_slots(full, self.full_to_swa, self.page)
            assert full.dtype == swa.dtype == torch.int64
            assert full.tolist() == [self.full[row, p] for p in range(length)]
            assert swa.tolist() == [self.swa[row, p] for p in range(length)]
            closing = at[at % 4 == 3]
            # A C4 page shares its id with the FULL page and holds page / 4 entries.
            want = [self.full[row, p] // self.page * (self.page // 4) + p % self.page // 4 for p in closing.tolist()]
            assert c4_slots(full[closing]).tolist() == want
            entries = torch.arange(compressed_len(length, 128))
            slots = c128_slots(self.c128_table, torch.tensor(row), entries, self.c128_page)
            assert slots.tolist() == [self.c128.get((row, e), -1) for e in range(len(entries))]


worlds = {
    "seed": st.integers(0, 2**31),
    "page": st.sampled_from([128, 256]),
    "c128_page": st.sampled_from([1, 2, 4, 16]),
    "lengths": st.lists(st.integers(0, 700), min_size=1, max_size=4),
}


@settings(max_examples=40, deadline=None)
@given(**worlds)
def test_slots_against_a_dictionary(seed: int, page: int, c128_page: int, lengths: list[int]) -> None:
    World(seed, page, c128_page, lengths).check()


def test_slots_of_a_whole_batch_broadcast() -> None:
    world = World(0, 128, 2, [300, 0, 513])
    rows = torch.tensor([3, 1])[:, None]
    at = torch.tensor([[0, 127, 128, 512], [299, 3, 5, 7]])
    full = full_slots(world.block_table, rows, at, 128)
    assert full.tolist() == [[world.full[r, p] for p in row] for r, row in zip((3, 1), at.tolist(), strict=True)]
    swa = swa_slots(full, world.full_to_swa, 128)
    assert swa.tolist() == [[world.swa[r, p] for p in row] for r, row in zip((3, 1), at.tolist(), strict=True)]


def test_nobodys_positions_land_in_the_dummy_page_and_map_nowhere() -> None:
    world = World(1, 128, 2, [1])
    beyond = full_slots(world.block_table, torch.tensor([0, 0]), torch.tensor([0, 127]), 128)
    assert beyond.tolist() == [0, 127], "request row 0 reads the dummy page"
    assert swa_slots(beyond, world.full_to_swa, 128).tolist() == [-1, -1]


def test_a_negative_full_slot_has_no_swa_slot() -> None:
    table = torch.tensor([0, 0, 9], dtype=torch.int32)
    assert swa_slots(torch.tensor([-1, -128, 256, 128]), table, 128).tolist() == [-1, -1, 9 * 128, -1]


def test_a_sidecar_hole_is_no_slot() -> None:
    table = torch.tensor([[0, 0], [7, 0]], dtype=torch.int32)
    assert c128_slots(table, torch.tensor(1), torch.tensor([0, 15, 16]), 16).tolist() == [112, 127, -1]


@pytest.mark.parametrize(
    ("columns", "entry", "slot"), [([7], 0, 112), ([7], 15, 127), ([7, 3], 16, 48), ([7, 3], 31, 63)]
)
def test_checked_c128_slots(columns: list[int], entry: int, slot: int) -> None:
    assert c128_slot_checked(columns, entry, 16) == slot


@pytest.mark.parametrize(
    ("columns", "entry", "says"),
    [
        ([5, 0], 16, "column 1 holds 0"),
        ([5, 0, 7], 40, "column 1 holds 0"),
        ([0, 7], 20, "column 0 holds 0"),
        ([5, -1], 17, "column 1 holds -1"),
        ([5], 16, "only 1 columns"),
        ([], 0, "only 0 columns"),
        ([5, 7], -1, "entry = -1"),
    ],
)
def test_a_hole_or_a_missing_column_is_refused(columns: list[int], entry: int, says: str) -> None:
    with pytest.raises(InputError, match=says):
        c128_slot_checked(columns, entry, 16)


# -- ring rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ring", [8, 16, 128, 256])
def test_request_rings_by_counting(ring: int) -> None:
    """Bank by bank: each request walks its own ring and no other."""
    owner: dict[int, int] = {}
    for row in range(4):
        at = [int(r) for r in request_state_rows(torch.tensor(row), torch.arange(3 * ring), ring)]
        assert at == [request_state_rows(row, p, ring) for p in range(3 * ring)]
        assert at == list(range(row * ring, (row + 1) * ring)) * 3
        for state_row in at:
            assert owner.setdefault(state_row, row) == row


@settings(deadline=None)
@given(
    page=st.sampled_from([128, 256]),
    ring=st.sampled_from([8, 16]),
    slots=st.lists(st.integers(-5, 5000), max_size=30),
)
def test_swa_page_rings_by_counting(page: int, ring: int, slots: list[int]) -> None:
    dummy = 99_999
    rows = swa_state_rows(torch.tensor(slots, dtype=torch.int64), page, ring, dummy).tolist()
    for slot, row in zip(slots, rows, strict=True):
        if slot < 0:
            assert row == dummy
        else:
            bank, offset = divmod(row, ring)
            assert bank == slot // page, "the SWA page owns the row"
            assert offset == slot % page % ring
    assert swa_state_rows(torch.tensor([0]), page, ring, dummy).tolist() == [0], "location 0 is valid"


def test_reachable_c4_rows_of_262144_swa_tokens() -> None:
    page, ring, tokens = 256, 8, 262144
    slots = torch.arange(page, page + tokens)
    rows = swa_state_rows(slots, page, ring, -1)
    assert len(torch.unique(rows)) == 8192
    assert int(rows.max()) < state_pool_rows(tokens // page, ring, 4) - 1, "none of them is the dummy row"


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("banks", [1, 7, 56])
def test_pool_rows_hold_every_bank_and_a_dummy(ratio: int, speculative: bool, banks: int) -> None:
    ring = ring_size(ratio, speculative)
    rows = state_pool_rows(banks, ring, ratio)
    unit = math.lcm(ratio, ring)
    assert rows % unit == 0
    assert banks * ring + ring + 1 <= rows < banks * ring + ring + 1 + unit
    assert request_state_rows(banks, ring - 1, ring) < rows - 1


@pytest.mark.parametrize(
    ("ratio", "speculative", "ring", "pad"),
    [(4, False, 8, 0), (4, True, 16, 10), (128, False, 128, 0), (128, True, 256, 130)],
)
def test_rings_and_pads(ratio: int, speculative: bool, ring: int, pad: int) -> None:
    assert ring_size(ratio, speculative) == ring
    assert write_pad(ring, ratio) == pad


def test_verify_rows() -> None:
    assert verify_rows(2, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert verify_rows(0, 4).shape == (0, 4)


# -- the save rule ----------------------------------------------------------------------------------------------------


SaveRule = Callable[[int, int, int, int], int]


class RingModel:
    """Which position and which attempt each ring row holds; row identity is all that the save rule decides."""

    def __init__(self, ratio: int, ring: int, prefix: int, rule: SaveRule = save_start) -> None:
        self.ratio, self.ring, self.rule = ratio, ring, rule
        self.pad = write_pad(ring, ratio)
        #: position -> the attempt that wrote its valid row; ring offset -> (position, attempt) held.
        self.valid = dict.fromkeys(range(prefix), 0)
        self.held = {p % ring: (p, 0) for p in self.live(prefix)}
        self.committed, self.attempt = prefix, 0

    def live(self, committed: int) -> range:
        """Positions whose rows windows that are still open at ``committed`` read, counted from the windows."""
        window = committed // self.ratio
        first = (window - (OVERLAP[self.ratio] - 1)) * self.ratio
        return range(max(first, 0), committed)

    def batch(self, width: int, accept: int) -> None:
        """Compute ``width`` rows, save by the rule, commit ``accept`` of them."""
        start, end = self.committed, self.committed + width
        self.attempt += 1
        for p in range(self.rule(start, end, self.ratio, self.pad), end):
            self.held[p % self.ring] = (p, self.attempt)
        for p in range(start, start + accept):
            self.valid[p] = self.attempt
        self.committed += accept

    def lost(self) -> list[int]:
        """Live positions whose valid row is not in the ring."""
        return [p for p in self.live(self.committed) if self.held.get(p % self.ring) != (p, self.valid[p])]


SPECULATIVE = [(4, 16), (128, 256)]


def lost_somewhere(ratio: int, ring: int, width: int, prefixes: range, rule: SaveRule = save_start) -> int:
    """Verifies of one width (over prefixes and accept lengths) that lose a live row."""
    lost = 0
    for prefix in prefixes:
        for accept in range(1, width + 1):
            model = RingModel(ratio, ring, prefix, rule)
            model.batch(width, accept)
            lost += bool(model.lost())
    return lost


@pytest.mark.parametrize("width", range(1, 11))
def test_c4_widths_up_to_the_pad_lose_nothing(width: int) -> None:
    assert lost_somewhere(4, 16, width, range(40)) == 0


@pytest.mark.parametrize("width", [1, 2, 6, 127, 128, 129, 130])
def test_c128_widths_up_to_the_pad_lose_nothing(width: int) -> None:
    assert lost_somewhere(128, 256, width, range(120, 140)) == 0


@pytest.mark.parametrize(("ratio", "ring"), SPECULATIVE)
def test_one_row_more_than_the_pad_loses_rows(ratio: int, ring: int) -> None:
    width = write_pad(ring, ratio) + 1
    assert lost_somewhere(ratio, ring, width, range(3 * ratio - 4, 3 * ratio + 4))


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(SPECULATIVE),
    prefix=st.integers(0, 600),
    rounds=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30),
)
def test_rounds_of_any_width_and_acceptance_lose_nothing(
    kind: tuple[int, int], prefix: int, rounds: list[tuple[float, float]]
) -> None:
    ratio, ring = kind
    model = RingModel(ratio, ring, prefix)
    for wide, long in rounds:
        width = 1 + int(wide * (model.pad - 1))
        model.batch(width, 1 + int(long * (width - 1)))
        assert model.lost() == []


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from([(4, 8), (4, 16), (128, 128), (128, 256)]),
    prefix=st.integers(0, 600),
    chunks=st.lists(st.integers(1, 900), min_size=1, max_size=5),
)
def test_prefill_chunks_of_any_size_lose_nothing(kind: tuple[int, int], prefix: int, chunks: list[int]) -> None:
    model = RingModel(*kind, prefix)
    for chunk in chunks:
        model.batch(chunk, chunk)
        assert model.lost() == []


@settings(deadline=None)
@given(
    start=st.integers(0, 2000),
    length=st.integers(0, 900),
    kind=st.sampled_from([(4, 8), (4, 16), (128, 128), (128, 256)]),
)
def test_the_rule_saves_as_much_as_the_ring_can_hold_and_no_row_twice(
    start: int, length: int, kind: tuple[int, int]
) -> None:
    ratio, ring = kind
    first = save_start(start, start + length, ratio, write_pad(ring, ratio))
    assert start <= first <= start + length
    rows = [p % ring for p in range(first, start + length)]
    assert len(rows) == len(set(rows)) <= ring


def without_pad(start: int, end: int, ratio: int, pad: int) -> int:
    del pad
    return save_start(start, end, ratio, 0)


def shorter_pad(start: int, end: int, ratio: int, pad: int) -> int:
    return save_start(start, end, ratio, pad - 1)


def whole_batch(start: int, end: int, ratio: int, pad: int) -> int:
    del end, ratio, pad
    return start


def without_overlap(start: int, end: int, ratio: int, pad: int) -> int:
    return max(start, min(floor_to(end, ratio), end - pad))


@pytest.mark.parametrize(("ratio", "ring", "width"), [(4, 16, 5), (4, 16, 6), (128, 256, 2), (128, 256, 6)])
def test_a_rule_without_the_pad_shows(ratio: int, ring: int, width: int) -> None:
    assert lost_somewhere(ratio, ring, width, range(120, 140), without_pad)


def test_the_rule_without_the_pad_is_right_for_c4_up_to_width_4() -> None:
    assert all(lost_somewhere(4, 16, width, range(40), without_pad) == 0 for width in range(1, 5))


@pytest.mark.parametrize(("ratio", "ring"), SPECULATIVE)
def test_a_pad_that_is_one_short_shows_at_the_widest_verify(ratio: int, ring: int) -> None:
    width = write_pad(ring, ratio)
    assert lost_somewhere(ratio, ring, width, range(3 * ratio - 4, 3 * ratio + 4), shorter_pad)


def test_a_rule_that_forgets_the_overlap_shows() -> None:
    model = RingModel(4, 8, 0, without_overlap)
    model.batch(9, 9)
    assert model.lost()


def test_the_ring_model_itself_sees_a_row_that_is_overwritten() -> None:
    """Saving everything is no way out: the widest verify plus one wraps onto rows that are still live."""
    assert lost_somewhere(4, 16, write_pad(16, 4) + 3, range(8, 24), whole_batch)


# -- mutations of the addresses ---------------------------------------------------------------------------------------


def off_by_one_swa(full: torch.Tensor, full_to_swa: torch.Tensor, page: int) -> torch.Tensor:
    return addressing.swa_slots(full, full_to_swa, page) + 1


def dummy_for_unmapped(full: torch.Tensor, full_to_swa: torch.Tensor, page: int) -> torch.Tensor:
    return full_to_swa[full // page].to(torch.int64) * page + full % page


def wrong_row(table: torch.Tensor, rows: torch.Tensor, at: torch.Tensor, page: int) -> torch.Tensor:
    return addressing.c128_slots(table.roll(1, 0), rows, at, page)


def fixed_page(table: torch.Tensor, rows: torch.Tensor, at: torch.Tensor, page: int) -> torch.Tensor:
    del page
    return addressing.full_slots(table, rows, at.clamp_max(table.shape[1] * 128 - 1), 128)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("swa_slots", off_by_one_swa),
        ("swa_slots", dummy_for_unmapped),
        ("c128_slots", wrong_row),
        ("full_slots", fixed_page),
        ("c4_slots", lambda full: full // 4 + 1),
    ],
)
def test_wrong_addresses_show(monkeypatch: pytest.MonkeyPatch, name: str, mutant: Callable[..., object]) -> None:
    world = World(5, 256, 2, [600, 300, 513])
    world.check()
    monkeypatch.setitem(globals(), name, mutant)
    with pytest.raises(AssertionError):
        world.check()


def test_a_ring_address_off_by_one_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "request_state_rows", lambda rows, at, ring: rows * ring + at % ring + 1)
    with pytest.raises(AssertionError):
        test_request_rings_by_counting(8)


def test_an_unchecked_column_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchecked(columns: list[int], entry: int, page: int) -> int:
        return columns[entry // page] * page + entry % page

    monkeypatch.setitem(globals(), "c128_slot_checked", unchecked)
    with pytest.raises(pytest.fail.Exception):
        test_a_hole_or_a_missing_column_is_refused([5, 0], 16, "holds 0")
