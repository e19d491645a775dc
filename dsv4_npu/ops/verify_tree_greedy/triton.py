"""One launch: a program walks its requests' trees one node at a time, for nothing but single elements is read."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_npu.ops._launch import launch, next_power_of_2


@triton.jit(do_not_specialize=["batch", "drafts", "width"])
def verify_tree_greedy_kernel(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    target_predict,
    batch,
    drafts,
    width,
    WIDTH: tl.constexpr,
):
    place = tl.arange(0, WIDTH)
    for request in range(tl.program_id(0), batch, tl.num_programs(0)):
        nodes = request * drafts.to(tl.int64)
        row = tl.load(retrieve_index + nodes)
        wanted = tl.load(target_predict + row)
        path = tl.where(place == 0, row.to(tl.int32), -1)
        node = tl.load(retrieve_next_token + nodes)
        accepted = 0
        seen = 0
        while (node >= 0) & (node < drafts) & (accepted + 1 < width) & (seen < drafts):
            child = tl.load(retrieve_next_token + nodes + node)
            sibling = tl.load(retrieve_next_sibling + nodes + node)
            if tl.load(candidates + nodes + node) == wanted:
                tl.store(predicts + row, wanted.to(tl.int32))
                row = tl.load(retrieve_index + nodes + node)
                wanted = tl.load(target_predict + row)
                accepted += 1
                path = tl.where(place == accepted, row.to(tl.int32), path)
                node = child
            else:
                node = sibling
            seen += 1
        tl.store(predicts + row, wanted.to(tl.int32))
        tl.store(accept_index + request * width.to(tl.int64) + place, path, mask=place < width)
        tl.store(accept_token_num + request, accepted)


def run(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    batch, drafts = candidates.shape
    width = accept_index.shape[1]
    launch(
        verify_tree_greedy_kernel,
        batch,
        candidates.device,
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrieve_index,
        retrieve_next_token,
        retrieve_next_sibling,
        target_predict,
        batch,
        drafts,
        width,
        WIDTH=next_power_of_2(width),
        num_warps=1,
    )
