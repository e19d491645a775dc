"""One tensor-parallel rank's replica of the model: noise and random numbers of its own, decisions of rank 0."""

from __future__ import annotations

import torch

from dsv4_npu.spec import VerifyResult
from dsv4_npu.spec.ranks import RankSync


class Replica:
    """What makes the ranks of an emulation differ, and what keeps their histories the same.

    Ranks of a sharded model compute the same logits up to rounding; here every rank has the whole model, and noise of
    its own stands for the rounding: each logit moves by less than ``NOISE`` of the row's top-2 margin, so the first
    choice of a row is the same on all ranks.
    """

    #: Share of the top-2 margin; two logits can move towards each other by twice as much.
    NOISE = 0.2

    def __init__(self, sync: RankSync, seed: int) -> None:
        self.sync = sync
        self._gen = torch.Generator().manual_seed(seed)
        self.largest_noise = 0.0

    def disturb(self, logits: torch.Tensor) -> torch.Tensor:
        """``logits [..., V]`` as this rank computed them."""
        top = logits.topk(2, dim=-1).values
        noise = torch.rand(logits.shape, generator=self._gen, dtype=logits.dtype).to(logits.device) * 2 - 1
        noise = noise * self.NOISE * (top[..., :1] - top[..., 1:])
        self.largest_noise = max(self.largest_noise, float(noise.abs().max()) if noise.numel() else 0.0)
        return logits + noise

    def agree(
        self, result: VerifyResult, seq_lens: torch.Tensor, candidates: torch.Tensor | None = None
    ) -> VerifyResult:
        """Rank 0's result instead of this rank's own; see :meth:`~dsv4_npu.spec.ranks.RankSync.agree`."""
        return self.sync.agree(result, seq_lens, candidates)

    def agree_first(self, tokens: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """Rank 0's tokens int64 ``[bs]`` behind prompts of ``seq_lens``: a verify of roots alone."""
        rows = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device)
        mine = VerifyResult(tokens.to(torch.int32), rows[:, None], torch.ones_like(rows))
        return self.agree(mine, seq_lens).predict.to(torch.int64)
