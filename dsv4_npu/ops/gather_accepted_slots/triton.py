"""The accepted slots as one Triton launch, a request at a time."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_npu.ops._launch import launch, next_power_of_2


@triton.jit(do_not_specialize=["batch_size"])
def gather_accepted_slots_kernel(
    tgt,
    src,
    out_cache_loc,
    accept_index,
    accept_lens,
    batch_size,
    verify_width,
    index_width,
    ROWS: tl.constexpr,
):
    entry = tl.arange(0, ROWS)
    inside = entry < index_width
    for batch in range(tl.program_id(0), batch_size, tl.num_programs(0)):
        accepted = tl.load(accept_lens + batch).to(tl.int32)
        live = entry < accepted
        first = batch * verify_width
        row = tl.load(accept_index + batch * index_width + entry, mask=live, other=0).to(tl.int32)
        # Slots are numbered in 32 bits; vectors of 64-bit integers are slow on Ascend.
        source = tl.load(out_cache_loc + tl.where(live, row, first)).to(tl.int32)
        target = tl.load(out_cache_loc + first + entry, mask=live, other=-1).to(tl.int32)
        out = batch * index_width + entry
        tl.store(src + out, tl.where(live, source, -1).to(src.dtype.element_ty), mask=inside)
        tl.store(tgt + out, tl.where(live, target, -1).to(tgt.dtype.element_ty), mask=inside)


def run(
    out_cache_loc: torch.Tensor, accept_index: torch.Tensor, accept_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    bs, index_width = accept_index.shape
    tgt, src = out_cache_loc.new_empty(accept_index.shape), out_cache_loc.new_empty(accept_index.shape)
    launch(
        gather_accepted_slots_kernel,
        bs if index_width else 0,
        out_cache_loc.device,
        tgt,
        src,
        out_cache_loc,
        accept_index,
        accept_lens,
        bs,
        out_cache_loc.shape[0] // max(bs, 1),
        index_width,
        ROWS=next_power_of_2(max(index_width, 1)),
    )
    return tgt, src
