"""Target-only sampling over a tree of drafts: needs no draft probabilities."""

from __future__ import annotations

import torch

from dsv4_npu.ops._registry import register
from dsv4_npu.ops._verify_checks import (
    check_coins,
    check_drawn,
    check_links,
    check_outputs,
    check_outputs_alone,
    check_probabilities,
    check_rows,
    check_threshold,
)
from dsv4_npu.ops.tree_speculative_sampling_target_only import ref

SCHEMA = (
    "(Tensor(a!) predicts, Tensor(b!) accept_index, Tensor(c!) accept_token_num, Tensor candidates, "
    "Tensor retrieve_index, Tensor retrieve_next_token, Tensor retrieve_next_sibling, Tensor uniform_samples, "
    "Tensor uniform_samples_for_final_sampling, Tensor target_probs, float threshold_single=1.0, "
    "float threshold_acc=1.0) -> ()"
)


def _meta(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> None:
    return None


OP = register(
    "tree_speculative_sampling_target_only",
    SCHEMA,
    ref=ref.tree_speculative_sampling_target_only,
    meta=_meta,
    repeats=True,
)


def check(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
) -> None:
    """Raise InputError for arguments that :func:`tree_speculative_sampling_target_only` refuses."""
    name = OP.name
    bs, drafts = check_outputs(name, predicts, accept_index, accept_token_num, candidates)
    device = candidates.device
    check_rows(name, retrieve_index, bs, drafts, device)
    check_links(name, retrieve_next_token, retrieve_next_sibling, bs, drafts, device)
    check_coins(name, uniform_samples, uniform_samples_for_final_sampling, bs, drafts, device)
    check_probabilities(name, target_probs, bs, drafts, device)
    check_threshold(name, "threshold_single", threshold_single)
    check_threshold(name, "threshold_acc", threshold_acc)
    check_outputs_alone(
        name,
        predicts,
        accept_index,
        accept_token_num,
        candidates=candidates,
        retrieve_index=retrieve_index,
        retrieve_next_token=retrieve_next_token,
        retrieve_next_sibling=retrieve_next_sibling,
        uniform_samples=uniform_samples,
        uniform_samples_for_final_sampling=uniform_samples_for_final_sampling,
        target_probs=target_probs,
    )


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    *,
    checked: bool = False,
    backend: str = "auto",
) -> None:
    """Walk down the tree; at each node its children share one coin, in sibling order::

        parent, node = 0, retrieve_next_token[b, 0]
        accept_index[b], reached, tried = [retrieve_index[b, 0], -1, -1, ...], 0, {}
        while node is one of 0..D-1 and accept_index[b] is not full:
            x, p = candidates[b, node], target_probs[b, parent]
            if 0 <= x < V and x not in tried:
                reached += p[x]
                tried += {x}
                if p[x] > 0 and (uniform_samples[b, parent] < reached / threshold_acc or p[x] >= threshold_single):
                    predicts[last accepted row] = x           # retrieve_index[b, node] is appended to accept_index[b]
                    parent, node, reached, tried = node, retrieve_next_token[b, node], 0, {}
                    continue
            node = retrieve_next_sibling[b, node]
        weights = target_probs[b, parent] without the tokens in tried if that has mass, else with them
        predicts[last accepted row] = first token t with sum(weights[:t + 1]) > final coin * sum(weights)
        accept_token_num[b] = accepted drafts                 # accept_lens - 1

    At thresholds of 1 the outputs are distributed as the target's; below 1 acceptance is lossy by design. NaN and
    negative entries count as 0. The drawn token has weight > 0 for any coin in [0, 1], both ends included; a row
    without a positive entry gives -1. Sums in float32 may give the neighbouring token where the coin lies within
    rounding of a step.

    Args:
        predicts: [bs * D] int32, written at the accepted rows only.
        accept_index: [bs, width] int32, written whole: the accepted rows, then -1. ``width``, the most rows that can be
            accepted, is any number from 1; a walk that it stops draws from p of its last row.
        accept_token_num: [bs] int32, written.
        candidates: [bs, D] int64; node 0 is the root, the others are drafts. A value outside 0..V-1 means "no draft".
        retrieve_index: [bs, D] int64, the verify row of each node, b * D + node.
        retrieve_next_token, retrieve_next_sibling: [bs, D] int64, first child and next sibling as nodes; -1: none.
        uniform_samples: [bs, C] float32 in [0, 1], C >= D: one coin per node, for the choice among its children.
        uniform_samples_for_final_sampling: [bs] float32 in [0, 1].
        target_probs: [bs, D, V] float32.
        threshold_single, threshold_acc: in [0, 1]; threshold_acc counts as at least 1e-9.
        checked: look at the result (which waits for the device) and raise if a row had no positive entry.
        backend: "auto" (by the device), "cpu" (C++), "triton" or "ref".

    Raises:
        InputError: a wrong shape, dtype, device or threshold, memory shared with an output, or (for CPU tensors, whose
            values the host has) a row or link out of range; nothing is written then. With ``checked``, also a row
            without a positive entry. No requests are no work.

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
        uniform_samples,
        uniform_samples_for_final_sampling,
        target_probs,
        threshold_single,
        threshold_acc,
    )
    if checked:
        check_drawn(OP.name, predicts, accept_index, accept_token_num)
