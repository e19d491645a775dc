"""Simulated acceptance: the layout of a real one with a given length. It says nothing about acceptance rates.

For measuring what rounds of a certain length cost. Whoever reports such a run says "simulated" with every number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from dsv4_npu.errors import ConfigError, InputError
from dsv4_npu.spec.trees import TreeLayout
from dsv4_npu.spec.verify import VerifyResult

SimulatedTokens = Literal["fixed", "drafts"]


@dataclass(frozen=True)
class SimulatedResult(VerifyResult):
    """A result that no target decided."""


def check_simulated(tokens: str, topk: int) -> None:
    """Raise ConfigError for a token mode that does not exist or does not go with the tree."""
    if tokens not in ("fixed", "drafts"):
        raise ConfigError(f"simulated_tokens = {tokens!r}; 'fixed' or 'drafts' is needed")
    if tokens == "drafts" and topk > 1:
        raise ConfigError(
            f"simulated_tokens = 'drafts' with topk = {topk}; 1 is needed: on a tree the drafts of a simulated path "
            "are no history that the target would follow; use 'fixed'"
        )


def simulate_acceptance(
    candidates: torch.Tensor,
    layout: TreeLayout,
    lengths: torch.Tensor,
    depth: int,
    *,
    tokens: SimulatedTokens,
    topk: int,
    fixed_token: int = 0,
    target_predict: torch.Tensor | None = None,
) -> SimulatedResult:
    """Accept ``lengths`` rows of each request, along the path to the deepest node (the first of them).

    ``tokens`` is what the rows predict: ``fixed`` says ``fixed_token`` everywhere; ``drafts``, for chains alone, the
    drafts themselves, and as bonus the target's choice after row ``length − 1``.

    Args:
        candidates: int64 ``[bs, D]``.
        layout: of the same trees.
        lengths: int64 ``[bs]``, rows to accept, the root included; at least 1. A length that the deepest path or
            ``depth`` cannot hold is cut to it.
        depth: W, the width of ``accept_index``.
        target_predict: int64 ``[bs, D]``, needed for ``drafts``.

    Raises:
        ConfigError: ``drafts`` with ``topk`` > 1, or an unknown mode.
        InputError: wrong shapes, or no ``target_predict`` where it is needed.
    """
    check_simulated(tokens, topk)
    batch, width = candidates.shape
    if lengths.shape != (batch,):
        raise InputError(f"lengths of shape {tuple(lengths.shape)}; [{batch}] is needed")
    deepest = layout.depth.argmax(-1, keepdim=True)
    path = layout.mask.gather(1, deepest[:, :, None].expand(batch, 1, width))[:, 0]
    most = path.sum(-1).clamp_max(depth)
    lens = torch.minimum(lengths.clamp_min(1), most)
    # Parents come before their children, so the path in the order of its nodes is the path from the root down.
    order = torch.where(path, 0, width) + torch.arange(width, device=candidates.device)
    nodes = order.sort(-1).values % width
    if depth > width:
        nodes = torch.cat((nodes, nodes.new_zeros((batch, depth - width))), dim=-1)
    nodes = nodes[:, :depth]
    valid = torch.arange(depth, device=candidates.device) < lens[:, None]
    index = torch.where(valid, layout.retrieve_index.gather(1, nodes), -1).to(torch.int32)
    if tokens == "fixed":
        predict = candidates.new_full((batch * width,), fixed_token, dtype=torch.int32)
    else:
        if target_predict is None or target_predict.shape != candidates.shape:
            raise InputError("target_predict: the target's choice after each row, [bs, D], is needed for 'drafts'")
        follow = torch.cat((candidates[:, 1:], candidates[:, :1]), dim=1)
        at_bonus = torch.arange(width, device=candidates.device) == lens[:, None] - 1
        predict = torch.where(at_bonus, target_predict, follow).flatten().to(torch.int32)
    return SimulatedResult(predict, index, lens.to(torch.int32))
