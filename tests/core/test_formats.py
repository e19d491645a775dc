"""Row formats: the stated error bound of a round trip, what it does not cover, widths and bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu.config import INDEXER_ROWS, KV_ROWS
from dsv4_npu.errors import ConfigError
from dsv4_npu.pools import RowFormat, formats, indexer_format, kv_format

torch.set_num_threads(1)
NOPE, ROPE = 448, 64
FP32_MAX = torch.finfo(torch.float32).max


def all_formats() -> dict[str, RowFormat]:
    made = {f"kv {name}": kv_format(name, NOPE, ROPE) for name in KV_ROWS}
    return made | {f"index {name}": indexer_format(name, 128) for name in INDEXER_ROWS}


FORMATS = all_formats()
QUANTISED = [name for name in FORMATS if FORMATS[name].name not in ("fp32", "fp64")]


def round_trip(fmt: RowFormat, rows: torch.Tensor, out: torch.dtype = torch.float32) -> torch.Tensor:
    stored, scale = fmt.encode(rows)
    assert stored.shape == (rows.shape[0], fmt.width)
    assert stored.dtype == fmt.dtype
    assert (scale is None) == (fmt.scale_dtype is None)
    if scale is not None:
        assert scale.shape == (rows.shape[0], 1)
        assert scale.dtype == fmt.scale_dtype
    back = fmt.decode(stored, scale, out)
    assert back.shape == rows.shape
    assert back.dtype == out
    return back


def worst_of_bound(fmt: RowFormat, rows: torch.Tensor, out: torch.dtype = torch.float32) -> float:
    """Largest error of a round trip as a share of the stated bound; every element must keep it."""
    error = (round_trip(fmt, rows, out).double() - rows.double()).abs()
    bound = fmt.bound(rows)
    assert bound.shape == rows.shape
    assert bound.dtype == torch.float64
    assert bool((error <= bound).all()), f"{fmt.name}: error {float((error / bound).nan_to_num(0).max()):.3f} bounds"
    return float(torch.where(bound > 0, error / bound, 0.0).max())


def samples(dim: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Rows ``[n, dim]`` of every kind that a format must keep its bound on."""
    gen = torch.Generator().manual_seed(dim)
    normal = torch.randn(64, dim, generator=gen, dtype=torch.float64)
    magnitudes = torch.exp2(torch.randint(-40, 16, (64, dim), generator=gen).double())
    spikes = torch.zeros(dim, dim, dtype=torch.float64)
    spikes.fill_diagonal_(3.7)
    noisy_spikes = normal[:1] * 1e-3 + spikes * 1e3
    steps = torch.linspace(-1, 1, 64 * dim, dtype=torch.float64).view(64, dim)
    kinds = {
        "normal": normal,
        "tiny": normal * 1e-6,
        "huge": normal * 1e5,
        "zeros": torch.zeros(3, dim, dtype=torch.float64),
        "subnormal": normal * 1e-41,
        "mixed magnitudes": normal * magnitudes,
        "spikes": spikes,
        "spikes in noise": noisy_spikes,
        "steps": steps,
        "powers of two": magnitudes,
        "one negative": torch.where(torch.arange(dim) == 5, -2.0, torch.zeros(1, dim, dtype=torch.float64)),
        "no rows": torch.zeros(0, dim, dtype=torch.float64),
    }
    return {kind: rows.to(dtype) for kind, rows in kinds.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_round_trips_keep_the_bound(name: str, dtype: torch.dtype) -> None:
    fmt = FORMATS[name]
    for rows in samples(fmt.dim, dtype).values():
        if rows.numel():
            worst_of_bound(fmt, rows, torch.float64 if dtype == torch.float64 else torch.float32)
        else:
            round_trip(fmt, rows)
            assert fmt.bound(rows).shape == rows.shape


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("kind", ["normal", "tiny", "huge", "mixed magnitudes", "steps"])
def test_the_bound_is_nearly_reached(name: str, kind: str) -> None:
    fmt = FORMATS[name]
    rows = samples(fmt.dim)[kind]
    if fmt.name == "int8_fp16" and kind == "tiny":
        # Its smallest step is the smallest normal number of fp16, 2^-14: these keys read as 0.
        rows = rows + 0.9 * 2.0**-15
    assert worst_of_bound(fmt, rows) > 0.75


def test_plain_rows_lose_nothing_that_they_hold() -> None:
    for name, dtype in (("fp32", torch.float32), ("fp64", torch.float64), ("fp64", torch.float32)):
        fmt = FORMATS[f"kv {name}"]
        for rows in samples(fmt.dim, dtype).values():
            assert torch.equal(round_trip(fmt, rows, dtype), rows)
            assert bool((fmt.bound(rows) == 0).all())
    bf16 = FORMATS["kv bf16"]
    rows = samples(bf16.dim, torch.bfloat16)["normal"]
    assert torch.equal(round_trip(bf16, rows, torch.bfloat16), rows)
    assert bool((bf16.bound(rows) == 0).all())
    assert worst_of_bound(FORMATS["kv fp32"], samples(512, torch.float64)["steps"], torch.float64) > 0.75


floats = st.floats(-FP32_MAX, FP32_MAX, allow_nan=False, width=32, allow_subnormal=True)


@settings(max_examples=60, deadline=None)
@given(row=st.lists(floats, min_size=8, max_size=8), fill=floats)
@pytest.mark.parametrize("name", FORMATS)
def test_any_finite_row_keeps_the_bound_or_reads_as_not_finite(name: str, row: list[float], fill: float) -> None:
    fmt = FORMATS[name]
    rows = torch.full((2, fmt.dim), fill, dtype=torch.float32)
    rows[0, :] = 0
    rows[:, 60:68] = torch.tensor(row)
    back = round_trip(fmt, rows)
    bound = fmt.bound(rows)
    held = bound.isfinite()
    assert bool(((back.double() - rows.double()).abs() <= bound)[held].all())
    # What the bound promises nothing about may be right by luck, but it is never a wrong finite number.
    assert bool((~back.isfinite() | (back == rows))[~held].all())


# -- what the bound does not cover ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_nan_and_inf_stay_visible(name: str, bad: float) -> None:
    fmt = FORMATS[name]
    rows = samples(fmt.dim)["normal"][:4].clone()
    clean = round_trip(fmt, rows)
    rows[1, 7] = rows[2, fmt.dim - 1] = bad
    back = round_trip(fmt, rows)
    hit = torch.zeros_like(rows, dtype=torch.bool)
    if fmt.scale_dtype is not None:
        hit[1:3] = True
        assert bool(back[hit].isnan().all())
    else:
        hit[1, 7] = hit[2, fmt.dim - 1] = True
        assert not bool(back[hit].isfinite().any())
        if fmt.name != "fp8_packed":
            assert torch.equal(back[hit].nan_to_num(7.0), rows[hit].nan_to_num(7.0))
    assert torch.equal(fmt.bound(rows).isinf(), hit)
    # Other rows, and where there is no common scale other channels, read as if nothing had happened.
    assert torch.equal(back[~hit], clean[~hit])


def test_a_bad_channel_that_held_the_largest_magnitude_leaves_the_group_its_bound() -> None:
    fmt = FORMATS["kv fp8_packed"]
    rows = samples(fmt.dim)["normal"].clone()
    rows[:, 3] = math.inf
    back = round_trip(fmt, rows)
    assert bool(back[:, 3].isnan().all())
    good = torch.arange(fmt.dim) != 3
    assert bool(((back - rows).double().abs() <= fmt.bound(rows))[:, good].all())


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("kv bf16", torch.finfo(torch.bfloat16).max),
        ("kv fp8_packed", 240 * 2.0**120),
        ("index int8_fp16", 127 * 65504.0),
        ("index fp8_fp32", 240 * 2.0**120),
        ("kv fp32", FP32_MAX),
    ],
)
def test_the_range_ends_where_it_says(name: str, largest: float) -> None:
    fmt = FORMATS[name]
    rows = torch.zeros(1, fmt.dim, dtype=torch.float64)
    rows[0, 0] = largest
    assert worst_of_bound(fmt, rows) <= 1
    rows[0, 0] = largest * 1.01
    assert float(fmt.bound(rows)[0, 0]) == math.inf
    assert not bool(round_trip(fmt, rows)[0, 0].isfinite())


