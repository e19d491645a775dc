"""The bonus tokens as one Triton launch, a request at a time with scalar reads only."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_npu.ops._launch import launch


@triton.jit(do_not_specialize=["batch_size"])
def fill_bonus_tokens_kernel(bonus_tokens, predict, accept_index, accept_lens, batch_size, index_width):
    for batch in range(tl.program_id(0), batch_size, tl.num_programs(0)):
        accepted = tl.load(accept_lens + batch).to(tl.int32)
        row = tl.load(accept_index + batch * index_width + accepted - 1).to(tl.int32)
        token = tl.load(predict + row)
        tl.store(bonus_tokens + batch, token.to(bonus_tokens.dtype.element_ty))


def run(
    bonus_tokens: torch.Tensor, predict: torch.Tensor, accept_index: torch.Tensor, accept_lens: torch.Tensor
) -> None:
    bs, index_width = accept_index.shape
    launch(
        fill_bonus_tokens_kernel,
        bs,
        predict.device,
        bonus_tokens,
        predict,
        accept_index,
        accept_lens,
        bs,
        index_width,
    )
