"""One model, its oracle on Hugging Face's own cache, and ways to run trees against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_npu.emulation.numerics import KeepFloat64
from dsv4_npu.emulation.oracle import Oracle
from dsv4_npu.emulation.trees.drafting import ScriptedTrees, TreeDrafter, TreeDrafts
from dsv4_npu.emulation.trees.engine import TreeEngine
from dsv4_npu.emulation.trees.head import EagleHead
from dsv4_npu.emulation.trees.model import TINY, build_target
from dsv4_npu.emulation.trees.options import TreeOptions
from dsv4_npu.spec.trees import TreeSpec

#: Largest difference between two float64 computations of one logit that is put down to rounding.
LOGIT_TOLERANCE = 1e-10


@dataclass(frozen=True)
class Proposal:
    """A history, and the tree that the head proposed behind it."""

    history: list[int]
    tokens: list[int]
    parents: list[int]


class Watched:
    """Trees of ``inner`` are verified; what the head would have proposed from its states is written down."""

    needs_history = True

    def __init__(self, inner: TreeDrafter, head: EagleHead, spec: TreeSpec) -> None:
        self.name, self.inner, self.head, self.spec = inner.name, inner, head, spec
        self.seen: list[Proposal] = []

    def propose(self, states: torch.Tensor, roots: torch.Tensor, histories: Sequence[Sequence[int]]) -> TreeDrafts:
        tokens, parents = self.head.propose(states, roots, self.spec)
        for b, history in enumerate(histories):
            self.seen.append(Proposal(list(history), tokens[b].tolist(), parents[b].tolist()))
        return self.inner.propose(states, roots, histories)


class Bench:
    """A model and everything that is known about it without our memory."""

    def __init__(self, base: Mapping[str, Any] = TINY, **changes: Any) -> None:
        self.model = build_target({**base, **changes}, seed=0)
        self.oracle = Oracle(self.model)
        self.vocab = self.model.config.vocab_size
        self._prompts: dict[int, list[int]] = {}

    def prompt(self, length: int) -> list[int]:
        """The prompt of a length: random tokens, the same every time."""
        if length not in self._prompts:
            gen = torch.Generator().manual_seed(length)
            self._prompts[length] = torch.randint(self.vocab, (length,), generator=gen).tolist()
        return self._prompts[length]

    def continuation(self, history: Sequence[int], count: int) -> list[int]:
        """The target's next tokens after a history that begins with a known prompt."""
        for length in sorted(self._prompts, reverse=True):
            if list(history[:length]) == self._prompts[length]:
                done = len(history) - length
                return self.oracle.greedy(self._prompts[length], done + count).tokens[done:]
        raise AssertionError("a history that starts with no known prompt")

    def scripted(self, spec: TreeSpec, seed: int = 0) -> ScriptedTrees:
        return ScriptedTrees(self.continuation, spec, self.vocab, seed)

    def engine(
        self, spec: TreeSpec, drafter: TreeDrafter | None = None, poison: bool = True, **rest: Any
    ) -> TreeEngine:
        """An engine; NaN in every row that nobody wrote, if ``poison``."""
        options = TreeOptions(**{"batch": 4, "chunk": 13, **rest.pop("options", {})})
        engine = TreeEngine(self.model, spec, drafter=drafter, options=options, **{"context_len": 160, **rest})
        if poison:
            for slab in engine.pool.tensors():
                slab[:, 1:].fill_(float("nan"))
        return engine

    def run(
        self, spec: TreeSpec, lengths: Sequence[int], drafter: TreeDrafter | None = None, new: int = 16, **rest: Any
    ) -> TreeEngine:
        """Run prompts of ``lengths``; every output and logit must be the oracle's, and nothing may be left over."""
        engine = self.engine(spec, drafter, **rest)
        for length in lengths:
            engine.submit(self.prompt(length), new)
        for run in engine.run():
            want = self.oracle.greedy(run.prompt, len(run.outputs))
            assert run.outputs == want.tokens, f"prompt of {len(run.prompt)} tokens"
            error = float((torch.stack(run.logits) - want.logits).abs().max())
            assert error <= LOGIT_TOLERANCE, f"prompt of {len(run.prompt)} tokens: logits differ by {error}"
            assert len(run.outputs) == new
        assert len(engine.finished) == len(lengths)
        check_empty(engine)
        return engine

    def watched(self, spec: TreeSpec, seed: int = 0, of: TreeSpec | None = None) -> tuple[Watched, EagleHead]:
        """Scripted trees that are verified, and the head that watches; it proposes trees of shape ``of``."""
        head = EagleHead(self.model, 0)
        return Watched(self.scripted(spec, seed), head, of or spec), head

    def check_proposals(self, watched: Watched) -> None:
        """The head's trees are those of the same head led along the history from its beginning, without our memory."""
        assert watched.seen
        for one in watched.seen:
            with torch.no_grad(), KeepFloat64():
                hidden = self.model.model(input_ids=torch.tensor([one.history[:-1]])).last_hidden_state
            state = watched.head.fold_front(
                watched.head.start(1),
                hidden,
                torch.tensor([one.history[1:]]),
                torch.tensor([len(one.history) - 1]),
            )
            tokens, parents = watched.head.propose(state, torch.tensor(one.history[-1:]), watched.spec)
            assert one.tokens == tokens[0].tolist(), f"after {len(one.history)} tokens"
            assert one.parents == parents[0].tolist()


def check_empty(engine: TreeEngine) -> None:
    """The audit is clean and everything came back."""
    engine.alloc.audit()
    assert not any(used for used, _, _ in engine.alloc.usage().values()), engine.alloc.usage()
