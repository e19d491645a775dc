"""The oracle of the drafters: at every round all stage rows anew from the committed history, in one dense forward.

No pools, no slots, no injection, no rows that were written by a draft: what a drafter with perfect memory proposes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dsv4_npu.emulation.model import cache_argument, transformers_module
from dsv4_npu.emulation.numerics import KeepFloat64
from dsv4_npu.emulation.stages.net import StageNet


class Linear:
    """Hidden states of a history by the target's own cache, and proposals behind any of its positions."""

    def __init__(self, model: Any, net: StageNet, kind: str, window: int) -> None:
        self.model, self.net, self.kind, self.window = model, net, kind, window
        self._hidden: dict[tuple[int, ...], torch.Tensor] = {}

    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """``[len(tokens), hidden size]``: what the target's head is given."""
        key = tuple(tokens)
        if key not in self._hidden:
            heard: list[torch.Tensor] = []
            hook = self.model.lm_head.register_forward_pre_hook(lambda module, args: heard.append(args[0][0]))
            cache = transformers_module().DynamicCache(config=self.model.config)
            try:
                with torch.no_grad(), KeepFloat64():
                    self.model(
                        input_ids=torch.tensor([list(key)]), use_cache=True, **{cache_argument(self.model): cache}
                    )
            finally:
                hook.remove()
            self._hidden[key] = heard[0]
        return self._hidden[key]

    def logits(self, tokens: Sequence[int], length: int, count: int) -> torch.Tensor:
        """``[count, V]`` behind the ``length`` committed positions and the root of ``tokens``."""
        # Each stage looks a window back from the rows that the next one reads; what lies before cannot matter.
        first = max(0, length - self.net.stages * self.window)
        hidden = self.hidden(tokens)[first:length]
        near = list(tokens[first : length + 1])
        return (
            self._chain(near, hidden, first, count) if self.kind == "mtp" else self._block(near, hidden, first, count)
        )

    def _chain(self, tokens: list[int], hidden: torch.Tensor, first: int, count: int) -> torch.Tensor:
        embedded, logits = self.net.embed(torch.tensor(tokens[1:])), []
        for _ in range(count):
            output = self._dense(embedded, hidden, first)[-1]
            logits.append(self.net.head(output))
            embedded = torch.cat((embedded, self.net.embed(logits[-1].argmax())[None]))
            hidden = torch.cat((hidden, output[None]))
        return torch.stack(logits)

    def _block(self, tokens: list[int], hidden: torch.Tensor, first: int, count: int) -> torch.Tensor:
        embedded = torch.cat((self.net.embed(torch.tensor(tokens)), self.net.places[1:count]))
        hidden = torch.cat((hidden, hidden[-1:].expand(count, -1)))
        return self.net.head(self._dense(embedded, hidden, first)[-count:])

    def _dense(self, embedded: torch.Tensor, hidden: torch.Tensor, first: int) -> torch.Tensor:
        at = torch.arange(first, first + len(embedded))
        seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - self.window)
        mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, float("-inf"))[None, None]
        return self.net.run(embedded[None], hidden[None], at[None], mask, None, KeepFloat64())[0]
