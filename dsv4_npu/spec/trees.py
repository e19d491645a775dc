"""Trees of drafts: their sizes, the tensors that describe them, and how they are accepted.

A tree has ``D`` nodes: node 0 is the root (the last token of the history), the others are drafts; a parent comes before
its children, and siblings are tried in the order of their nodes. Node ``j`` of request ``b`` is verify row
``b · D + j``: its KV goes to the slot of position ``seq_len + j`` (the slot follows the row), while its rotary position
is ``seq_len + depth`` (the position follows the depth).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4_npu.errors import ConfigError, InputError
from dsv4_npu.ops import tree_speculative_sampling_target_only, verify_tree_greedy
from dsv4_npu.spec import sizing
from dsv4_npu.spec.verify import VerifyResult


@dataclass(frozen=True)
class TreeSpec:
    """The shape of a round: ``topk`` branches per node, ``steps`` levels, ``width`` = D rows per verify.

    ``topk`` 1 is a chain; ``steps`` 0 with D = 1 is decoding without speculation.

    Raises:
        ConfigError: a number out of range, or more rows than the tree has nodes.
    """

    topk: int
    steps: int
    width: int

    def __post_init__(self) -> None:
        if self.topk < 1:
            raise ConfigError(f"topk = {self.topk}; at least 1 is needed")
        if self.steps < 0 or (self.steps == 0 and self.width > 1):
            raise ConfigError(f"steps = {self.steps}; at least 1 is needed for a tree of {self.width} nodes")
        most = most_nodes(self.topk, self.steps)
        if not 1 <= self.width <= most:
            raise ConfigError(
                f"draft_tokens = {self.width - 1}; a tree of topk = {self.topk} and steps = {self.steps} has "
                f"{most - 1} drafts to choose from"
            )

    @property
    def depth(self) -> int:
        """W, the width of ``accept_index``: the most rows that can be accepted."""
        return self.steps + 1

    @property
    def branches(self) -> bool:
        """Whether an accepted path can lie elsewhere than in the first rows: there is something to move."""
        return self.topk > 1

    def reserve(self, page: int) -> int:
        """Positions kept allocated behind the committed end: two decodes, each branch at its worst case."""
        return sizing.reserve(sizing.alloc_len(self.steps, self.width, page, self.topk))


def most_nodes(topk: int, steps: int) -> int:
    """Nodes of the largest tree, the root included.

    The root has ``topk`` children, and so has each of the ``topk`` best nodes of every further level but the last.
    """
    return 1 + (topk + (steps - 1) * topk * topk if steps else 0)


@dataclass(frozen=True)
class TreeLayout:
    """What verify and attention need to know of ``bs`` trees of ``D`` nodes.

    Attributes:
        retrieve_index: int64 ``[bs, D]``; verify row of each node, ``b · D + j``.
        next_token: int64 ``[bs, D]``; first child of each node, -1 without one.
        next_sibling: int64 ``[bs, D]``; next child of the same parent, -1 without one.
        depth: int64 ``[bs, D]``; edges up to the root.
        mask: bool ``[bs, D, D]``; ``mask[b, j, i]``: node i is node j or above it, so row j may attend to row i.
    """

    retrieve_index: torch.Tensor
    next_token: torch.Tensor
    next_sibling: torch.Tensor
    depth: torch.Tensor
    mask: torch.Tensor


def tree_layout(parents: torch.Tensor) -> TreeLayout:
    """The layout of trees from their nodes' parents; nothing is read by the host.

    Args:
        parents: int64 ``[bs, D]``; ``parents[b, j] < j``. -1 for the root, and for nodes that are not used: these are
            nobody's child, and see no other node.
    """
    batch, width = parents.shape
    device = parents.device
    node = torch.arange(width, device=device)
    above = torch.eye(width, dtype=torch.bool, device=device).repeat(batch, 1, 1)
    rows = torch.arange(batch, device=device)
    for j in range(1, width):
        parent = parents[:, j]
        above[:, j] |= above[rows, parent.clamp_min(0)] & (parent >= 0)[:, None]
    # is_child[b, p, j]: node j is a child of node p.
    is_child = (parents[:, None, :] == node[:, None]) & (node > 0)
    first = torch.where(is_child, node, width).amin(-1)
    same = (parents[:, None, :] == parents[:, :, None]) & (parents[:, :, None] >= 0) & (node[None, :] > node[:, None])
    sibling = torch.where(same, node, width).amin(-1)
    return TreeLayout(
        rows[:, None] * width + node,
        torch.where(first < width, first, -1),
        torch.where(sibling < width, sibling, -1),
        above.sum(-1) - 1,
        above,
    )


def _outputs(candidates: torch.Tensor, depth: int) -> VerifyResult:
    if candidates.ndim != 2:
        raise InputError(f"candidates of shape {tuple(candidates.shape)}; [bs, D] is needed")
    if depth < 1:
        raise InputError(f"depth = {depth}; at least 1 is needed")
    batch, width = candidates.shape
    # Rows that are not accepted keep what was here; -1 is no token, so nobody can take it for one.
    return VerifyResult(
        candidates.new_full((batch * width,), -1, dtype=torch.int32),
        candidates.new_empty((batch, depth), dtype=torch.int32),
        candidates.new_empty(batch, dtype=torch.int32),
    )


def accept_tree_greedy(
    candidates: torch.Tensor, layout: TreeLayout, target_predict: torch.Tensor, depth: int
) -> VerifyResult:
    """Accept the path along the target's own choices, siblings included.

    Args:
        candidates: int64 ``[bs, D]``; column 0 is the root, -1 means "no draft".
        layout: of the same trees.
        target_predict: int64 ``[bs, D]``; the target's choice after each row.
        depth: W, the most rows that can be accepted.
    """
    result = _outputs(candidates, depth)
    verify_tree_greedy(
        result.predict,
        result.accept_index,
        result.accept_lens,
        candidates,
        layout.retrieve_index,
        layout.next_token,
        layout.next_sibling,
        target_predict,
    )
    return VerifyResult(result.predict, result.accept_index, result.accept_lens + 1)


def accept_tree_sampling(
    candidates: torch.Tensor,
    layout: TreeLayout,
    target_probs: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    depth: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> VerifyResult:
    """Sample a path by the target's probabilities alone; distributed as the target at thresholds of 1.

    Args:
        candidates, layout, depth: as in :func:`accept_tree_greedy`.
        target_probs: float32 ``[bs, D, V]``.
        coins: float32 ``[bs, D]`` in [0, 1]; one per node, for the choice among its children.
        final_coins: float32 ``[bs]`` in [0, 1].
        threshold_single, threshold_acc: in [0, 1]; below 1 acceptance is lossy by design.
    """
    result = _outputs(candidates, depth)
    tree_speculative_sampling_target_only(
        result.predict,
        result.accept_index,
        result.accept_lens,
        candidates,
        layout.retrieve_index,
        layout.next_token,
        layout.next_sibling,
        coins,
        final_coins,
        target_probs,
        threshold_single,
        threshold_acc,
    )
    return VerifyResult(result.predict, result.accept_index, result.accept_lens + 1)
