"""Rejection sampling along a chain of drafts in plain torch: the oracle of the other implementations."""

from __future__ import annotations

import torch

from dsv4_npu.ops._draw_ref import draw, draw_residual, positive_part


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
) -> None:
    """Judge each request's drafts in order and draw one more token. Arguments as in the package's docstring."""
    batch, drafts = candidates.shape
    width = accept_index.shape[1]
    vocab = target_probs.shape[2]
    for b in range(batch):
        rows = retrieve_index[b].tolist()
        path = [rows[0]]
        rejected = False
        for step in range(1, min(drafts, width)):
            draft = int(candidates[b, step])
            if not 0 <= draft < vocab:
                break
            p = target_probs[b, step - 1, draft]
            q = draft_probs[b, step - 1, draft]
            if not (q > 0 and uniform_samples[b, step - 1] * q < p):
                rejected = True
                break
            predicts[path[-1]] = draft
            path.append(rows[step])

        judge = len(path) - 1
        coin = float(uniform_samples_for_final_sampling[b])
        target = positive_part(target_probs[b, judge])
        if rejected:
            residual = (target - positive_part(draft_probs[b, judge])).clamp_min(0)
            predicts[path[-1]] = draw_residual(residual, target, coin)
        else:
            predicts[path[-1]] = draw(target, coin)
        accept_index[b] = torch.tensor(path + [-1] * (width - len(path)), dtype=accept_index.dtype)
        accept_token_num[b] = len(path) - 1
