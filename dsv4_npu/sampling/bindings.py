"""SGLang's argument lists on top of the ops. Spelling (``retrive_*``), names and order are SGLang's."""

from __future__ import annotations

import torch

from dsv4_npu.errors import InputError
from dsv4_npu.ops import chain_speculative_sampling as _chain
from dsv4_npu.ops import top_k_renorm_prob as _top_k
from dsv4_npu.ops import top_p_renorm_prob as _top_p
from dsv4_npu.ops import tree_speculative_sampling_target_only as _tree
from dsv4_npu.ops import verify_tree_greedy as _greedy
from dsv4_npu.ops._registry import BACKENDS as OP_BACKENDS
from dsv4_npu.ops._verify_checks import check_drawn
from dsv4_npu.ops.chain_speculative_sampling import check as _check_chain
from dsv4_npu.ops.top_k_renorm_prob import check as _check_top_k
from dsv4_npu.ops.top_p_renorm_prob import check as _check_top_p
from dsv4_npu.ops.tree_speculative_sampling_target_only import check as _check_tree
from dsv4_npu.ops.verify_tree_greedy import check as _check_greedy
from dsv4_npu.sampling.installed import trusted

BACKENDS = (*OP_BACKENDS, "sgl_kernel_npu")
LIBRARY = "sgl_kernel_npu"

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _own(op: str, backend: str) -> str:
    """The backend for this package's op where the library's function is not to be used."""
    if backend not in BACKENDS:
        raise InputError(f"{op}: backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    return "auto" if backend == LIBRARY else backend


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
    *,
    backend: str = "auto",
) -> Outputs:
    """Greedy tree verification; see :func:`dsv4_npu.ops.verify_tree_greedy`.

    ``topk`` is accepted for SGLang's sake and not needed: the links say which nodes are siblings.

    Returns:
        The three outputs, which were written in place.
    """
    arguments = (
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        target_predict,
    )
    if backend == LIBRARY:
        _check_greedy(*arguments)
        function = trusted("verify_tree_greedy", candidates.device)
        if function is not None:
            if candidates.shape[0]:
                function(*arguments)
            return predicts, accept_index, accept_token_num
    _greedy(*arguments, backend=_own("verify_tree_greedy", backend))
    return predicts, accept_index, accept_token_num


def chain_speculative_sampling_triton(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor | None,
    retrive_next_sibling: torch.Tensor | None,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    *,
    checked: bool = False,
    backend: str = "auto",
) -> Outputs:
    """Rejection sampling along a chain; see :func:`dsv4_npu.ops.chain_speculative_sampling`.

    A chain has no links and no thresholds, so those four arguments are not read; it is deterministic in any case. The
    library is given the links of a chain and thresholds of 1.

    Returns:
        The three outputs, which were written in place.
    """
    arguments = (
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        uniform_samples,
        uniform_samples_for_final_sampling,
        target_probs,
        draft_probs,
    )
    if backend == LIBRARY:
        _check_chain(*arguments)
        function = trusted("chain_speculative_sampling_triton", candidates.device)
        if function is not None:
            if candidates.shape[0]:
                function(*arguments[:5], *_chain_links(candidates), *arguments[5:], 1.0, 1.0, deterministic)
            if checked:
                check_drawn("chain_speculative_sampling_triton", predicts, accept_index, accept_token_num)
            return predicts, accept_index, accept_token_num
    own = _own("chain_speculative_sampling_triton", backend)
    _chain(*arguments, checked=checked, backend=own)
    return predicts, accept_index, accept_token_num


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    *,
    checked: bool = False,
    backend: str = "auto",
) -> Outputs:
    """Target-only tree sampling; see :func:`dsv4_npu.ops.tree_speculative_sampling_target_only`.

    ``draft_probs`` is scratch of other implementations: neither read nor written, for the library is given zeros of its
    own. Deterministic in any case.

    Returns:
        The three outputs, which were written in place.
    """
    arguments = (
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        uniform_samples,
        uniform_samples_for_final_sampling,
        target_probs,
    )
    thresholds = (threshold_single, threshold_acc)
    if backend == LIBRARY:
        _check_tree(*arguments, *thresholds)
        function = trusted("tree_speculative_sampling_target_only", candidates.device)
        if function is not None:
            if candidates.shape[0]:
                function(*arguments, torch.zeros_like(target_probs), *thresholds, deterministic)
            if checked:
                check_drawn("tree_speculative_sampling_target_only", predicts, accept_index, accept_token_num)
            return predicts, accept_index, accept_token_num
    own = _own("tree_speculative_sampling_target_only", backend)
    _tree(*arguments, *thresholds, checked=checked, backend=own)
    return predicts, accept_index, accept_token_num


def _chain_links(candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of each node, [bs, D] int64, where every node has one child."""
    siblings = torch.full_like(candidates, -1)
    children = siblings.clone()
    children[:, :-1] = torch.arange(1, candidates.shape[1], device=candidates.device)
    return children, siblings


def top_k_renorm_prob(probs: torch.Tensor, top_k: torch.Tensor | int, *, backend: str = "auto") -> torch.Tensor:
    """Top-k renormalisation; see :func:`dsv4_npu.ops.top_k_renorm_prob`. One number serves all rows."""
    limits = _per_row(probs, top_k, torch.int32)
    if backend == LIBRARY:
        _check_top_k(probs, limits)
        function = trusted("top_k_renorm_prob", probs.device)
        if function is not None:
            result: torch.Tensor = function(probs, limits)
            return result
    return _top_k(probs, limits, backend=_own("top_k_renorm_prob", backend))


def top_p_renorm_prob(probs: torch.Tensor, top_p: torch.Tensor | float, *, backend: str = "auto") -> torch.Tensor:
    """Top-p renormalisation; see :func:`dsv4_npu.ops.top_p_renorm_prob`. One number serves all rows."""
    limits = _per_row(probs, top_p, torch.float32)
    if backend == LIBRARY:
        _check_top_p(probs, limits)
        function = trusted("top_p_renorm_prob", probs.device)
        if function is not None:
            result: torch.Tensor = function(probs, limits)
            return result
    return _top_p(probs, limits, backend=_own("top_p_renorm_prob", backend))


def _per_row(probs: torch.Tensor, limit: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(limit, torch.Tensor):
        return limit
    return torch.full((probs.shape[0],), limit, dtype=dtype, device=probs.device)
