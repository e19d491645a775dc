"""How one row is stored: plain floats, bf16, packed fp8, or scaled int8 / fp8.

Each format says how wide a stored row is, how a row is written (quantised) and read (dequantised), and how far a
round trip may be off.
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


@dataclass(frozen=True)
class RowFormat:
    """One row format.

    Attributes:
        name: the format's name in configurations.
        dtype, width: element type and elements of a stored row.
        scale_dtype: type of the separate per-row scale, None when the row has none of its own.
        encode: ``[n, D] float -> (stored [n, width], scale [n, 1] or None)``.
        decode: the inverse, to a given float dtype.
        bound: ``rows [n, D] -> [n, D]``, the largest absolute error of a round trip per element.
    """

    name: str
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


def _plain(name: str, dim: int) -> RowFormat:
    dtype = _PLAIN[name]
    # Half a unit in the last place, relative; a float64 source can also be exact, which the bound covers.
    relative = torch.finfo(dtype).eps / 2
    return RowFormat(
        name,
        dtype,
        dim,
        None,
        encode=lambda rows: (rows.to(dtype), None),
        decode=lambda stored, _scale, out: stored.to(out),
        bound=lambda rows: rows.abs() * relative,
    )


def _power_of_two_scale(amax: torch.Tensor) -> torch.Tensor:
    """The smallest power of two s with ``amax / s <= 448``; 1 for a group of zeros."""
    safe = torch.where(amax > 0, amax.double() / _FP8_MAX, torch.ones_like(amax, dtype=torch.float64))
    return torch.exp2(torch.ceil(torch.log2(safe)).clamp(-127, 127))


def _fp8_packed(nope: int, rope: int) -> RowFormat:
    """A5's KV row: fp8 e4m3 without position, bf16 rotary channels, one power-of-two scale byte per 64 channels.

    ``nope + 2 · rope + ceil(nope / 64)`` bytes, aligned to 128 (583 → 640 for 448 + 64). The scale byte is the biased
    exponent (e8m0). Error of a nope channel: at most ``|x| / 16`` (half of e4m3's step of 1/8), or half of the smallest
    subnormal, ``scale · 2^-10``, whichever is larger; of a rotary channel: bf16's ``|x| / 256``.
    """
    groups = -(-nope // _GROUP)
    used = nope + 2 * rope + groups
    width = -(-used // _ALIGN) * _ALIGN

    def grouped(rows: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(rows[:, :nope], (0, groups * _GROUP - nope))
        return padded.view(rows.shape[0], groups, _GROUP)

    def encode(rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = grouped(rows).double()
        scale = _power_of_two_scale(parts.abs().amax(-1, keepdim=True))
        values = (parts / scale).to(torch.float8_e4m3fn).view(torch.uint8).view(rows.shape[0], -1)[:, :nope]
        exponent = (torch.log2(scale).squeeze(-1) + 127).to(torch.uint8)
        rotary = rows[:, nope:].to(torch.bfloat16).contiguous().view(torch.uint8)
        tail = torch.zeros((rows.shape[0], width - used), dtype=torch.uint8, device=rows.device)
        return torch.cat((values, rotary, exponent, tail), dim=-1).view(torch.float8_e4m3fn), None

    def decode(stored: torch.Tensor, _scale: torch.Tensor | None, out: torch.dtype) -> torch.Tensor:
        raw = stored.view(torch.uint8)
        values = raw[:, :nope].contiguous().view(torch.float8_e4m3fn).to(out)
        rotary = raw[:, nope : nope + 2 * rope].contiguous().view(torch.bfloat16).to(out)
        exponent = raw[:, nope + 2 * rope : used].to(torch.float64) - 127
        scale = torch.exp2(exponent).repeat_interleave(_GROUP, dim=-1)[:, :nope].to(out)
        return torch.cat((values * scale, rotary), dim=-1)

    def bound(rows: torch.Tensor) -> torch.Tensor:
        scale = _power_of_two_scale(grouped(rows).abs().amax(-1, keepdim=True)).to(rows.dtype)
        floor = (scale * 2.0**-10).expand(-1, -1, _GROUP).reshape(rows.shape[0], -1)[:, :nope]
        return torch.cat((torch.maximum(rows[:, :nope].abs() / 16, floor), rows[:, nope:].abs() / 256), dim=-1)

    return RowFormat("fp8_packed", torch.float8_e4m3fn, width, None, encode, decode, bound)


def _scaled(name: str, dim: int) -> RowFormat:
    """An indexer row with one scale: int8 + fp16 (A2/A3) or fp8 e4m3 + fp32 (A5).

    int8: ``scale = amax / 127``, error at most half a step plus what fp16 loses of the scale (127 · 2^-11 steps). fp8:
    ``scale = amax / 448``, error at most ``|x| / 16`` or half of the smallest subnormal.
    """
    integer = name == "int8_fp16"
    dtype = torch.int8 if integer else torch.float8_e4m3fn
    scale_dtype = torch.float16 if integer else torch.float32
    top = 127.0 if integer else _FP8_MAX
    smallest = float(torch.finfo(scale_dtype).tiny)

    def scale_of(rows: torch.Tensor) -> torch.Tensor:
        return (rows.abs().amax(-1, keepdim=True).double() / top).clamp_min(smallest)

    def encode(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = scale_of(rows).to(scale_dtype)
        ratio = (rows.double() / scale.double()).clamp(-top, top)
        return (ratio.round().to(dtype) if integer else ratio.to(dtype)), scale

    def decode(stored: torch.Tensor, scale: torch.Tensor | None, out: torch.dtype) -> torch.Tensor:
        assert scale is not None
        return stored.to(out) * scale.to(out)

    def bound(rows: torch.Tensor) -> torch.Tensor:
        scale = scale_of(rows)
        if integer:
            return (scale * (0.5 + 127 * 2.0**-11) * 1.001).expand_as(rows)
        return torch.maximum(rows.abs().double() / 16, scale * 2.0**-10) * 1.001

    return RowFormat(name, dtype, dim, scale_dtype, encode, decode, bound)


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
