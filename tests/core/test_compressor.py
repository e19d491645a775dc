"""The compressor against one-token-at-a-time decode and against the formula over the whole history."""

from __future__ import annotations

import functools

import pytest
import torch

from dsv4_npu import addressing
from dsv4_npu.compressor import CompressorWeights, compress_batch, plan_ring
from dsv4_npu.compressor import plan as plan_module
from dsv4_npu.compressor.reference import reset_dummy_row
from dsv4_npu.errors import InputError

DIM = 6
ROPE = 4
HISTORY = 264


def weights(ratio: int) -> CompressorWeights:
    gen = torch.Generator().manual_seed(ratio)
    width = addressing.OVERLAP[ratio] * DIM
    return CompressorWeights(
        ape=torch.randn(ratio, width, generator=gen, dtype=torch.float64),
        norm=torch.rand(DIM, generator=gen, dtype=torch.float64) + 0.5,
        eps=1e-6,
        inv_freq=torch.tensor([1.0, 0.1], dtype=torch.float64),
    )


def tokens(ratio: int, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    width = addressing.OVERLAP[ratio] * DIM
    return (
        torch.randn(count, width, generator=gen, dtype=torch.float64),
        torch.randn(count, width, generator=gen, dtype=torch.float64),
    )


def formula(kv: torch.Tensor, gate: torch.Tensor, ratio: int) -> torch.Tensor:
    """All entries of a history by the definition, channel by channel loops over windows and rows only."""
    w = weights(ratio)
    entries = []
    for i in range(kv.shape[0] // ratio):
        values, scores = [], []
        if ratio == 4:
            for j in range(4):
                p = 4 * (i - 1) + j
                if p >= 0:
                    values.append(kv[p, :DIM])
                    scores.append(gate[p, :DIM] + w.ape[p % 4, :DIM])
        for j in range(ratio):
            p = ratio * i + j
            values.append(kv[p, -DIM:])
            scores.append(gate[p, -DIM:] + w.ape[p % ratio, -DIM:])
        weight = torch.softmax(torch.stack(scores), 0)
        entry = (weight * torch.stack(values)).sum(0)
        entry = entry / torch.sqrt((entry * entry).mean() + w.eps) * w.norm
        for c in range(ROPE // 2):
            angle = ratio * i * w.inv_freq[c]
            a, b = entry[DIM - ROPE + 2 * c].clone(), entry[DIM - ROPE + 2 * c + 1].clone()
            entry[DIM - ROPE + 2 * c] = a * angle.cos() - b * angle.sin()
            entry[DIM - ROPE + 2 * c + 1] = a * angle.sin() + b * angle.cos()
        entries.append(entry)
    return torch.stack(entries) if entries else kv.new_zeros((0, DIM))


class Ring:
    """One request-scoped ring pool driven directly, with the entries it produced so far."""

    def __init__(self, ratio: int, ring: int, requests: int) -> None:
        self.ratio, self.ring = ratio, ring
        rows = addressing.state_pool_rows(requests, ring, ratio)
        self.dummy = rows - 1
        width = 2 * addressing.OVERLAP[ratio] * DIM
        self.state = torch.zeros(rows, width, dtype=torch.float64)
        self.state[:, width // 2 :] = float("-inf")
        self.entries: dict[tuple[int, int], torch.Tensor] = {}

    def step(self, rows, starts, lengths, kv, gate) -> None:
        at = torch.tensor(rows)[:, None]
        plan = plan_ring(
            self.ratio,
            self.ring,
            starts,
            lengths,
            kv.shape[1],
            lambda p: addressing.request_state_rows(at, p, self.ring),
            self.dummy,
        )
        out = compress_batch(self.state, kv, gate, plan, weights(self.ratio), torch.tensor(starts))
        for b, row in enumerate(rows):
            for e in range(plan.counts[b]):
                self.entries[row, plan.first_entry[b] + e] = out[b, e].clone()

    def serial(self, row: int, kv: torch.Tensor, gate: torch.Tensor) -> None:
        for p in range(kv.shape[0]):
            self.step([row], [p], [1], kv[None, p : p + 1], gate[None, p : p + 1])


def live_rows(ratio: int, ring: int, committed: int) -> list[int]:
    """Positions whose rows a window that closes at or after ``committed`` can still read."""
    oldest = (committed // ratio - (addressing.OVERLAP[ratio] - 1)) * ratio
    return list(range(max(oldest, 0), committed))


@functools.cache
def serial_decode(ratio: int, ring: int) -> tuple[list[torch.Tensor], dict[tuple[int, int], torch.Tensor]]:
    """States after 0, 1, 2, ... tokens of one-token-at-a-time decode of request 1, and all its entries."""
    kv, gate = tokens(ratio, HISTORY)
    pool = Ring(ratio, ring, 1)
    states = [pool.state.clone()]
    for p in range(HISTORY):
        pool.step([1], [p], [1], kv[None, p : p + 1], gate[None, p : p + 1])
        states.append(pool.state.clone())
    return states, pool.entries


def check_verify(ratio: int, ring: int, prefix: int, width: int, accept: int) -> None:
    """A verify of ``width`` rows of which ``accept`` are right leaves the live rows and entries of serial decode."""
    kv, gate = tokens(ratio, HISTORY)
    wrong_kv, wrong_gate = tokens(ratio, width, seed=99)
    wrong_kv[:accept], wrong_gate[:accept] = kv[prefix : prefix + accept], gate[prefix : prefix + accept]
    states, entries = serial_decode(ratio, ring)
    pool = Ring(ratio, ring, 1)
    pool.state.copy_(states[prefix])
    pool.step([1], [prefix], [width], wrong_kv[None], wrong_gate[None])
    rows = [ring + p % ring for p in live_rows(ratio, ring, prefix + accept)]
    torch.testing.assert_close(pool.state[rows], states[prefix + accept][rows], rtol=0, atol=0)
    for entry in range(prefix // ratio, (prefix + accept) // ratio):
        torch.testing.assert_close(pool.entries[1, entry], entries[1, entry], rtol=1e-12, atol=1e-12)


NEAR = [120 + d for d in (4, 5, 6, 7)] + [128 + d for d in range(4)]


@pytest.mark.parametrize("width", range(1, 11))
def test_c4_verify_leaves_what_serial_decode_leaves(width: int) -> None:
    for prefix in [*range(14), *NEAR]:
        for accept in range(1, width + 1):
            check_verify(4, 16, prefix, width, accept)


@pytest.mark.parametrize("width", [1, 2, 5, 10, 64, 129, 130])
def test_c128_verify_leaves_what_serial_decode_leaves(width: int) -> None:
    for prefix in (0, 3, *NEAR):
        for accept in {1, 2, (width + 1) // 2, width}:
            if accept <= width:
                check_verify(128, 256, prefix, width, accept)


def test_prefix_6_verify_6_to_13_accept_1() -> None:
    check_verify(4, 16, 6, 8, 1)


def old_save_start(start: int, end: int, ratio: int, pad: int) -> int:
    """The rule without the pad term: what newer rules replaced, kept here as a mutation."""
    del pad
    return max(start, addressing.floor_to(end, ratio) - (addressing.OVERLAP[ratio] - 1) * ratio)


@pytest.mark.parametrize(("ratio", "ring", "width"), [(4, 16, 6), (128, 256, 6), (128, 256, 2)])
def test_the_old_save_rule_loses_accepted_rows(
    monkeypatch: pytest.MonkeyPatch, ratio: int, ring: int, width: int
) -> None:
    monkeypatch.setattr(plan_module.addressing, "save_start", old_save_start)
    lost = 0
    for prefix in range(120, 132):
        for accept in range(1, width + 1):
            try:
                check_verify(ratio, ring, prefix, width, accept)
            except AssertionError:
                lost += 1
    assert lost


def test_width_11_is_wrong_on_a_c4_ring_of_16() -> None:
    wrong = 0
    for prefix in range(8, 24):
        for accept in range(1, 12):
            try:
                check_verify(4, 16, prefix, 11, accept)
            except AssertionError:
                wrong += 1
    assert wrong, "the write pad says 10; a width of 11 must lose rows somewhere"


@pytest.mark.parametrize(("ratio", "ring"), [(4, 8), (4, 16), (128, 128), (128, 256)])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 64, 129, 300])
def test_chunked_prefill_gives_the_formula(ratio: int, ring: int, chunk: int) -> None:
    total = 391
    kv, gate = tokens(ratio, total)
    pool = Ring(ratio, ring, 1)
    for start in range(0, total, chunk):
        part = slice(start, min(start + chunk, total))
        pool.step([1], [start], [part.stop - start], kv[None, part], gate[None, part])
    want = formula(kv, gate, ratio)
    assert len(pool.entries) == len(want) == total // ratio
    for i, entry in enumerate(want):
        torch.testing.assert_close(pool.entries[1, i], entry, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("ratio", [4, 128])
def test_ragged_batch_equals_one_by_one(ratio: int) -> None:
    ring = addressing.ring_size(ratio, True)
    totals = [0, 5, 128, 259]
    together, alone = Ring(ratio, ring, 4), Ring(ratio, ring, 4)
    data = [tokens(ratio, n + 9, seed=n) for n in totals]
    for row, (total, (kv, gate)) in enumerate(zip(totals, data, strict=True), start=1):
        together.serial(row, kv[:total], gate[:total])
        alone.serial(row, kv[:total], gate[:total])
    lengths = [9, 0, 4, 7]
    kv = torch.stack([d[0][n : n + 9] for n, d in zip(totals, data, strict=True)])
    gate = torch.stack([d[1][n : n + 9] for n, d in zip(totals, data, strict=True)])
    for b, length in enumerate(lengths):
        kv[b, length:] = float("nan")
        gate[b, length:] = float("nan")
    together.step([1, 2, 3, 4], totals, lengths, kv, gate)
    for b, row in enumerate([1, 2, 3, 4]):
        if lengths[b]:
            cut = slice(0, lengths[b])
            alone.step([row], [totals[b]], [lengths[b]], kv[b : b + 1, cut], gate[b : b + 1, cut])
    torch.testing.assert_close(together.state, alone.state, rtol=0, atol=0)
    assert together.entries.keys() == alone.entries.keys()
    for key, value in alone.entries.items():
        torch.testing.assert_close(together.entries[key], value, rtol=1e-12, atol=1e-12)


def test_a_batch_of_3_on_the_scratch_of_8_ignores_the_poisoned_rest() -> None:
    kv, gate = tokens(4, 8 * 5)
    kv, gate = kv.view(8, 5, -1), gate.view(8, 5, -1)
    clean, poisoned = Ring(4, 16, 8), Ring(4, 16, 8)
    clean.step([1, 2, 3], [0, 0, 0], [5, 5, 5], kv[:3], gate[:3])
    for scratch in (kv, gate):
        scratch[3:] = float("nan")
    # Padded rows of the wide batch point at request row 0 and have length 0.
    poisoned.step([1, 2, 3, 0, 0, 0, 0, 0], [0] * 8, [5, 5, 5, 0, 0, 0, 0, 0], kv, gate)
    torch.testing.assert_close(poisoned.state, clean.state, rtol=0, atol=0)
    for key, value in clean.entries.items():
        torch.testing.assert_close(poisoned.entries[key], value, rtol=0, atol=0)


def test_no_lengths_means_the_query_length() -> None:
    pool = Ring(4, 8, 1)
    kv, gate = tokens(4, 4)
    pool.step([1], [0], None, kv[None], gate[None])
    assert list(pool.entries) == [(1, 0)]


def test_dummy_row_stays_empty_and_a_forgotten_reset_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    # With 2 drafts past the boundary nothing of the second chunk's tail is saved: it goes to the dummy row, which
    # the next request's first window reads for its positions < 0.
    def run() -> torch.Tensor:
        pool = Ring(4, 8, 2)
        kv, gate = tokens(4, 16)
        pool.step([1], [0], [16], kv[None], gate[None])
        pool.step([2], [0], [4], kv[None, :4], gate[None, :4])
        return pool.entries[2, 0]

    right = run()
    torch.testing.assert_close(right, formula(*tokens(4, 16), 4)[0], rtol=1e-12, atol=1e-12)
    monkeypatch.setattr("dsv4_npu.compressor.reference.reset_dummy_row", lambda state, dummy: None)
    assert not torch.allclose(run(), right)


def test_swapped_c4_halves_show(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_npu.compressor import reference

    def swapped(rows: torch.Tensor, ratio: int) -> torch.Tensor:
        kv, score = rows.chunk(2, dim=-1)
        half = kv.shape[-1] // 2
        kv = torch.cat((kv[:, :, :ratio, half:], kv[:, :, ratio:, :half]), dim=2)
        score = torch.cat((score[:, :, :ratio, half:], score[:, :, ratio:, :half]), dim=2)
        return (score.softmax(dim=2) * kv).sum(dim=2)

    monkeypatch.setattr(reference, "_window_sum", swapped)
    with pytest.raises(AssertionError):
        test_chunked_prefill_gives_the_formula(4, 16, 7)


def test_reset_makes_the_empty_row() -> None:
    state = torch.full((3, 4), 7.0)
    reset_dummy_row(state, 2)
    assert state[2].tolist() == [0.0, 0.0, float("-inf"), float("-inf")]
    assert torch.all(state[:2] == 7.0)


@pytest.mark.parametrize(("starts", "lengths"), [([-1], [1]), ([0], [3]), ([0], [-1]), ([0, 1], [1])])
def test_bad_lengths_are_refused(starts: list[int], lengths: list[int]) -> None:
    with pytest.raises(InputError):
        plan_ring(4, 16, starts, lengths, 2, lambda p: p, 0)


def test_projections_that_do_not_fit_are_refused() -> None:
    pool = Ring(4, 16, 1)
    kv, gate = tokens(4, 4)
    plan = plan_ring(4, 16, [0], [4], 4, lambda p: p + 16, pool.dummy)
    with pytest.raises(InputError, match="do not fit"):
        compress_batch(pool.state, kv[None, :, :DIM], gate[None, :, :DIM], plan, weights(4), torch.tensor([0]))
