"""Simulated acceptance: how many drafts a verify would have accepted, drawn from a seed. Never a real rate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsv4_npu.errors import ConfigError
from dsv4_npu.replay.trace import I64, mix

#: What every output of a replay says about the acceptance.
SIMULATED = "SIMULATED"


@dataclass(frozen=True)
class SimulatedAcceptance:
    """Each draft is accepted with probability ``rate``, up to the first rejection.

    The draw for a draft depends on the seed, the request and the position alone, so that neither the batch nor a
    retraction changes what a request accepts.
    """

    seed: int
    rate: float
    width: int

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ConfigError(f"acceptance rate = {self.rate}: a number from 0 to 1 is needed")

    def lengths(self, requests: I64, positions: I64) -> I64:
        """``accept_lens`` of one verify per request whose root is at ``positions``: int64 of 1 to ``width``."""
        if self.width == 1:
            return np.ones(len(requests), np.int64)
        key = mix(mix(np.full(len(requests), self.seed, np.uint64)) ^ requests.astype(np.uint64))
        drafts = positions[:, None] + np.arange(1, self.width)
        coins = (mix(key[:, None] ^ drafts.astype(np.uint64)) >> np.uint64(11)) * 2.0**-53
        accepted: I64 = np.cumprod(coins < self.rate, axis=1).sum(axis=1) + 1
        return accepted

    @property
    def text(self) -> str:
        """The line that goes into every output."""
        if self.width == 1:
            return "no speculation: each step commits one token per request"
        return f"acceptance is {SIMULATED}: each draft with probability {self.rate:g}, seed {self.seed}"
