"""Drafts for SGLang's EAGLE worker: the draft model's forward is the target's first layers over the target's slots.

SGLang's worker decides when to draft, what to feed and what becomes of it; only the computation is replaced. EAGLE
feeds a token one position early, beside the hidden state of the token before it. An early exit has no use for that
state, so a token is computed at its own position, and the verify that follows writes the same rows again.
"""

from __future__ import annotations

from typing import Any

import torch

from dsv4_npu.emulation.device import held
from dsv4_npu.emulation.forward import plan_batch
from dsv4_npu.sglang.engine_forward import EngineForward


def draft(forward: EngineForward, batch: Any) -> torch.Tensor:
    """Logits of one forward of SGLang's draft model ``[rows that SGLang expects, V]``."""
    mode = batch.forward_mode
    rows = batch.req_pool_indices.to(torch.int64)
    if mode.is_idle():
        return torch.zeros((0, forward.spec.vocab_size), dtype=torch.float64)
    if mode.is_decode():
        return exit_early(forward, rows, batch.positions.to(torch.int64) + 1, batch.input_ids)
    starts = torch.tensor(batch.extend_prefix_lens_cpu)
    lengths = torch.tensor(batch.extend_seq_lens_cpu)
    first = lengths.cumsum(0) - lengths
    accepted = held(getattr(batch.spec_info, "num_accept_tokens", None))
    if accepted is None:
        # After a prefill no slot is reserved yet for the token that was sampled: guess that it comes again.
        guess = batch.input_ids[first + lengths - 1].to(torch.int64)
        return torch.nn.functional.one_hot(guess, forward.spec.vocab_size).to(torch.float64)
    last = first + accepted.to(torch.int64) - 1
    logits = exit_early(forward, rows, starts + accepted.to(torch.int64), batch.input_ids[last])
    # The worker picks the row of the last accepted token itself.
    every = torch.zeros((int(lengths.sum()), logits.shape[1]), dtype=logits.dtype)
    every[last] = logits
    return every


def exit_early(
    forward: EngineForward, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Logits ``[bs, V]`` after all layers but the last, of one token per request at its position.

    The positions lie in what SGLang reserved for the verify that follows; past it a row holds slots of earlier owners.
    """
    forward.book.forwards["drafted rows"] += len(rows)
    tables = forward.tables.tables()
    plan = plan_batch(forward.pools, tables, rows.tolist(), positions.tolist(), [1] * len(rows))
    return forward.pooled.forward(tokens.to(torch.int64)[:, None], plan, forward.spec.num_layers - 1)[:, 0]
