"""The clear of rejected C128 states for DSpark, whose worker does not call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def clear_after_commit(
    original: Callable[..., Any],
    worker: Any,
    *,
    batch: Any,
    seq_lens_pre_verify: torch.Tensor,
    seq_lens_post_verify: torch.Tensor,
    commit_lens: torch.Tensor,
) -> Any:
    """Around ``DSparkWorkerV2._commit_target_mamba_states_after_verify``, which runs once after every verify.

    ``commit_lens`` counts the root row, ``seq_lens_pre_verify`` are the lengths before the verify.
    """
    done = original(
        worker,
        batch=batch,
        seq_lens_pre_verify=seq_lens_pre_verify,
        seq_lens_post_verify=seq_lens_post_verify,
        commit_lens=commit_lens,
    )
    pool = batch.token_to_kv_pool_allocator.get_kvcache()
    pool.clear_unaccepted_c128_draft_states(
        batch.req_pool_indices, seq_lens_pre_verify, commit_lens, worker.verify_num_draft_tokens
    )
    return done