def test_packed_rows_hold_everything_up_to_the_largest_magnitude_in_float32() -> None:
    fmt = FORMATS["kv fp8_packed"]
    rows = torch.linspace(1.0, 240 * 2.0**120, fmt.dim, dtype=torch.float64)[None]
    assert bool(round_trip(fmt, rows, torch.float32).isfinite().all())


# -- the packed row ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "width", "row_bytes"),
    [
        (kv_format("bf16", NOPE, ROPE), 512, 1024),
        (kv_format("fp8_packed", NOPE, ROPE), 640, 640),
        (kv_format("fp32", NOPE, ROPE), 512, 2048),
        (kv_format("fp64", NOPE, ROPE), 512, 4096),
        (indexer_format("int8_fp16", 128), 128, 130),
        (indexer_format("fp8_fp32", 128), 128, 132),
        (indexer_format("fp32", 128), 128, 512),
        (kv_format("fp8_packed", 16, 16), 128, 128),
        (kv_format("fp8_packed", 65, 2), 128, 128),
        (kv_format("fp8_packed", 0, 64), 128, 128),
        (kv_format("fp8_packed", 128, 0), 256, 256),
    ],
    ids=lambda value: value.name if isinstance(value, RowFormat) else str(value),
)
def test_widths_and_bytes(fmt: RowFormat, width: int, row_bytes: int) -> None:
    assert (fmt.width, fmt.row_bytes) == (width, row_bytes)
    stored, scale = fmt.encode(torch.zeros(1, fmt.dim))
    held = sum(t.numel() * t.element_size() for t in (stored, scale) if t is not None)
    assert held == row_bytes


