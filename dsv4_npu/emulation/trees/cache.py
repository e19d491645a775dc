"""The target's cache layers over the full-KV pool, for batches of trees and of prompt chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dsv4_npu import addressing
from dsv4_npu.emulation.model import cache_argument, transformers_module
from dsv4_npu.emulation.numerics import KeepFloat64
from dsv4_npu.pools.full_kv import FullKVPool


@dataclass(frozen=True)
class KVPlan:
    """Addresses of one forward over ``B`` requests with ``q`` rows each; ``h`` is the longest history.

    Attributes:
        positions: int64 ``[B, q]``, rotary positions.
        slots: int64 ``[B, q]``; where the rows' keys and values go, 0 for padding.
        history: int64 ``[B, h]``; slots of the positions before each request's start, 0 behind its end.
        mask: float64 ``[B, 1, q, h + q]``, additive: over the history, then over the rows of this forward.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    history: torch.Tensor
    mask: torch.Tensor


def plan_rows(
    block_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    page: int,
    depth: torch.Tensor,
    visible: torch.Tensor,
    used: torch.Tensor,
) -> KVPlan:
    """The plan of rows that begin at ``starts``: the slot follows the row, the rotary position the depth.

    Args:
        block_table: int32 ``[request rows, columns]``.
        rows, starts: int64 ``[B]``.
        longest: h, at least the largest start.
        depth: int64 ``[B, q]``; rotary position − start.
        visible: bool ``[B, q, q]``; rows of this forward that each row attends to, itself among them.
        used: bool ``[B, q]``; rows that are no padding.
    """
    device = starts.device
    width = depth.shape[1]
    at = starts[:, None] + torch.arange(width, device=device)
    slots = addressing.full_slots(block_table, rows[:, None], torch.where(used, at, 0), page)
    past = torch.arange(longest, device=device)
    known = past < starts[:, None]
    history = addressing.full_slots(block_table, rows[:, None], torch.where(known, past, 0), page)
    seen = torch.cat((known[:, None, :].expand(-1, width, -1), visible), dim=-1)
    mask = torch.zeros(seen.shape, dtype=torch.float64, device=device).masked_fill(~seen, float("-inf"))
    return KVPlan(starts[:, None] + depth, torch.where(used, slots, 0), torch.where(known, history, 0), mask[:, None])


def _layer_class() -> type:
    mixin = transformers_module().cache_utils.CacheLayerMixin

    class PoolLayer(mixin):  # type: ignore[misc, valid-type]
        """The cache layer of one model layer over the pool, for the batch that ``owner.plan`` describes."""

        is_sliding = False

        def __init__(self, owner: PooledTarget, layer: int) -> None:
            super().__init__()
            self.owner, self.layer = owner, layer

        def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
            """Nothing to do: the pool exists already."""

        def get_seq_length(self) -> int:
            """Unused: positions and masks are passed to the model explicitly."""
            return 0

        def get_max_length(self) -> int:
            """No maximum of its own."""
            return -1

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            """Length and offset of the rows that :meth:`update` returns."""
            return self.owner.plan.history.shape[1] + query_length, 0

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Write the new rows ``[B, heads, q, dim]``; return those of the history and of this forward.

            A model with latent attention passes its compressed rows as keys and the rotary keys as values.
            """
            plan, pool = self.owner.plan, self.owner.pool
            new = [key_states, value_states]
            if pool.values is None:
                new = [torch.cat(new, dim=-1)]
            pool.write(self.layer, plan.slots.flatten(), *(rows.transpose(1, 2).flatten(0, 1) for rows in new))
            keys, values = pool.read(self.layer, torch.cat((plan.history, plan.slots), dim=1))
            if values is None:
                latent = key_states.shape[-1]
                keys, values = keys[..., :latent], keys[..., latent:]
            return keys.transpose(1, 2), values.transpose(1, 2)

    return PoolLayer


class PooledTarget:
    """A Hugging Face model with plain attention whose whole key-value memory is ``pool``."""

    def __init__(self, model: Any, pool: FullKVPool) -> None:
        self.model, self.pool = model, pool
        self._plan: KVPlan | None = None
        layer = _layer_class()
        layers = [layer(self, i) for i in range(model.config.num_hidden_layers)]
        self._cache = transformers_module().cache_utils.Cache(layers=layers)
        self._cache_argument = cache_argument(model.model)

    @property
    def plan(self) -> KVPlan:
        """The plan of the forward that is running."""
        assert self._plan is not None
        return self._plan

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, plan: KVPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``[B, q, V]`` and hidden states behind the final norm ``[B, q, H]`` of ``tokens [B, q]``."""
        self._plan = plan
        try:
            with KeepFloat64():
                out = self.model.model(
                    input_ids=tokens,
                    position_ids=plan.positions,
                    attention_mask=plan.mask,
                    **{self._cache_argument: self._cache},
                )
                hidden = out.last_hidden_state
                logits = self.model.lm_head(hidden)
        finally:
            self._plan = None
        return logits, hidden
