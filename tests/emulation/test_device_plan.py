"""Ring plans made on the device are those of the host, whatever the lengths and however loose the bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu import addressing
from dsv4_npu.compressor import RingPlan, most_windows, plan_ring, plan_ring_on_device
from dsv4_npu.compressor import device_plan as device_plan_module

RINGS = [(4, 8), (4, 16), (128, 128), (128, 256)]
DUMMY = 10_000


def state_rows(positions: torch.Tensor) -> torch.Tensor:
    return positions * 3 + 1


def plans(ring: tuple[int, int], requests: list[tuple[int, int]], slack: int) -> tuple[RingPlan, RingPlan]:
    starts, lengths = [s for s, _ in requests], [n for _, n in requests]
    width = max(lengths)
    want = plan_ring(*ring, starts, lengths, width, state_rows, DUMMY)
    start = torch.tensor(starts)
    got = plan_ring_on_device(
        *ring, start, start + torch.tensor(lengths), width, want.windows + slack, state_rows, DUMMY
    )
    return got, want


def same(got: RingPlan, want: RingPlan) -> bool:
    made = torch.arange(want.windows) < torch.tensor(want.counts)[:, None]
    return (
        torch.equal(got.prior_rows, want.prior_rows)
        and torch.equal(got.save_rows, want.save_rows)
        and torch.equal(got.gather[:, : want.windows][made], want.gather[made])
        and torch.equal(got.entry_positions[:, : want.windows][made], want.entry_positions[made])
        and bool((got.gather >= 0).all())
        and bool((got.gather < got.prior_rows.shape[1] + got.width).all())
    )


REQUESTS = st.lists(st.tuples(st.integers(0, 1200), st.integers(1, 300)), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(RINGS), REQUESTS, st.integers(0, 3))
def test_same_rows_as_the_host(ring: tuple[int, int], requests: list[tuple[int, int]], slack: int) -> None:
    assert same(*plans(ring, requests, slack))


@pytest.mark.parametrize("ring", RINGS)
def test_around_every_boundary(ring: tuple[int, int]) -> None:
    for start in range(280):
        assert same(*plans(ring, [(start, 1), (start + 3, 6), (max(0, start - 2), 10)], 1))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([4, 128]), st.integers(0, 600), st.integers(0, 20), st.integers(1, 300))
def test_the_bound_of_windows_is_a_bound_and_tight(ratio: int, low: int, spread: int, length: int) -> None:
    closed = [(s + length) // ratio - s // ratio for s in range(low, low + spread + 1)]
    bound = most_windows(ratio, low, low + spread, length)
    assert max(closed) <= bound <= max(closed) + 1
    assert spread or bound == max(closed)


def test_another_save_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [(120, 10), (60, 6)]
    assert same(*plans((128, 256), requests, 0))
    monkeypatch.setattr(device_plan_module.addressing, "write_pad", lambda ring, ratio: 0)
    got, _ = plans((128, 256), requests, 0)
    monkeypatch.undo()
    assert addressing.write_pad(256, 128) > 0
    assert not same(got, plans((128, 256), requests, 0)[1])
