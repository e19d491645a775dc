"""How one row is stored: plain floats, bf16, packed fp8, or scaled int8 / fp8.

Each format says how wide a stored row is, how a row is written (quantised) and read (dequantised), and how far a
round trip may be off.

What a format cannot hold never reads back as a wrong finite number: it reads back as inf or NaN. bf16, fp32 and fp64
keep NaN and inf and overflow to inf. Packed fp8 stores NaN for NaN, inf and magnitudes above 240 · 2^120 (about
3.2e38), and its other channels are not disturbed. A scaled row with such a value (int8 + fp16: above 127 · 65504)
reads NaN in every channel, since int8 has no NaN of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsv4_npu.errors import ConfigError

_PLAIN = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_GROUP = 64
_ALIGN = 128
_FP8_MAX = 448.0
#: The largest magnitude of a format with fp8 values that reads back finite in float32.
_FP8_LIMIT = 240.0 * 2.0**120


@dataclass(frozen=True)
class RowFormat:
    """One row format.

    Attributes:
        name: the format's name in configurations.
        dim: D, channels of a row.
        dtype, width: element type and elements of a stored row.
        scale_dtype: type of the separate per-row scale, None when the row has none of its own.
        encode: ``[n, D] float -> (stored [n, width], scale [n, 1] or None)``.
        decode: the inverse, to a given float dtype.
        bound: ``rows [n, D] -> [n, D] float64``, the largest absolute error per element of a round trip that is read as
            float32 or float64; inf where the format cannot hold the value.
    """

    name: str
    dim: int
    dtype: torch.dtype
    width: int
    scale_dtype: torch.dtype | None
    encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
    decode: Callable[[torch.Tensor, torch.Tensor | None, torch.dtype], torch.Tensor]
    bound: Callable[[torch.Tensor], torch.Tensor]

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row, its scale included."""
        scale = 0 if self.scale_dtype is None else self.scale_dtype.itemsize
        return self.width * self.dtype.itemsize + scale


