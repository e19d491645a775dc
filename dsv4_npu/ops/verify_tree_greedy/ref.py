"""Greedy tree verification in plain torch: the oracle of the other implementations."""

from __future__ import annotations

import torch


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each request's draft tree along the target's own tokens. Arguments as in the package's docstring."""
    batch, drafts = candidates.shape
    width = accept_index.shape[1]
    targets = target_predict.reshape(-1)
    for b in range(batch):
        rows = retrieve_index[b].tolist()
        first_child = retrieve_next_token[b].tolist()
        next_sibling = retrieve_next_sibling[b].tolist()
        tokens = candidates[b].tolist()

        path = [rows[0]]
        node = first_child[0]
        for _ in range(drafts):
            if len(path) == width or not 0 <= node < drafts:
                break
            wanted = int(targets[path[-1]])
            if tokens[node] == wanted:
                predicts[path[-1]] = wanted
                path.append(rows[node])
                node = first_child[node]
            else:
                node = next_sibling[node]

        predicts[path[-1]] = targets[path[-1]]
        accept_index[b] = torch.tensor(path + [-1] * (width - len(path)), dtype=accept_index.dtype)
        accept_token_num[b] = len(path) - 1
