"""The NPU's fused compressor as an operator of the probe: inputs that produce given rows, in the layouts it takes.

The fused operator projects, compresses and saves in one call, so the probe's rows go in as hidden states with one
channel and as projections that copy it. Its arguments are those with which SGLang 0.5.23 calls
``torch.ops.npu.compressor`` (A2/A3: one state location per token) and ``torch.ops.custom.compressor`` (A5: one bank per
request). Not run on an NPU by this project.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsv4_npu import addressing
from dsv4_npu.compressor.probe import Operator, ProbeBatch
from dsv4_npu.errors import UnavailableError

ROPE_DIM = 64


def fused_operator(compressor: Callable[..., Any], hidden: int, by_request: bool) -> Operator:
    """``compressor``, the fused operator, as an operator for :func:`~dsv4_npu.compressor.probe.probe`.

    Args:
        hidden: width of hidden states (the model's, which the operator may insist on).
        by_request: whether state is addressed by banks of requests (A5) or by locations (A2/A3).
    """

    def run(batch: ProbeBatch) -> None:
        requests, width, channels = batch.kv.shape
        device, ratio, tokens = batch.kv.device, batch.ratio, requests * width
        head = channels // addressing.OVERLAP[ratio]
        x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=device)
        x[:, 0] = batch.kv[:, :, 0].reshape(-1)
        kv = torch.zeros(channels, hidden, dtype=torch.bfloat16, device=device)
        kv[:, 0] = 1.0
        starts = torch.tensor(batch.starts, dtype=torch.int32, device=device)
        angles = torch.zeros(min(tokens, tokens // ratio + requests), ROPE_DIM, device=device)
        compressor(
            x,
            kv,
            -kv,
            batch.state.view(-1, batch.ring, 2 * channels),
            torch.zeros(ratio, channels, device=device),
            torch.ones(head, device=device),
            rope_sin=angles,
            rope_cos=angles + 1.0,
            rope_head_dim=ROPE_DIM,
            cmp_ratio=ratio,
            state_block_table=_banks(batch) if by_request else _locations(batch),
            cu_seqlens=torch.arange(requests + 1, dtype=torch.int32, device=device) * width,
            seqused=torch.full((requests,), width, dtype=torch.int32, device=device),
            start_pos=starts,
            coff=addressing.OVERLAP[ratio],
            norm_eps=1e-6,
            rotary_mode=2,
            cache_mode=2,
        )

    return run


def installed_compressor(by_request: bool) -> Callable[..., Any]:
    """The fused operator of this platform. Raises UnavailableError where it is not there."""
    namespace = "custom" if by_request else "npu"
    try:
        found: Callable[..., Any] = getattr(torch.ops, namespace).compressor
    except AttributeError as error:
        needed = "the custom operators of Ascend 950" if by_request else "torch_npu"
        raise UnavailableError(
            f"torch.ops.{namespace}.compressor is not there: import {needed} on an Ascend host first"
        ) from error
    return found


def _banks(batch: ProbeBatch) -> torch.Tensor:
    return torch.arange(1, len(batch.starts) + 1, dtype=torch.int32, device=batch.kv.device)


def _locations(batch: ProbeBatch) -> torch.Tensor:
    """int32 ``[B, overlap · ratio + q]``: the state row of each position from that much history on."""
    history = addressing.OVERLAP[batch.ratio] * batch.ratio
    device = batch.kv.device
    starts = torch.tensor(batch.starts, device=device)[:, None]
    positions = starts - history + torch.arange(history + batch.width, device=device)
    banks = torch.arange(1, len(batch.starts) + 1, device=device)[:, None]
    rows = addressing.request_state_rows(banks, positions.clamp_min(0), batch.ring)
    return torch.where(positions >= 0, rows, batch.dummy).to(torch.int32).contiguous()
