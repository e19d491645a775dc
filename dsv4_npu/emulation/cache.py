"""Hugging Face cache layers that keep nothing themselves: every row lives in our pools, reached by our addressing.

On the emulated device the model stands in for the NPU's attention kernels, so it works on the held memory of pools and
plan: what it does inside counts neither as launches nor as reads of ours.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dsv4_npu.compressor import CompressorWeights, compress_batch
from dsv4_npu.emulation.device import held, on_device
from dsv4_npu.emulation.forward import BatchPlan
from dsv4_npu.emulation.model import cache_argument, transformers_module
from dsv4_npu.emulation.numerics import KeepFloat64
from dsv4_npu.pools import DSV4Pools, RowSlab, StateSlab


class _Branch:
    """One compressor of one layer (``compressor`` or ``indexer``): its weights, ring slab and entry slab."""

    def __init__(self, module: Any, rope: Any, state: StateSlab, slab: RowSlab, index: int, ratio: int) -> None:
        self.state, self.slab, self.index, self.ratio = state, slab, index, ratio
        self.weights = CompressorWeights(
            ape=module.position_bias.detach(),
            norm=module.kv_norm.weight.detach(),
            eps=float(module.kv_norm.variance_epsilon),
            inv_freq=rope.compress_inv_freq.detach().double(),
        )
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None


def pool_layer_class() -> type:
    """The cache layer over pools; built on first use, because its base is Hugging Face's."""
    mixin = transformers_module().cache_utils.CacheLayerMixin

    class PoolLayer(mixin):  # type: ignore[misc, valid-type]
        """The cache layer of one model layer over the pools, for the batch that ``owner.batch`` describes."""

        is_sliding = True

        def __init__(self, owner: PooledModel, layer: int, branches: dict[str, _Branch]) -> None:
            super().__init__()
            self.owner, self.layer, self.branches = owner, layer, branches

        def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
            """Nothing to do: the pools exist already."""

        def get_seq_length(self) -> int:
            """Unused: positions and masks are passed to the model explicitly."""
            return 0

        def get_max_length(self) -> int:
            """No maximum of its own."""
            return -1

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            """Length and offset of the rows that :meth:`update` returns."""
            return self.owner.pools.config.model.sliding_window - 1 + query_length, 0

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Write the new K=V rows ``[B, 1, q, D]`` and return the window's rows ``[B, 1, window − 1 + q, D]``."""
            batch, slab = self.owner.batch, self.owner.pools.swa
            with self.owner.casts.suspended():
                slab.write(self.layer, batch.swa_new.flatten(), key_states.flatten(0, 2))
                rows = slab.read(self.layer, batch.swa_window.flatten(), key_states.dtype)
            rows = _zero_unread(rows.view(*batch.swa_window.shape, rows.shape[-1]), batch.swa_window >= 0)[:, None]
            return rows, rows

        def store_compression_weights(
            self, name: str, kv: torch.Tensor, gate: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, int]:
            """Keep the projections for :meth:`update_compressor_states`; the model itself compresses nothing."""
            self.branches[name].pending = (kv, gate)
            return kv[:, :0], gate[:, :0], 0

        def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
            """Compress this batch on the rings, store its entries and return all entries ``[B, T, D]``."""
            branch, batch = self.branches[name], self.owner.batch
            assert branch.pending is not None
            kv, gate = branch.pending
            branch.pending = None
            plan, entries = batch.rings[branch.ratio], batch.entries[branch.ratio]
            state = branch.state.data[branch.index]
            with self.owner.casts.suspended():
                made = compress_batch(state, kv, gate, plan, branch.weights, batch.start_positions)
                if plan.windows:
                    branch.slab.write(branch.index, entries.new_slots.flatten(), made.flatten(0, 1).to(kv.dtype))
                rows = branch.slab.read(branch.index, entries.read_slots.flatten(), kv.dtype)
            return _zero_unread(rows.view(*entries.read_slots.shape, rows.shape[-1]), entries.valid)

    return PoolLayer


