"""Empty the C128 state rows that a verify wrote for rejected drafts, in every layer with one launch."""

from __future__ import annotations

import torch

from dsv4_npu import addressing
from dsv4_npu.ops._checks import (
    INDEX_TYPES,
    check_at_least,
    check_no_overlap,
    check_tensor,
    check_values,
    fail,
)
from dsv4_npu.ops._registry import register
from dsv4_npu.ops.clear_c128_draft_states import ref

SCHEMA = (
    "(Tensor(a!) state, Tensor req_pool_indices, Tensor seq_lens, Tensor accept_lens, int ring_size, "
    "int num_draft_tokens) -> ()"
)


def _meta(
    state: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    ring_size: int,
    num_draft_tokens: int,
) -> None:
    return None


OP = register("clear_c128_draft_states_", SCHEMA, ref=ref.clear_c128_draft_states_, meta=_meta, repeats=True)


def check(
    state: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    ring_size: int,
    num_draft_tokens: int,
    write_pad: int | None,
) -> None:
    """Raise InputError for arguments that :func:`clear_c128_draft_states_` refuses."""
    name = OP.name
    check_tensor(name, "state", state, ("layers", "rows", "2 D"), (torch.float32, torch.float64))
    bs, rows = req_pool_indices.shape[0] if req_pool_indices.dim() else 0, state.shape[1]
    check_tensor(name, "req_pool_indices", req_pool_indices, ("bs",), INDEX_TYPES, state.device)
    check_tensor(name, "seq_lens", seq_lens, (bs,), INDEX_TYPES, state.device)
    check_tensor(name, "accept_lens", accept_lens, (bs,), INDEX_TYPES, state.device)
    if state.shape[2] % 2:
        fail(name, f"state has rows of {state.shape[2]} elements; allowed: an even number, the kv and the score half")
    check_at_least(name, "ring_size", ring_size, 1)
    check_at_least(name, "num_draft_tokens", num_draft_tokens, 1)
    legal = addressing.write_pad(ring_size, 128) if write_pad is None else write_pad
    if num_draft_tokens > legal:
        fail(
            name,
            f"num_draft_tokens is {num_draft_tokens}; allowed: at most {legal}, the write pad of a ring of "
            f"{ring_size} rows; a wider verify overwrites rows of accepted positions",
        )
    check_no_overlap(
        name, "state", state, req_pool_indices=req_pool_indices, seq_lens=seq_lens, accept_lens=accept_lens
    )
    check_values(name, "accept_lens", accept_lens, 1, num_draft_tokens)
    check_values(name, "seq_lens", seq_lens, 0, 2**62)
    check_values(name, "req_pool_indices", req_pool_indices, 0, rows // ring_size - 1)


def clear_c128_draft_states_(
    state: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    ring_size: int,
    num_draft_tokens: int,
    *,
    write_pad: int | None = None,
    backend: str = "auto",
) -> None:
    """Write the empty row (kv 0, score -inf) over the state rows of rejected draft tokens::

        for b in range(bs):
            for o in range(accept_lens[b], num_draft_tokens):
                row = req_pool_indices[b] * ring_size + (seq_lens[b] + o) % ring_size
                state[:, row, :D] = 0
                state[:, row, D:] = -inf

    Args:
        state: [layers, rows, 2 D] float32 or float64, contiguous; changed in place.
        req_pool_indices: [bs] int32 or int64, the request row of each request.
        seq_lens: [bs] int32 or int64, the length BEFORE the verify.
        accept_lens: [bs] int32 or int64 in 1..num_draft_tokens; counts the root row, so offsets below it stay.
        ring_size: rows per request bank.
        num_draft_tokens: the verify width D, root included.
        write_pad: the largest legal width; by default that of a C128 ring of ``ring_size``.
        backend: "auto" (by the device), "cpu" (C++), "triton" or "ref".

    Raises:
        InputError: a wrong shape, dtype, device, overlap with ``state``, a width above the write pad, or (for CPU
            tensors, whose values the host has) an accept length, request row or length out of range. ``state`` is then
            unchanged. No requests are no work.

    Source: contracts.md §0, facts.md §2-§3.
    """
    given = (state, req_pool_indices, seq_lens, accept_lens, ring_size, num_draft_tokens)
    OP.checked(check, backend, *given, also=(write_pad,))
