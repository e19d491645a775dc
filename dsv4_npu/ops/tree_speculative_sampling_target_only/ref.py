"""Target-only sampling over a tree of drafts in plain torch: the oracle of the other implementations."""

from __future__ import annotations

import torch

from dsv4_npu.ops._draw_ref import draw_residual, positive_part

MIN_THRESHOLD_ACC = 1e-9


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
) -> None:
    """Walk each request's draft tree by the target's probabilities alone. Arguments as in the package's docstring."""
    batch, drafts = candidates.shape
    width = accept_index.shape[1]
    vocab = target_probs.shape[2]
    single = torch.tensor(threshold_single, dtype=torch.float32)
    scale = torch.tensor(max(threshold_acc, MIN_THRESHOLD_ACC), dtype=torch.float32)
    for b in range(batch):
        rows = retrieve_index[b].tolist()
        first_child = retrieve_next_token[b].tolist()
        next_sibling = retrieve_next_sibling[b].tolist()
        tokens = candidates[b].tolist()

        path = [rows[0]]
        parent, node = 0, first_child[0]
        rejected: set[int] = set()
        reached = torch.zeros((), dtype=torch.float32)
        for _ in range(drafts):
            if len(path) == width or not 0 <= node < drafts:
                break
            token = tokens[node]
            accepted = False
            if 0 <= token < vocab and token not in rejected:
                p = target_probs[b, parent, token].cpu()
                if p > 0:
                    reached = reached + p
                    # coin < reached / threshold, without a division whose rounding differs between devices
                    accepted = bool(uniform_samples[b, parent].cpu() * scale < reached) or bool(p >= single)
            if accepted:
                predicts[path[-1]] = token
                path.append(rows[node])
                parent, node = node, first_child[node]
                rejected = set()
                reached = torch.zeros((), dtype=torch.float32)
            else:
                if 0 <= token < vocab:
                    rejected.add(token)
                node = next_sibling[node]

        target = positive_part(target_probs[b, parent])
        residual = target.clone()
        residual[sorted(rejected)] = 0
        predicts[path[-1]] = draw_residual(residual, target, float(uniform_samples_for_final_sampling[b]))
        accept_index[b] = torch.tensor(path + [-1] * (width - len(path)), dtype=accept_index.dtype)
        accept_token_num[b] = len(path) - 1
