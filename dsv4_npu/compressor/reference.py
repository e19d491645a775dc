"""The compressor in plain torch: window softmax, RMSNorm, interleaved RoPE, and the save to the ring.

Per token t: ``kv[t] = Wkv·x[t]`` and ``s[t] = Wgate·x[t] + ape[t mod r]`` in ``R^(overlap·D)``. A state row is
``[kv | s]``; the empty row is kv = 0, s = −inf. Entry i is, per channel, ``Σ_j softmax_j(s)·kv`` over its window; a C4
window takes the first half of the rows of window i − 1 and the second half of the rows of window i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4_npu import addressing
from dsv4_npu.compressor.plan import RingPlan
from dsv4_npu.errors import InputError


@dataclass(frozen=True)
class CompressorWeights:
    """What the compressor needs of one layer beyond its projections.

    Attributes:
        ape: ``[ratio, overlap · D]`` added to the gate scores by position modulo ratio.
        norm: ``[D]`` RMSNorm weight.
        eps: RMSNorm epsilon.
        inv_freq: ``[rope_dim / 2]`` inverse frequencies of the compressed rotary embedding.
    """

    ape: torch.Tensor
    norm: torch.Tensor
    eps: float
    inv_freq: torch.Tensor


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight · x / sqrt(mean(x²) + eps)`` over the last axis, in the dtype of ``x``."""
    return weight.to(x.dtype) * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def rotate_interleaved(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Interleaved RoPE on the last ``2 · len(inv_freq)`` channels: pair i turns by ``position · inv_freq[i]``.

    x: ``[..., D]``; positions: int64 of shape ``x.shape[:-1]``.
    """
    dim = 2 * inv_freq.numel()
    angle = positions.to(x.dtype)[..., None] * inv_freq.to(x.dtype)
    cos, sin = angle.cos(), angle.sin()
    even, odd = x[..., -dim::2], x[..., -dim + 1 :: 2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-dim], turned), dim=-1)


def _window_sum(rows: torch.Tensor, ratio: int) -> torch.Tensor:
    """Softmax-weighted sum of windows ``[B, E, overlap · ratio, 2 · overlap · D]`` to ``[B, E, D]``."""
    kv, score = rows.chunk(2, dim=-1)
    if addressing.OVERLAP[ratio] == 2:
        half = kv.shape[-1] // 2
        kv = torch.cat((kv[:, :, :ratio, :half], kv[:, :, ratio:, half:]), dim=2)
        score = torch.cat((score[:, :, :ratio, :half], score[:, :, ratio:, half:]), dim=2)
    return (score.softmax(dim=2) * kv).sum(dim=2)


def compress_batch(
    state: torch.Tensor,
    kv: torch.Tensor,
    gate: torch.Tensor,
    plan: RingPlan,
    weights: CompressorWeights,
    starts: torch.Tensor,
) -> torch.Tensor:
    """Close the windows that end in this batch and save the rows that later batches need.

    All ring reads happen before any ring write, since head and tail rows of a batch can share a ring row.

    Args:
        state: one layer's ring rows ``[rows, 2 · overlap · D]``, float32 or float64; mutated.
        kv, gate: this batch's projections ``[B, q, overlap · D]`` (gate without ape); rows past a request's length
            may hold anything.
        plan: the batch's plan for this ratio.
        weights: the layer's constants.
        starts: int64 ``[B]``, position of each request's first new row.

    Returns:
        ``[B, E, D]`` normalised and rotated entries; only the first ``plan.counts[b]`` of request b mean anything.
    """
    batch, width, channels = kv.shape
    if width != plan.width or state.shape[-1] != 2 * channels or gate.shape != kv.shape:
        raise InputError(
            f"kv {tuple(kv.shape)}, gate {tuple(gate.shape)} and state {tuple(state.shape)} do not fit: "
            f"q = {plan.width} and a state row of twice the projection's channels are needed"
        )
    phase = (starts[:, None] + torch.arange(width, device=kv.device)) % plan.ratio
    score = gate.to(state.dtype) + weights.ape.to(state.dtype)[phase]
    new = torch.cat((kv.to(state.dtype), score), dim=-1)

    entries = state.new_zeros((batch, plan.windows, channels // addressing.OVERLAP[plan.ratio]))
    if plan.windows:
        rows = torch.cat((state[plan.prior_rows], new), dim=1)
        index = plan.gather.flatten(1)[..., None].expand(-1, -1, rows.shape[-1])
        windows = rows.gather(1, index).view(batch, plan.windows, -1, rows.shape[-1])
        entries = rms_norm(_window_sum(windows, plan.ratio), weights.norm, weights.eps)
        entries = rotate_interleaved(entries, plan.entry_positions, weights.inv_freq)

    state[plan.save_rows] = new
    reset_dummy_row(state, plan.dummy)
    return entries


def reset_dummy_row(state: torch.Tensor, dummy: int) -> None:
    """Make the dummy row the empty row again: unsaved and padded rows have been written to it."""
    half = state.shape[-1] // 2
    state[dummy, :half] = 0.0
    state[dummy, half:] = float("-inf")
