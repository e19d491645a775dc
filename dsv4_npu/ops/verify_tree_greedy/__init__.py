"""Greedy verification of a tree of drafts: follow the target's own tokens, siblings included."""

from __future__ import annotations

import torch

from dsv4_npu.ops._checks import check_tensor
from dsv4_npu.ops._registry import register
from dsv4_npu.ops._verify_checks import INDEX, check_links, check_outputs, check_outputs_alone, check_rows
from dsv4_npu.ops.verify_tree_greedy import ref

SCHEMA = (
    "(Tensor(a!) predicts, Tensor(b!) accept_index, Tensor(c!) accept_token_num, Tensor candidates, "
    "Tensor retrieve_index, Tensor retrieve_next_token, Tensor retrieve_next_sibling, Tensor target_predict) -> ()"
)


def _meta(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    return None


OP = register("verify_tree_greedy", SCHEMA, ref=ref.verify_tree_greedy, meta=_meta, repeats=True)


def check(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Raise InputError for arguments that :func:`verify_tree_greedy` refuses."""
    name = OP.name
    bs, drafts = check_outputs(name, predicts, accept_index, accept_token_num, candidates)
    device = candidates.device
    check_rows(name, retrieve_index, bs, drafts, device)
    check_links(name, retrieve_next_token, retrieve_next_sibling, bs, drafts, device)
    check_tensor(name, "target_predict", target_predict, (bs, drafts), INDEX, device)
    check_outputs_alone(
        name,
        predicts,
        accept_index,
        accept_token_num,
        candidates=candidates,
        retrieve_index=retrieve_index,
        retrieve_next_token=retrieve_next_token,
        retrieve_next_sibling=retrieve_next_sibling,
        target_predict=target_predict,
    )


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Accept the drafts that the target would have produced itself::

        row, node = retrieve_index[b, 0], retrieve_next_token[b, 0]
        accept_index[b] = [row, -1, -1, ...]
        while node is one of 0..D-1 and accept_index[b] is not full:
            if candidates[b, node] == target_predict[row]:
                predicts[row] = candidates[b, node]
                row = retrieve_index[b, node]                 # appended to accept_index[b]
                node = retrieve_next_token[b, node]
            else:
                node = retrieve_next_sibling[b, node]
        predicts[row] = target_predict[row]                   # the bonus
        accept_token_num[b] = accepted drafts                 # accept_lens - 1

    Args:
        predicts: [bs * D] int32, written at the accepted rows only.
        accept_index: [bs, width] int32, written whole: the accepted rows, then -1. ``width``, the most rows that can be
            accepted, is any number from 1.
        accept_token_num: [bs] int32, written.
        candidates: [bs, D] int64; node 0 is the root, the others are drafts.
        retrieve_index: [bs, D] int64, the verify row of each node, b * D + node.
        retrieve_next_token, retrieve_next_sibling: [bs, D] int64, first child and next sibling as nodes; -1: none.
        target_predict: [bs, D] int64, the target's token after each verify row.
        backend: "auto" (by the device), "cpu" (C++), "triton" or "ref".

    Raises:
        InputError: a wrong shape, dtype or device, memory shared with an output, or (for CPU tensors, whose values the
            host has) a row or link out of range; nothing is written then. No requests are no work.

    Source: contracts.md §1-§2.
    """
    OP.checked(
        check,
        backend,
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrieve_index,
        retrieve_next_token,
        retrieve_next_sibling,
        target_predict,
    )