def test_packed_layout_byte_by_byte() -> None:
    """The row read with nothing but the layout: 448 fp8, 64 bf16, 7 biased exponents, 57 zero bytes."""
    fmt = FORMATS["kv fp8_packed"]
    rows = samples(fmt.dim)["mixed magnitudes"]
    raw = fmt.encode(rows)[0].view(torch.uint8)
    back = round_trip(fmt, rows)
    for n in range(0, 64, 9):
        for channel in range(0, 448, 7):
            byte = int(raw[n, channel])
            sign, exponent, mantissa = -1 if byte & 128 else 1, byte >> 3 & 15, byte & 7
            value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
            scale = 2.0 ** (int(raw[n, 448 + 128 + channel // 64]) - 127)
            assert float(back[n, channel]) == sign * value * scale
    assert bool((raw[:, 583:] == 0).all())
    assert torch.equal(raw[:, 448:576].contiguous().view(torch.bfloat16), rows[:, 448:].to(torch.bfloat16))


def test_a_row_of_zeros_is_stored_as_zero_bytes() -> None:
    for fmt in FORMATS.values():
        stored, scale = fmt.encode(torch.zeros(2, fmt.dim))
        assert bool((stored.view(torch.uint8) == 0).all())
        fresh = torch.zeros_like(stored.view(torch.uint8)).view(fmt.dtype)
        empty = None if scale is None else torch.zeros_like(scale)
        assert bool((fmt.decode(fresh, empty, torch.float32) == 0).all()), "a fresh slab reads as zeros"


@pytest.mark.parametrize("amax", [448.0, 448.0 * 2.0**9, 449.0, 1.0, 0.75, 1e-30, 3e38, 448 * 2.0**-127, 1e-45])
def test_the_scale_is_the_smallest_power_of_two(amax: float) -> None:
    k = int(formats._scale_exponent(torch.tensor([amax], dtype=torch.float64)))
    assert amax <= 448.0 * 2.0**k
    assert k == -127 or amax > 448.0 * 2.0 ** (k - 1)


# -- a second round trip ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_second_round_trip_changes_nothing(name: str) -> None:
    """Read as float64; in float32 the product of an fp8 value and an fp32 scale is rounded once more."""
    fmt = FORMATS[name]
    for kind, rows in samples(fmt.dim).items():
        once = round_trip(fmt, rows, torch.float64)
        assert torch.equal(round_trip(fmt, once, torch.float64), once), kind
        if fmt.name != "fp8_fp32":
            single = round_trip(fmt, rows, torch.float32)
            assert torch.equal(round_trip(fmt, single, torch.float32), single), kind


# -- refusals and mutations -------------------------------------------------------------------------------------------


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_row = 'int8_fp16'.*'bf16', 'fp32', 'fp64', 'fp8_packed'"):
        kv_format("int8_fp16", NOPE, ROPE)
    with pytest.raises(ConfigError, match=r"indexer_row = 'fp8_packed'.*'int8_fp16', 'fp8_fp32'"):
        indexer_format("fp8_packed", 128)


@pytest.mark.parametrize("name", QUANTISED)
def test_a_smaller_bound_shows(name: str) -> None:
    fmt = FORMATS[name]
    tight = replace(fmt, bound=lambda rows: fmt.bound(rows) * 0.7)
    with pytest.raises(AssertionError, match="bounds"):
        worst_of_bound(tight, samples(fmt.dim)["normal"])


def off_by_one(exponent: int):
    real = formats._scale_exponent
    return lambda amax: real(amax) + exponent


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_wrong_scale_shows(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    monkeypatch.setattr(formats, "_scale_exponent", off_by_one(shift))
    with pytest.raises(AssertionError):
        test_the_scale_is_the_smallest_power_of_two(448.0)
    if shift == -1:
        wrong = kv_format("fp8_packed", NOPE, ROPE)
        with pytest.raises(AssertionError):
            worst_of_bound(wrong, samples(512)["normal"])


def test_swapped_parts_of_the_packed_row_show() -> None:
    fmt = FORMATS["kv fp8_packed"]
    swapped = replace(fmt, encode=lambda rows: (fmt.encode(torch.cat((rows[:, 64:], rows[:, :64]), 1))[0], None))
    with pytest.raises(AssertionError):
        worst_of_bound(swapped, samples(512)["normal"])