def _zero_unread(rows: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Zeros where nothing is read: a masked score must be finite before −inf is added to it."""
    return torch.where(valid[..., None], rows, 0.0)


def held_pools(pools: DSV4Pools) -> DSV4Pools:
    """The same pools over the CPU memory behind their slabs."""
    twin = copy.copy(pools)
    for name, slab in vars(pools).items():
        if isinstance(slab, RowSlab | StateSlab):
            alias = copy.copy(slab)
            alias.data = held(slab.data)
            if isinstance(alias, RowSlab):
                alias.scale = held(alias.scale)
            setattr(twin, name, alias)
    return twin


class PooledModel:
    """A Hugging Face DeepSeek-V4 model whose whole key-value memory is ``pools``.

    Attributes:
        hidden: what the head of the last forward was given, ``[B, q, hidden size]`` on the device of its tokens: the
            target hidden states that draft stages are fed with.
    """

    def __init__(self, model: Any, pools: DSV4Pools) -> None:
        self.model, self.pools, self.casts = model, held_pools(pools), KeepFloat64()
        self.hidden: torch.Tensor | None = None
        self._batch: BatchPlan | None = None
        layer_class = pool_layer_class()
        layers = [
            layer_class(self, i, self._branches(i, block.self_attn.compressor))
            for i, block in enumerate(model.model.layers)
        ]
        self._cache = transformers_module().cache_utils.Cache(layers=layers)
        self._cache_argument = cache_argument(model)

    def _branches(self, layer: int, compressor: Any) -> dict[str, _Branch]:
        pools = self.pools
        if layer in pools.c128_index:
            index = pools.c128_index[layer]
            return {"compressor": _Branch(compressor, compressor.rotary_emb, pools.c128_state, pools.c128, index, 128)}
        if layer in pools.c4_index:
            index, inner = pools.c4_index[layer], compressor.indexer
            return {
                "compressor": _Branch(compressor, compressor.rotary_emb, pools.c4_state, pools.c4, index, 4),
                "indexer": _Branch(inner, inner.rotary_emb, pools.index_state, pools.index, index, 4),
            }
        return {}

    @property
    def batch(self) -> BatchPlan:
        """The plan of the forward that is running."""
        assert self._batch is not None
        return self._batch

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, batch: BatchPlan, layers: int | None = None) -> torch.Tensor:
        """Logits ``[B, q, V]`` of ``tokens [B, q]`` on their device; rows past a request's length are meaningless.

        ``layers`` runs the first layers only (then the final norm and head), for early-exit drafts.
        """
        self._batch = held(batch)
        try:
            with self.casts, self._masked_single_rows(), self._first_layers(layers), self._heard_head(tokens.device):
                out = self.model(
                    input_ids=held(tokens),
                    position_ids=self.batch.positions,
                    attention_mask=self.batch.mask,
                    **{self._cache_argument: self._cache},
                )
        finally:
            self._batch = None
        return on_device(out.logits, tokens.device)

    @contextmanager
    def _heard_head(self, device: torch.device) -> Iterator[None]:
        def hear(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            self.hidden = on_device(args[0], device)

        hook = self.model.lm_head.register_forward_pre_hook(hear)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def _first_layers(self, count: int | None) -> Iterator[None]:
        if count is None:
            yield
            return
        inner = self.model.model
        every = inner.layers
        inner.layers = every[:count]
        try:
            yield
        finally:
            inner.layers = every

    @contextmanager
    def _masked_single_rows(self) -> Iterator[None]:
        """At one row per request the model's C128 compressor builds no mask; in a ragged batch each needs its own."""
        hooks = []

        def bias(module: Any, args: Any, kwargs: Any, output: tuple[torch.Tensor, torch.Tensor | None]) -> Any:
            compressed, block = output
            if block is not None or compressed.shape[2] == 0:
                return output
            valid = self.batch.entries[128].valid[:, None, None, :]
            return compressed, torch.where(valid, 0.0, float("-inf")).to(compressed.dtype)

        for layer in self.pools.c128_index:
            module = self.model.model.layers[layer].self_attn.compressor
            hooks.append(module.register_forward_hook(bias, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
