"""An EAGLE-like draft head: it follows the history by the target's hidden states and proposes trees of tokens."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_npu.emulation.numerics import KeepFloat64
from dsv4_npu.spec.trees import TreeSpec

#: How strongly the state, and through it every hidden state of the history, moves the proposals.
STATE_GAIN = 0.3


class EagleHead:
    """A small seeded recurrent network over (hidden state, next token), with the target's embedding and output layer.

    A state is folded from the pairs (hidden state of a token, the token behind it) of the whole history, so a hidden
    state or a token in a wrong place changes every later proposal::

        state' = tanh(state · A + hidden · B + embedding[token] · C)
        feature = the target's MLPs, without attention, over embedding[token] + gain · state · G
        logits = the target's output layer over the feature

    Below a draft the head feeds back its own feature as the hidden state, as EAGLE does.
    """

    def __init__(self, model: Any, seed: int) -> None:
        self.model = model
        self.size = model.config.hidden_size
        gen = torch.Generator().manual_seed(seed)
        shape = (4, self.size, self.size)
        weights = torch.randn(shape, generator=gen, dtype=torch.float64) * self.size**-0.5
        self._keep, self._hidden, self._token, self._out = weights

    def start(self, batch: int) -> torch.Tensor:
        """States ``[batch, H]`` before any token."""
        return torch.zeros((batch, self.size), dtype=torch.float64)

    def fold(self, state: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """States ``[..., H]`` one pair further: ``hidden [..., H]`` and the ``tokens [...]`` behind it."""
        embedded = self.model.model.embed_tokens(tokens)
        return torch.tanh(state @ self._keep + hidden @ self._hidden + embedded @ self._token)

    def fold_front(
        self, state: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Fold the first ``lengths [bs]`` pairs of ``hidden [bs, n, H]`` and ``tokens [bs, n]``."""
        for k in range(tokens.shape[1]):
            folded = self.fold(state, hidden[:, k], tokens[:, k])
            state = torch.where((k < lengths)[:, None], folded, state)
        return state

    def feature(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The head's stand-in ``[..., H]`` for the target's hidden state of ``tokens [...]``, its last pair's token."""
        x = self.model.model.embed_tokens(tokens) + STATE_GAIN * (state @ self._out)
        for layer in self.model.model.layers:
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        feature: torch.Tensor = self.model.model.norm(x)
        return feature

    @torch.no_grad()
    def propose(self, state: torch.Tensor, roots: torch.Tensor, spec: TreeSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """The best ``D − 1`` of the nodes that a beam of ``topk`` visits in ``steps`` levels, and the root.

        Args:
            state: ``[bs, H]``, folded up to the pair whose token is the root.
            roots: int64 ``[bs]``.

        Returns:
            tokens and parents, int64 ``[bs, D]`` each, as :func:`~dsv4_npu.spec.trees.tree_layout` takes them.
        """
        batch, topk = len(roots), spec.topk
        tokens, parents = [roots[:, None]], [torch.full_like(roots, -1)[:, None]]
        scores: list[torch.Tensor] = []
        count = 1
        with KeepFloat64():
            beam_state, beam_token = state[:, None], roots[:, None]
            beam_node = torch.zeros_like(beam_token)
            beam_score = torch.zeros((batch, 1), dtype=torch.float64)
            for _ in range(spec.steps):
                feature = self.feature(beam_state, beam_token)
                found = self.model.lm_head(feature).log_softmax(-1).topk(topk, dim=-1)
                score = (beam_score[..., None] + found.values).flatten(1)
                child = found.indices.flatten(1)
                tokens.append(child)
                parents.append(beam_node.repeat_interleave(topk, dim=1))
                scores.append(score)
                best = score.topk(topk, dim=1)
                beam = best.indices // topk
                beam_token, beam_score = child.gather(1, best.indices), best.values
                pick = beam[..., None].expand(-1, -1, self.size)
                beam_state = self.fold(beam_state.gather(1, pick), feature.gather(1, pick), beam_token)
                beam_node = count + best.indices
                count += child.shape[1]
        if not scores:
            return tokens[0], parents[0]
        return select_best(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), spec.width)


def select_best(
    tokens: torch.Tensor, parents: torch.Tensor, scores: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The root and the ``width − 1`` drafts of the highest score, in the order of their nodes, parents renumbered.

    A child's score is at most its parent's, and of equal scores the earlier node wins: parents are always among them.

    Args:
        tokens, parents: int64 ``[bs, n]``, node 0 the root.
        scores: float64 ``[bs, n − 1]``, of the drafts.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, : width - 1]
    chosen = torch.cat((torch.zeros_like(tokens[:, :1]), order.sort(dim=-1).values + 1), dim=1)
    place = torch.full_like(tokens, -1).scatter_(1, chosen, torch.arange(width).expand_as(chosen).contiguous())
    parent = parents.gather(1, chosen)
    return tokens.gather(1, chosen), torch.where(parent >= 0, place.gather(1, parent.clamp_min(0)), -1)
