"""What SGLang calls after an allocation, before a verify, and for a transfer: batches, without a loop over requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dsv4_npu import addressing
from dsv4_npu.alloc.rollback import RingRule
from dsv4_npu.sglang.bundle import OutCacheLoc
from dsv4_npu.sglang.late_reads import to_device
from dsv4_npu.sglang.slots import Growth, page_tables, slots_of

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


def maybe_write_dsv4_extend(
    batch: Any, req_pool_indices_cpu: torch.Tensor, prefix_lens_cpu: torch.Tensor, seq_lens_cpu: torch.Tensor
) -> None:
    """Store the new C128 pages of ``batch.out_cache_loc_dsv4`` in the sidecar; nothing to do for other pools."""
    bundle, pool = batch.out_cache_loc_dsv4, batch.req_to_token_pool
    if bundle is None or not hasattr(pool, "grow_rows"):
        return
    _store(pool, bundle, req_pool_indices_cpu.cpu().numpy(), prefix_lens_cpu.numpy(), seq_lens_cpu.numpy())


def maybe_write_dsv4_decode(batch: Any, seq_lens_cpu: torch.Tensor, token_per_req: int) -> None:
    """The same after a decode that made each request ``token_per_req`` longer: ``seq_lens_cpu`` counts them."""
    bundle, pool = batch.out_cache_loc_dsv4, batch.req_to_token_pool
    if bundle is None or not hasattr(pool, "grow_rows"):
        return
    new = seq_lens_cpu.numpy()
    old = np.maximum(new - token_per_req, 0)
    closing = np.flatnonzero(new // addressing.C128_RATIO > old // addressing.C128_RATIO)
    if len(closing):
        _store(pool, bundle, _rows_of(batch)[closing], old[closing], new[closing])


def maybe_build_dsv4_verify_bundle(
    batch: Any, draft_token_num: int, *, live_seq_lens_cpu: torch.Tensor | None = None
) -> OutCacheLoc | None:
    """Slots of the ``draft_token_num`` positions that a verify writes behind each request's length.

    They lie in pages that were reserved before, so nothing is allocated: FULL slots are ``batch.out_cache_loc``.
    """
    pool = batch.req_to_token_pool
    if not hasattr(pool, "grow_rows") or batch.out_cache_loc_dsv4 is None:
        return None
    rows = _rows_of(batch)
    if live_seq_lens_cpu is None:
        live_seq_lens_cpu = batch.seq_lens_cpu
    if live_seq_lens_cpu is None:
        live_seq_lens_cpu = batch.seq_lens[: len(rows)].cpu()
    start = live_seq_lens_cpu[: len(rows)].numpy()
    stop = start + draft_token_num
    full = batch.out_cache_loc
    closing = np.flatnonzero((start[:, None] + np.arange(draft_token_num)).reshape(-1) % addressing.C4_RATIO == 3)
    return OutCacheLoc(
        full,
        batch.token_to_kv_pool_allocator.translate_loc_from_full_to_swa(full).to(full.dtype),
        full[to_device(closing, full.device)] // addressing.C4_RATIO,
        _window_c128(pool, rows, start, stop, full.device),
    )


def dsv4_state_payloads(
    req_to_token_pool: Any, req_pool_idx: int, seq_len: int, page_size: int, *, prefix_len: int = 0
) -> dict[Any, Callable[[], I32]]:
    """What a transfer sends beside SGLang's own lists: C128 pages, and on A5 the live C4 state rows.

    ``page_size`` is SGLang's and not needed. A hole among the pages raises OwnershipError instead of being skipped.
    """
    from sglang.srt.disaggregation.ascend.conn import AscendStateType
    from sglang.srt.hardware_backend.npu.utils import is_npu_arch35

    length = max(0, int(seq_len))
    skipped = max(0, min(int(prefix_len), length))

    def c128_pages() -> I32:
        unit = req_to_token_pool.c128_page_size
        first = skipped // (addressing.C128_RATIO * unit)
        last = addressing.c128_columns(length, unit)
        found: I32 = req_to_token_pool.sidecar.prefix(int(req_pool_idx), first, max(first, last))
        return found

    payloads: dict[Any, Callable[[], I32]] = {AscendStateType.DSV4_C128: c128_pages}
    if is_npu_arch35():

        def c4_rows() -> I32:
            ring = req_to_token_pool.get_dsv4_c4_state_ring_size()
            start, stop = RingRule(addressing.C4_RATIO, ring, "request").live(length)
            positions = np.arange(start, stop)
            rows = addressing.request_state_rows(np.full_like(positions, req_pool_idx), positions, ring)
            return rows.astype(np.int32)

        payloads[AscendStateType.DSV4_C4_STATE] = c4_rows
    return payloads


def dsv4_prealloc_kwargs(
    allocator: Any, req: Any, fill_len: int, req_to_token_pool: Any, *, device: Any
) -> dict[str, Any]:
    """What our allocator needs beside SGLang's arguments for one preallocated request; nothing for other allocators."""
    if not hasattr(allocator, "c128_attn_allocator"):
        return {}
    row = to_device(np.array([req.kv.req_pool_idx], np.int64), torch.device(device))
    return {"req_pool_indices": row, "req_to_token_pool": req_to_token_pool}


def dsv4_unwrap_prealloc(kv_loc: Any, req_to_token_pool: Any, req: Any, prefix_len: int, fill_len: int) -> Any:
    """FULL slots of a preallocation, whose C128 pages go into the request's row; other slots pass through."""
    if kv_loc is None or not hasattr(kv_loc, "out_full_loc"):
        return kv_loc
    one = [np.array([value], np.int64) for value in (req.kv.req_pool_idx, prefix_len, fill_len)]
    if hasattr(req_to_token_pool, "grow_rows"):
        _store(req_to_token_pool, kv_loc, *one)
    return kv_loc.out_full_loc


def _store(pool: Any, bundle: Any, rows: I64, old: I64, new: I64) -> None:
    given = bundle.given
    pool.grow_rows(rows, old, new, given)
    pool._dsv4_allocator.written(given)


def _rows_of(batch: Any) -> I64:
    rows = getattr(batch, "req_pool_indices_cpu", None)
    found: I64 = (batch.req_pool_indices if rows is None else rows).cpu().numpy()
    return found


def _window_c128(pool: Any, rows: I64, start: I64, stop: I64, device: torch.device) -> torch.Tensor:
    """C128 slots of the entries that close in ``[start, stop)`` of each row, from the host's table."""
    unit = pool.c128_page_size
    entries = Growth.of(start // addressing.C128_RATIO, stop // addressing.C128_RATIO, unit)
    closing = np.flatnonzero(entries.new > entries.old)
    if not len(closing):
        return torch.empty(0, dtype=torch.int32, device=device)
    few = Growth.of(entries.old[closing], entries.new[closing], unit)
    first, count = few.old // unit, few.new_pages
    chosen = np.repeat(rows[closing], count)
    starts = np.cumsum(count) - count
    columns = np.arange(int(count.sum())) + np.repeat(-(-few.old // unit) - starts, count)
    last = to_device(pool.sidecar.table[rows[closing], first], device)
    tables = page_tables(few, pool.sidecar.table[chosen, columns], last, device)
    return slots_of(few, tables).to(torch.int32)
