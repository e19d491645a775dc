"""The oracle: the same model on Hugging Face's own cache, one token at a time, no speculation, none of our memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dsv4_npu.emulation.model import cache_argument, transformers_module
from dsv4_npu.emulation.numerics import KeepFloat64


@dataclass(frozen=True)
class OracleRun:
    """``tokens`` chosen greedily and the ``logits [n, V]`` that each was chosen from."""

    tokens: list[int]
    logits: torch.Tensor

    def margins(self) -> torch.Tensor:
        """Difference of the two largest logits per position ``[n]``: below an error bound a choice proves nothing."""
        top = self.logits.topk(2, dim=-1).values
        return top[:, 0] - top[:, 1]


class Oracle:
    """Runs a model on its own ``DynamicCache``; results are kept per prompt, so asking again costs nothing."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._argument = cache_argument(model)
        self._runs: dict[tuple[int, ...], tuple[Any, list[int], list[torch.Tensor]]] = {}

    def _forward(self, tokens: list[int], cache: Any) -> torch.Tensor:
        with torch.no_grad(), KeepFloat64():
            out = self.model(input_ids=torch.tensor([tokens]), use_cache=True, **{self._argument: cache})
        logits: torch.Tensor = out.logits[0]
        return logits

    def greedy(self, prompt: list[int], count: int) -> OracleRun:
        """The first ``count`` greedy tokens after ``prompt``."""
        key = tuple(prompt)
        if key not in self._runs:
            cache = transformers_module().DynamicCache(config=self.model.config)
            self._runs[key] = (cache, [], [self._forward(prompt, cache)[-1]])
        cache, tokens, logits = self._runs[key]
        while len(tokens) < count:
            tokens.append(int(logits[-1].argmax()))
            logits.append(self._forward(tokens[-1:], cache)[-1])
        return OracleRun(tokens[:count], torch.stack(logits[:count]))

    def forced(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """Logits ``[len(tokens), V]`` from which each of ``tokens`` would be chosen, given the ones before it."""
        cache = transformers_module().DynamicCache(config=self.model.config)
        return self._forward(prompt + tokens[:-1], cache)[len(prompt) - 1 :]
