"""The oracle: row by row, from the verify's slots."""

from __future__ import annotations

import torch


def gather_accepted_slots(
    out_cache_loc: torch.Tensor, accept_index: torch.Tensor, accept_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    bs = accept_index.shape[0]
    tgt = out_cache_loc.new_full(accept_index.shape, -1)
    src = out_cache_loc.new_full(accept_index.shape, -1)
    for b, length in enumerate(accept_lens.tolist()):
        for k in range(length):
            tgt[b, k] = out_cache_loc[b * (out_cache_loc.shape[0] // bs) + k]
            src[b, k] = out_cache_loc[int(accept_index[b, k])]
    return tgt, src
