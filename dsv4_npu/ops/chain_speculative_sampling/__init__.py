"""Rejection sampling along a chain of drafts: outputs are distributed as the target's."""

from __future__ import annotations

import torch

from dsv4_npu.ops._checks import check_at_least, check_tensor
from dsv4_npu.ops._registry import register
from dsv4_npu.ops._verify_checks import (
    PROBABILITY,
    check_coins,
    check_drawn,
    check_outputs,
    check_outputs_alone,
    check_probabilities,
    check_rows,
)
from dsv4_npu.ops.chain_speculative_sampling import ref

SCHEMA = (
    "(Tensor(a!) predicts, Tensor(b!) accept_index, Tensor(c!) accept_token_num, Tensor candidates, "
    "Tensor retrieve_index, Tensor uniform_samples, Tensor uniform_samples_for_final_sampling, Tensor target_probs, "
    "Tensor draft_probs) -> ()"
)


def _meta(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
) -> None:
    return None


OP = register("chain_speculative_sampling", SCHEMA, ref=ref.chain_speculative_sampling, meta=_meta, repeats=True)


def check(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
) -> None:
    """Raise InputError for arguments that :func:`chain_speculative_sampling` refuses."""
    name = OP.name
    bs, drafts = check_outputs(name, predicts, accept_index, accept_token_num, candidates)
    device = candidates.device
    judged = min(drafts, accept_index.shape[1]) - 1
    check_rows(name, retrieve_index, bs, drafts, device)
    check_coins(name, uniform_samples, uniform_samples_for_final_sampling, bs, judged, device)
    vocab = check_probabilities(name, target_probs, bs, drafts, device)
    check_tensor(name, "draft_probs", draft_probs, (bs, f"at least {judged}", vocab), PROBABILITY, device)
    check_at_least(name, "the rows of draft_probs per request", draft_probs.shape[1], judged)
    check_outputs_alone(
        name,
        predicts,
        accept_index,
        accept_token_num,
        candidates=candidates,
        retrieve_index=retrieve_index,
        uniform_samples=uniform_samples,
        uniform_samples_for_final_sampling=uniform_samples_for_final_sampling,
        target_probs=target_probs,
        draft_probs=draft_probs,
    )


def chain_speculative_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    *,
    checked: bool = False,
    backend: str = "auto",
) -> None:
    """Accept drafts while the coins allow it, then draw one token more::

        accept_index[b], rejected = [retrieve_index[b, 0], -1, -1, ...], False
        for step in 1 .. min(D, width) - 1:
            x = candidates[b, step]
            p, q = target_probs[b, step - 1], draft_probs[b, step - 1]
            if not 0 <= x < V: break                          # no draft
            if not (q[x] > 0 and uniform_samples[b, step - 1] * q[x] < p[x]): rejected = True; break
            predicts[last accepted row] = x                   # retrieve_index[b, step] is appended to accept_index[b]
        p, q = the same at the last accepted step
        weights = relu(p - q) if rejected and that has mass else p
        predicts[last accepted row] = first token t with sum(weights[:t + 1]) > final coin * sum(weights)
        accept_token_num[b] = accepted drafts                 # accept_lens - 1

    NaN and negative entries count as 0. The drawn token has weight > 0 for any coin in [0, 1], both ends included; a
    row without a positive entry gives -1. Sums in float32 may give the neighbouring token where the coin lies within
    rounding of a step.

    Args:
        predicts: [bs * D] int32, written at the accepted rows only.
        accept_index: [bs, width] int32, written whole: the accepted rows, then -1. ``width``, the most rows that can be
            accepted, is any number from 1; a walk that it stops draws from p of its last row.
        accept_token_num: [bs] int32, written.
        candidates: [bs, D] int64; the root, then the drafts. A value outside 0..V-1 means "no draft".
        retrieve_index: [bs, D] int64, the verify row of each step, b * D + step.
        uniform_samples: [bs, C] float32 in [0, 1], C >= min(D, width) - 1.
        uniform_samples_for_final_sampling: [bs] float32 in [0, 1].
        target_probs: [bs, D, V] float32.
        draft_probs: [bs, Q, V] float32, Q >= min(D, width) - 1; row ``step - 1`` is the distribution that the draft at
            ``step`` was drawn from.
        checked: look at the result (which waits for the device) and raise if a row had no positive entry.
        backend: "auto" (by the device), "cpu" (C++), "triton" or "ref".

    Raises:
        InputError: a wrong shape, dtype or device, memory shared with an output, or (for CPU tensors, whose values the
            host has) a row out of range; nothing is written then. With ``checked``, also a row without a positive
            entry. No requests are no work.

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
        uniform_samples,
        uniform_samples_for_final_sampling,
        target_probs,
        draft_probs,
    )
    if checked:
        check_drawn(OP.name, predicts, accept_index, accept_token_num)