def _rounding_bound(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half a unit in the last place of ``dtype`` (of its subnormals where those are wider); 0 where it holds all."""
    info = torch.finfo(dtype)
    size = rows.double().abs()
    if torch.promote_types(rows.dtype, dtype) == dtype:
        error = torch.zeros_like(size)
    else:
        error = size.clamp_min(info.smallest_normal) * (info.eps / 2)
    return torch.where(size <= info.max, error, torch.inf)


def _plain(name: str, dim: int) -> RowFormat:
    dtype = _PLAIN[name]
    return RowFormat(
        name,
        dim,
        dtype,
        dim,
        None,
        encode=lambda rows: (rows.to(dtype), None),
        decode=lambda stored, _scale, out: stored.to(out),
        bound=lambda rows: _rounding_bound(rows, dtype),
    )


def _scale_exponent(amax: torch.Tensor) -> torch.Tensor:
    """The smallest k >= -127 with ``amax <= 448 · 2^k``, as float64; -127 for a group of zeros."""
    mantissa, exponent = torch.frexp(amax)
    # 448 = 0.875 · 2^9; without a logarithm the result is exact.
    least = exponent.double() - 9 + (mantissa > 0.875)
    return torch.where(amax > 0, least.clamp_min(-127), -127.0)


def _fp8_packed(nope: int, rope: int) -> RowFormat:
    """A5's KV row: fp8 e4m3 without position, bf16 rotary channels, one power-of-two scale byte per 64 channels.

    ``nope + 2 · rope + ceil(nope / 64)`` bytes, aligned to 128 (583 → 640 for 448 + 64). The scale byte is the biased
    exponent (e8m0); a row of zeros is stored as zero bytes. Error of a nope channel: at most ``|x| / 16`` (half of
    e4m3's step of 1/8), or half of the smallest subnormal, ``scale · 2^-10``, whichever is larger; of a rotary channel:
    bf16's ``|x| / 256``.
    """
    groups = -(-nope // _GROUP)
    used = nope + 2 * rope + groups
    width = -(-used // _ALIGN) * _ALIGN

    def scaled(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Nope channels ``[n, groups, 64]`` in float64 (NaN where they cannot be held), exponents ``[n, groups]``."""
        wide = torch.nn.functional.pad(rows[:, :nope].double(), (0, groups * _GROUP - nope))
        wide = torch.where(wide.abs() <= _FP8_LIMIT, wide, torch.nan).view(rows.shape[0], groups, _GROUP)
        return wide, _scale_exponent(wide.nan_to_num(0.0).abs().amax(-1))

    def encode(rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        wide, exponent = scaled(rows)
        values = (wide / torch.exp2(exponent)[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
        rotary = rows[:, nope:].to(torch.bfloat16).contiguous().view(torch.uint8)
        tail = torch.zeros((rows.shape[0], width - used), dtype=torch.uint8, device=rows.device)
        parts = (values.flatten(1)[:, :nope], rotary, (exponent + 127).to(torch.uint8), tail)
        return torch.cat(parts, dim=-1).view(torch.float8_e4m3fn), None

    def decode(stored: torch.Tensor, _scale: torch.Tensor | None, out: torch.dtype) -> torch.Tensor:
        raw = stored.view(torch.uint8)
        values = raw[:, :nope].contiguous().view(torch.float8_e4m3fn).to(out)
        rotary = raw[:, nope : nope + 2 * rope].contiguous().view(torch.bfloat16).to(out)
        exponent = raw[:, nope + 2 * rope : used].to(torch.float64) - 127
        scale = torch.exp2(exponent).repeat_interleave(_GROUP, dim=-1)[:, :nope].to(out)
        return torch.cat((values * scale, rotary), dim=-1)

    def bound(rows: torch.Tensor) -> torch.Tensor:
        wide, exponent = scaled(rows)
        error = torch.maximum(wide.abs() / 16, torch.exp2(exponent - 10)[..., None])
        error = error.nan_to_num(torch.inf, posinf=torch.inf).flatten(1)[:, :nope]
        return torch.cat((error, _rounding_bound(rows[:, nope:], torch.bfloat16)), dim=-1)

    return RowFormat("fp8_packed", nope + rope, torch.float8_e4m3fn, width, None, encode, decode, bound)


def _scaled(name: str, dim: int) -> RowFormat:
    """An indexer row with one scale: int8 + fp16 (A2/A3) or fp8 e4m3 + fp32 (A5).

    int8: ``scale = amax / 127``, error at most half a step, where fp16 may round the step up by 2^-11. fp8: ``scale =
    amax / 448``, error at most ``|x| / 16`` or half of the smallest subnormal, up to what fp32 rounds. A scale is never
    below the smallest normal number of its type.
    """
    integer = name == "int8_fp16"
    dtype = torch.int8 if integer else torch.float8_e4m3fn
    scale_dtype = torch.float16 if integer else torch.float32
    top = 127.0 if integer else _FP8_MAX
    info = torch.finfo(scale_dtype)
    limit = top * info.max if integer else _FP8_LIMIT

    def scale_of(rows: torch.Tensor) -> torch.Tensor:
        amax = rows.abs().amax(-1, keepdim=True).double()
        return torch.where(amax <= limit, (amax / top).clamp_min(info.smallest_normal), torch.nan)

    def encode(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = scale_of(rows).to(scale_dtype)
        ratio = (rows.double() / scale.double()).nan_to_num(0.0)
        return (ratio.round().to(dtype) if integer else ratio.to(dtype)), scale

    def decode(stored: torch.Tensor, scale: torch.Tensor | None, out: torch.dtype) -> torch.Tensor:
        assert scale is not None
        return stored.to(out) * scale.to(out)

    def bound(rows: torch.Tensor) -> torch.Tensor:
        scale = scale_of(rows)
        if integer:
            error = (scale * (0.5 * (1 + 2.0**-10))).expand(rows.shape)
        else:
            error = torch.maximum(rows.double().abs() / 16, scale * 2.0**-10) * (1 + 2.0**-10)
        return error.nan_to_num(torch.inf, posinf=torch.inf)

    return RowFormat(name, dim, dtype, dim, scale_dtype, encode, decode, bound)


def kv_format(name: str, nope: int, rope: int) -> RowFormat:
    """The KV row format ``name`` for ``nope + rope`` channels."""
    if name in _PLAIN:
        return _plain(name, nope + rope)
    if name == "fp8_packed":
        return _fp8_packed(nope, rope)
    raise ConfigError(f"kv_row = {name!r}; one of {[*_PLAIN, 'fp8_packed']} is needed")


def indexer_format(name: str, dim: int) -> RowFormat:
    """The indexer key format ``name`` for ``dim`` channels."""
    if name in _PLAIN:
        return _plain(name, dim)
    if name in ("int8_fp16", "fp8_fp32"):
        return _scaled(name, dim)
    raise ConfigError(f"indexer_row = {name!r}; one of {[*_PLAIN, 'int8_fp16', 'fp8_fp32']} is needed")
