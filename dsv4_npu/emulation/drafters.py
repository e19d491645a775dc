"""Where drafts come from: prompt lookup, the model's own first layers, or a script that forces a pattern."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dsv4_npu.errors import ConfigError


@dataclass(frozen=True)
class Drafts:
    """``tokens`` int64 ``[bs, k]`` and the distributions they were drawn from, ``probs [bs, k, V]`` (None: certain)."""

    tokens: torch.Tensor
    probs: torch.Tensor | None = None


#: Runs one row per request through the first layers: ``(tokens [bs], offset) -> logits [bs, V]``.
DraftStep = Callable[[torch.Tensor, int], torch.Tensor]


class Drafter(Protocol):
    """Proposes k tokens per request.

    ``needs_history``: it looks at prompt + outputs on the host, so every round must be learned before the next one is
    drafted. A drafter without that need works from the roots on the device alone.
    """

    name: str
    needs_history: bool

    def propose(self, roots: torch.Tensor, histories: Sequence[Sequence[int]], count: int, step: DraftStep) -> Drafts:
        """Drafts for a batch.

        ``roots``: int64 ``[bs]`` on the device, the last token of each history. ``histories``: prompt + outputs, empty
        for a drafter that does not need them. ``step`` gives access to the model's first layers over the pools.
        """


class NgramDrafter:
    """Prompt lookup: what followed the last occurrence of the current suffix of up to ``longest`` tokens."""

    name = "ngram"
    needs_history = True

    def __init__(self, longest: int = 4, lookback: int = 2048) -> None:
        self.longest, self.lookback = longest, lookback

    def propose(self, roots: torch.Tensor, histories: Sequence[Sequence[int]], count: int, step: DraftStep) -> Drafts:
        """See :class:`Drafter`; a history without a repeated suffix repeats its last token."""
        del roots, step
        return Drafts(torch.tensor([self._one(h, count) for h in histories], dtype=torch.int64).view(-1, count))

    def _one(self, history: Sequence[int], count: int) -> list[int]:
        recent = list(history[-self.lookback :])
        for length in range(min(self.longest, len(recent) - 1), 0, -1):
            suffix = recent[-length:]
            for begin in range(len(recent) - length - 1, -1, -1):
                if recent[begin : begin + length] == suffix:
                    found = recent[begin + length : begin + length + count]
                    return found + [recent[-1]] * (count - len(found))
        return [recent[-1]] * count


class EarlyExitDrafter:
    """Self-speculation: the model's first layers, then its final norm and head, one draft at a time.

    The draft steps write rows of the first layers at the candidate positions; the verify writes the same rows again,
    and rejected ones are overwritten like any other candidate.
    """

    name = "early-exit"
    needs_history = False

    def propose(self, roots: torch.Tensor, histories: Sequence[Sequence[int]], count: int, step: DraftStep) -> Drafts:
        """See :class:`Drafter`."""
        del histories
        tokens = [roots]
        for offset in range(count):
            tokens.append(step(tokens[-1], offset).argmax(-1))
        return Drafts(torch.stack(tokens, dim=1)[:, 1:])


class ScriptedDrafter:
    """Proposes the target's own continuation up to a scripted length, then wrong tokens.

    Args:
        continuation: ``history -> the target's next tokens`` (at least as many as drafts).
        accept: ``(request index in the batch, history length) -> drafts to get right``.
        vocab: vocabulary size; a wrong token is the right one plus one, modulo this.
    """

    name = "scripted"
    needs_history = True

    def __init__(
        self, continuation: Callable[[Sequence[int], int], list[int]], accept: Callable[[int, int], int], vocab: int
    ) -> None:
        self.continuation, self.accept, self.vocab = continuation, accept, vocab

    def propose(self, roots: torch.Tensor, histories: Sequence[Sequence[int]], count: int, step: DraftStep) -> Drafts:
        """See :class:`Drafter`."""
        del roots, step
        rows = []
        for b, history in enumerate(histories):
            right = self.continuation(history, count)
            keep = min(self.accept(b, len(history)), count)
            rows.append(right[:keep] + [(t + 1) % self.vocab for t in right[keep:]])
        return Drafts(torch.tensor(rows, dtype=torch.int64).view(-1, count))


def make_drafter(name: str) -> Drafter:
    """A drafter by name; ``scripted`` needs an oracle and is built by its user."""
    if name == "ngram":
        return NgramDrafter()
    if name == "early-exit":
        return EarlyExitDrafter()
    raise ConfigError(f"drafter = {name!r}; one of ['ngram', 'early-exit'] is needed")
