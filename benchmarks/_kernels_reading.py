"""A kernel that only reads and adds up the rows that a draw has to read: no draw takes less time than that."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 512
PROGRAMS = 2112  # 16 of one warp on each of an H200's processors


@triton.jit
def add_rows_kernel(p, q, sums, p_stride, q_stride, vocab, parts, each, BOTH: tl.constexpr, BLOCK: tl.constexpr):
    request, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    i = tl.arange(0, BLOCK)
    p += request.to(tl.int64) * p_stride
    q += request.to(tl.int64) * q_stride
    limit = tl.minimum((part + 1) * each * BLOCK, vocab)
    total = 0.0
    following = tl.load(p + part * each * BLOCK + i, mask=i < limit - part * each * BLOCK, other=0.0)
    for start in range(part * each * BLOCK, limit, BLOCK):
        weight = following
        following = tl.load(p + start + BLOCK + i, mask=i < limit - start - BLOCK, other=0.0)
        if BOTH:
            weight -= tl.load(q + start + i, mask=i < limit - start, other=0.0)
        total += tl.sum(weight, 0)
    tl.store(sums + tl.program_id(0), total)


def add_rows(p: torch.Tensor, q: torch.Tensor | None) -> None:
    """Sums of parts of ``p[:, 0]``, or of ``p[:, 0] - q[:, 0]``, thrown away."""
    batch, _, vocab = p.shape
    blocks = triton.cdiv(vocab, BLOCK)
    each = triton.cdiv(blocks, max(1, min(blocks, PROGRAMS // batch)))
    parts = triton.cdiv(blocks, each)
    sums = torch.empty(batch * parts, device=p.device)
    other = p if q is None else q
    add_rows_kernel[(batch * parts,)](
        p, other, sums, p.stride(0), other.stride(0), vocab, parts, each, BOTH=q is not None, BLOCK=BLOCK, num_warps=1
    )
