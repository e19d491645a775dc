"""How a tree engine runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsv4_npu.errors import ConfigError
from dsv4_npu.spec.simulated import SimulatedTokens, check_simulated

Accept = Literal["greedy", "target-only", "simulated"]


@dataclass(frozen=True)
class TreeOptions:
    """How the loop runs.

    Attributes:
        batch: most requests that run at once.
        chunk: tokens of a prompt that one forward prefills.
        accept: "greedy", "target-only" (which draws with ``temperature``), or "simulated" (layout only).
        temperature: 0 makes the target's distribution one-hot.
        stop: token ids that end a request.
        seed: of the coins; head_seed: of the draft head's weights.
        simulated_length: rows accepted per round, the root included; None draws them uniformly.
        simulated_tokens: "fixed" (``simulated_token`` everywhere) or "drafts" (chains alone).
    """

    batch: int = 8
    chunk: int = 256
    accept: Accept = "greedy"
    temperature: float = 0.0
    stop: tuple[int, ...] = ()
    seed: int = 0
    head_seed: int = 0
    simulated_length: int | None = None
    simulated_tokens: SimulatedTokens = "fixed"
    simulated_token: int = 100

    def check(self, topk: int) -> None:
        """Raise ConfigError for values that do not go together, or with a tree of ``topk`` branches."""
        if self.accept not in ("greedy", "target-only", "simulated"):
            raise ConfigError(f"accept = {self.accept!r}; 'greedy', 'target-only' or 'simulated' is needed")
        if self.temperature < 0 or (self.temperature and self.accept != "target-only"):
            raise ConfigError(f"temperature = {self.temperature}; above 0 it needs accept = 'target-only'")
        if self.accept == "simulated":
            check_simulated(self.simulated_tokens, topk)
            if self.simulated_length is not None and self.simulated_length < 1:
                raise ConfigError(f"simulated_length = {self.simulated_length}; at least 1 is needed")

    @property
    def sampled(self) -> bool:
        """Whether outputs are drawn instead of following the target's first choice."""
        return self.accept == "target-only" and self.temperature > 0
