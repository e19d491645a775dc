"""The layers of the draft stages: sliding-window layers of the target's own implementation, seeded, in float64."""

from __future__ import annotations

import copy
from typing import Any

import torch

from dsv4_npu.config import ModelSpec
from dsv4_npu.emulation.model import cache_argument, randomise, seeded
from dsv4_npu.emulation.numerics import KeepFloat64
from dsv4_npu.errors import ConfigError

#: Rows of a DSpark block that have a learned place: more than any legal verify has drafts.
PLACES = 16


class StageNet:
    """The stages as functions of embeddings, hidden states and a cache; no memory of their own.

    With ``e`` a token's embedding (or the learned place of a block's row) and ``h`` a hidden state,

        x = mix [ norm(e) ; norm(h) ]               the input of a row
        y = norm(collapse(layer_S(... layer_1(x)))) its output, and the hidden state behind it
        logits = target's head (y)                  shared with the target

    A layer writes the row's key = value, then attends over the ``window`` rows up to its own.
    """

    def __init__(self, target: Any, modules: torch.nn.Module) -> None:
        self.target, self.modules = target, modules
        self.stages = len(modules.layers)  # type: ignore[arg-type]
        self._cache_argument = cache_argument(modules.layers[0].self_attn)  # type: ignore[index, union-attr]

    @property
    def places(self) -> torch.Tensor:
        """What a block's rows behind its root have in the place of a token's embedding: ``[PLACES, hidden size]``."""
        places: torch.Tensor = self.modules.places  # type: ignore[assignment]
        return places

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's embeddings ``[..., hidden size]``."""
        embedded: torch.Tensor = self.target.model.embed_tokens(tokens)
        return embedded

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits ``[..., V]``."""
        logits: torch.Tensor = self.target.lm_head(hidden)
        return logits

    @torch.no_grad()
    def run(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: Any,
        casts: KeepFloat64,
    ) -> torch.Tensor:
        """Outputs ``[B, q, hidden size]`` of the rows at ``positions [B, q]``.

        ``embedded``, ``hidden``: ``[B, q, hidden size]``. ``mask``: additive, over the rows that the cache returns.
        ``cache``: a cache with one layer per stage; None attends over the given rows alone.
        """
        parts: Any = self.modules
        with casts:
            x = parts.mix(torch.cat((parts.token_norm(embedded), parts.hidden_norm(hidden)), dim=-1))
            turn = {"main": self.target.model.rotary_emb(x, position_ids=positions, layer_type="main")}
            streams = x.unsqueeze(2).expand(-1, -1, self.target.config.hc_mult, -1).contiguous()
            for layer in parts.layers:
                streams = layer(
                    streams,
                    position_embeddings=turn,
                    position_ids=positions,
                    attention_mask=mask,
                    **{self._cache_argument: cache},
                )
            output: torch.Tensor = parts.norm(parts.hc_head(streams))
        return output


def build_stages(target: Any, spec: ModelSpec, seed: int = 0) -> StageNet:
    """The draft stages of ``spec`` for a target model, randomly initialised, the same for the same seed.

    Raises:
        ConfigError: the model has no draft stages.
    """
    count = spec.num_draft_stages
    if not count:
        raise ConfigError(
            f"model {spec.name}: compress_ratios ends with the target's {spec.num_layers} layers; an entry of ratio 0 "
            "behind them is needed for each draft stage"
        )
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = count
    config.layer_types, config.mlp_layer_types = ["sliding_attention"] * count, ["moe"] * count
    inner = target.model
    layer, head, norm = type(inner.layers[0]), type(inner.hc_head), type(inner.norm)
    size, eps = config.hidden_size, config.rms_norm_eps

    def make() -> torch.nn.Module:
        parts = torch.nn.Module()
        parts.config = config
        parts.token_norm, parts.hidden_norm, parts.norm = norm(size, eps), norm(size, eps), norm(size, eps)
        parts.mix = torch.nn.Linear(2 * size, size, bias=False)
        parts.layers = torch.nn.ModuleList([layer(config, index) for index in range(count)])
        parts.hc_head = head(config)
        parts.places = torch.nn.Parameter(torch.empty(PLACES, size))
        return parts

    def fill(parts: Any) -> None:
        randomise(parts, torch.Generator().manual_seed(seed + 1))
        # A place stands where an embedding does, so it is as large.
        parts.places.data *= size**0.5

    return StageNet(target, seeded(seed, make, fill))
