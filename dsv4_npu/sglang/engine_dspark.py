"""DSpark in the engine: SGLang's worker with its drafter replaced by the target's first layers.

SGLang's DSpark drafts a block with layers of its own over hidden states that the target leaves in a cache of the
drafter. The emulation has no weights for them. Here a block is drafted token by token with the target's first layers,
and nothing is put into the drafter's cache; reserving, verifying, accepting, committing and clearing are SGLang's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsv4_npu.sglang.engine_drafts import exit_early
from dsv4_npu.sglang.engine_forward import EngineForward

#: What a checkpoint with a DSpark drafter says of it; it shapes an object that never computes.
CHECKPOINT: dict[str, Any] = {
    "dspark_markov_rank": 8,
    "dspark_markov_head_type": "vanilla",
    "dspark_noise_token_id": 0,
    "dspark_target_layer_ids": [1, 2, 3],
}


def draft_block(forward: EngineForward, batch: Any, roots: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` drafts per request after its root: int64 ``[bs, count]``."""
    rows = batch.req_pool_indices.to(torch.int64)
    at, tokens = batch.seq_lens.to(torch.int64), roots.to(torch.int64)
    drafts = []
    for step in range(count):
        tokens = exit_early(forward, rows, at + step, tokens).argmax(-1)
        drafts.append(tokens)
    return torch.stack(drafts, dim=1)


def install(forward_of: Callable[[Any], EngineForward]) -> None:
    """Replace the drafter of SGLang's DSpark worker in this process. ``forward_of(runner)`` is the target's forward."""
    from sglang.srt.speculative.dspark_components.dspark_draft import (
        DraftBlockProposer,
        DraftBlockResult,
        DraftProposal,
    )
    from sglang.srt.speculative.dspark_components.dspark_kv_inject import TargetHiddenKvInjector
    from sglang.srt.speculative.dspark_components.dspark_verify import TargetVerifyExecutor

    def propose(proposer: Any, *, batch: Any, draft_input: Any, bs: int, **_: Any) -> Any:
        roots = draft_input.bonus_tokens.view(-1)[:bs]
        drafts = draft_block(forward_of(proposer.draft_model_runner), batch, roots, proposer.gamma)
        return DraftProposal(
            draft_block_ids=torch.cat((roots.to(torch.int64)[:, None], drafts), dim=1),
            draft_block=DraftBlockResult(
                draft_tokens=drafts,
                corrected_logits=None,
                greedy_mask=torch.ones(bs, dtype=torch.bool),
                temperatures=torch.zeros(bs),
                greedy_draft=True,
            ),
        )

    DraftBlockProposer.propose = propose
    TargetHiddenKvInjector.place_prefill = lambda injector, batch: _NoPlacement()
    TargetHiddenKvInjector.inject_prefill = _nothing
    TargetVerifyExecutor.commit_hidden = _nothing
    # SGLang tells the allocator of CUDA streams who uses a tensor; on a CPU there is nobody to tell.
    vars_of_tensor: Any = torch.Tensor
    vars_of_tensor.record_stream = _nothing


def allow_on_cpu() -> None:
    """Let SGLang's main process accept DSpark on the emulated platform: it asks for a device of CUDA, NPU or XPU."""
    from sglang.srt.arg_groups import speculative_hook

    theirs, view = speculative_hook._handle_dspark, speculative_hook.resolving_view

    def handle(server_args: Any) -> None:
        speculative_hook.resolving_view = lambda args: _OnNpu(view(args))
        try:
            theirs(server_args)
        finally:
            speculative_hook.resolving_view = view

    speculative_hook._handle_dspark = handle


class _OnNpu:
    """SGLang's arguments with another device."""

    device = "npu"

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arguments, name)


class _NoPlacement:
    """Where the drafter's rows of a prefill would go: SGLang asks only for the device."""

    positions = torch.empty(0, dtype=torch.int64)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Nothing to do."""
