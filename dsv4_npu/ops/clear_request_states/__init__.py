"""Empty the whole state bank of requests whose rows change owner, in every layer with one launch."""

from __future__ import annotations

import torch

from dsv4_npu.ops._checks import (
    INDEX_TYPES,
    check_at_least,
    check_no_overlap,
    check_tensor,
    check_values,
    fail,
)
from dsv4_npu.ops._registry import register
from dsv4_npu.ops.clear_request_states import ref

SCHEMA = "(Tensor(a!) state, Tensor req_pool_indices, int ring_size) -> ()"


def _meta(state: torch.Tensor, req_pool_indices: torch.Tensor, ring_size: int) -> None:
    return None


OP = register("clear_request_states_", SCHEMA, ref=ref.clear_request_states_, meta=_meta, repeats=True)


def check(
    state: torch.Tensor,
    req_pool_indices: torch.Tensor,
    ring_size: int,
) -> None:
    """Raise InputError for arguments that :func:`clear_request_states_` refuses."""
    name = OP.name
    check_tensor(name, "state", state, ("layers", "rows", "2 D"), (torch.float32, torch.float64))
    check_tensor(name, "req_pool_indices", req_pool_indices, ("n",), INDEX_TYPES, state.device)
    if state.shape[2] % 2:
        fail(name, f"state has rows of {state.shape[2]} elements; allowed: an even number, the kv and the score half")
    check_at_least(name, "ring_size", ring_size, 1)
    check_no_overlap(name, "state", state, req_pool_indices=req_pool_indices)
    check_values(name, "req_pool_indices", req_pool_indices, 0, state.shape[1] // ring_size - 1)


def clear_request_states_(
    state: torch.Tensor, req_pool_indices: torch.Tensor, ring_size: int, *, backend: str = "auto"
) -> None:
    """Write the empty row (kv 0, score -inf) over each row of the requests' banks::

        for request in req_pool_indices:
            state[:, request * ring_size : (request + 1) * ring_size, :D] = 0
            state[:, request * ring_size : (request + 1) * ring_size, D:] = -inf

    For the request-owned states: C128 everywhere, C4 (attention and indexer) on A5.

    Args:
        state: [layers, rows, 2 D] float32 or float64, contiguous; changed in place.
        req_pool_indices: [n] int32 or int64 request rows; an empty one is no work.
        ring_size: rows per request bank.
        backend: "auto" (by the device), "cpu" (C++), "triton" or "ref".

    Raises:
        InputError: a wrong shape, dtype, device, overlap with ``state``, or (CPU tensors) a request row whose bank does
            not lie within the state. ``state`` is then unchanged.

    Source: facts.md §2 (empty row, ring address), §3 (A5 clears its C4 bank when the row changes owner).
    """
    OP.checked(check, backend, state, req_pool_indices, ring_size)
