"""Accepting a verified chain: greedy, or by rejection sampling.

The contract of every acceptance: row 0 of a request is the old root; ``accept_lens`` = correct drafts + 1 leading
entries of ``accept_index`` are valid and the rest are -1; ``predict[accept_index[b, :accept_lens]]`` is the accepted
drafts and the bonus. Consumers read by length, never by width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4_npu.errors import InputError
from dsv4_npu.ops.chain_speculative_sampling import chain_speculative_sampling
from dsv4_npu.ops.verify_tree_greedy import verify_tree_greedy


@dataclass(frozen=True)
class VerifyResult:
    """What an acceptance decided for ``bs`` requests of ``D`` verify rows each.

    Attributes:
        predict: int32 ``[bs · D]``; the token that follows each accepted row.
        accept_index: int32 ``[bs, S]``; accepted verify rows (``b · D + j``), -1 behind them. S = most rows accepted.
        accept_lens: int32 ``[bs]``; accepted rows, the root included.
    """

    predict: torch.Tensor
    accept_index: torch.Tensor
    accept_lens: torch.Tensor


def chain_layout(
    batch: int, width: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A chain of ``width`` rows per request as the tree tensors that verify takes: int64 ``[batch, width]`` each.

    ``retrieve_index[b, j] = b · width + j``; ``next_token[j] = j + 1`` (-1 at the end); no siblings.
    """
    row = torch.arange(width, device=device)
    index = torch.arange(batch, device=device)[:, None] * width + row
    child = torch.where(row + 1 < width, row + 1, -1).expand(batch, width).contiguous()
    return index, child, torch.full((batch, width), -1, dtype=torch.int64, device=device)


def _outputs(candidates: torch.Tensor, depth: int) -> VerifyResult:
    batch, width = candidates.shape
    return VerifyResult(
        candidates.new_empty(batch * width, dtype=torch.int32),
        candidates.new_empty((batch, depth), dtype=torch.int32),
        candidates.new_empty(batch, dtype=torch.int32),
    )


def _depth(candidates: torch.Tensor, depth: int | None) -> int:
    if candidates.ndim != 2:
        raise InputError(f"candidates of shape {tuple(candidates.shape)}; [bs, D] is needed")
    width = candidates.shape[1]
    depth = width if depth is None else depth
    if not 1 <= depth <= width:
        raise InputError(f"depth = {depth}; 1 to the verify width {width} is needed")
    return depth


def accept_greedy(candidates: torch.Tensor, target_predict: torch.Tensor, depth: int | None = None) -> VerifyResult:
    """Accept the drafts that equal the target's own choice, up to the first that differs.

    Args:
        candidates: int64 ``[bs, D]``; column 0 is the root.
        target_predict: int64 ``[bs, D]``; the target's choice after each row.
        depth: S, the most rows that can be accepted (D when None).
    """
    depth = _depth(candidates, depth)
    result = _outputs(candidates, depth)
    layout = chain_layout(candidates.shape[0], candidates.shape[1], candidates.device)
    verify_tree_greedy(result.predict, result.accept_index, result.accept_lens, candidates, *layout, target_predict)
    return VerifyResult(result.predict, result.accept_index, result.accept_lens + 1)


def accept_rejection(
    candidates: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    depth: int | None = None,
) -> VerifyResult:
    """Accept draft x of a chain iff ``q(x) > 0`` and ``coin · q(x) < p(x)``; then draw from the residual or from p.

    Args:
        candidates: int64 ``[bs, D]``; column 0 is the root, -1 means "no draft".
        target_probs: float32 ``[bs, D, V]``; row j − 1 judges the draft in column j.
        draft_probs: like ``target_probs``; row j − 1 is what the draft in column j was drawn from.
        coins: float32 ``[bs, D]`` in [0, 1]; coin j − 1 for column j.
        final_coins: float32 ``[bs]`` in [0, 1].
    """
    depth = _depth(candidates, depth)
    result = _outputs(candidates, depth)
    index, _, _ = chain_layout(candidates.shape[0], candidates.shape[1], candidates.device)
    chain_speculative_sampling(
        result.predict,
        result.accept_index,
        result.accept_lens,
        candidates,
        index,
        coins,
        final_coins,
        target_probs,
        draft_probs,
    )
    return VerifyResult(result.predict, result.accept_index, result.accept_lens + 1)
