"""Key-value memory of a model with plain attention: one slot per token, in FULL pages."""

from __future__ import annotations

import torch

from dsv4_npu import ops
from dsv4_npu.errors import ConfigError, InputError


class FullKVPool:
    """Page-shaped slabs ``[layers, pages + 1, page, heads, dim]``: keys, and values unless the rows are latent.

    ============  =========================  ==========================  ==========================================
    attention     heads of a slab            slabs                       ``value_dim``
    ============  =========================  ==========================  ==========================================
    multi-head    the model's heads          keys, values                the head's dimension
    grouped       the model's KV heads       keys, values                the head's dimension
    latent        1                          one, of latent rows         0: keys and values are made from the row
    ============  =========================  ==========================  ==========================================

    Slots index ``(pages + 1) · page``; page 0 is the dummy: reads of slots that mean nothing go there, and its rows
    stay zero because nothing is written to slots < ``page``.

    Args:
        layers, pages, page: layers of the model, usable pages, tokens per page; all at least 1.
        heads, key_dim, value_dim: see above.
        dtype, device: of the slabs.

    Raises:
        ConfigError: a number below 1 (``value_dim``: below 0), or latent rows of several heads.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page: int,
        *,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        sizes = {"layers": layers, "pages": pages, "page": page, "heads": heads, "key_dim": key_dim}
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"{name} = {value}; at least 1 is needed")
        if value_dim < 0:
            raise ConfigError(f"value_dim = {value_dim}; 0 (latent rows) or more is needed")
        if value_dim == 0 and heads != 1:
            raise ConfigError(f"heads = {heads} with latent rows; 1 is needed: all heads share the row")
        self.layers, self.pages, self.page, self.heads = layers, pages, page, heads
        shape = (layers, pages + 1, page, heads)
        self.keys = torch.zeros((*shape, key_dim), dtype=dtype, device=device)
        self.values = torch.zeros((*shape, value_dim), dtype=dtype, device=device) if value_dim else None

    @classmethod
    def latent(
        cls,
        layers: int,
        pages: int,
        page: int,
        dim: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> FullKVPool:
        """One slab of latent rows of ``dim`` numbers (compressed KV and rotary key together)."""
        return cls(layers, pages, page, heads=1, key_dim=dim, value_dim=0, dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        """Where the slabs are."""
        return self.keys.device

    def tensors(self) -> list[torch.Tensor]:
        """The slabs."""
        return [self.keys] if self.values is None else [self.keys, self.values]

    def usage_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self.tensors())

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None = None) -> None:
        """Store the rows of ``n`` tokens at ``slots`` of ``layer``; rows with a slot < ``page`` are padding.

        Args:
            slots: int64 ``[n]``, no slot from ``page`` on twice.
            keys: ``[n, heads, key_dim]``.
            values: ``[n, heads, value_dim]``; None for latent rows.

        Raises:
            InputError: shapes that do not fit, or values for latent rows.
        """
        if (values is None) != (self.values is None):
            raise InputError("values: given for latent rows" if self.values is None else "values: they are missing")
        parts = (
            [(self.keys, keys)] if values is None or self.values is None else [(self.keys, keys), (self.values, values)]
        )
        for slab, rows in parts:
            if slots.ndim != 1 or rows.shape != (slots.numel(), *slab.shape[3:]):
                raise InputError(
                    f"slots of shape {tuple(slots.shape)} and rows of shape {tuple(rows.shape)}; "
                    f"[n] and [n, {slab.shape[3]}, {slab.shape[4]}] are needed"
                )
        real = slots >= self.page
        for slab, rows in parts:
            # Padding goes to the dummy's first row as zeros, so that no mask has to be read by the host.
            flat = slab[layer].view(-1, *slab.shape[3:])
            flat[torch.where(real, slots, 0)] = torch.where(real[:, None, None], rows.to(slab.dtype), 0)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows ``[..., heads, dim]`` at ``slots [...]`` of ``layer``: keys, and values unless the rows are latent."""
        keys = self.keys[layer].view(-1, *self.keys.shape[3:])[slots]
        if self.values is None:
            return keys, None
        return keys, self.values[layer].view(-1, *self.values.shape[3:])[slots]

    def move_kv(self, tgt: torch.Tensor, src: torch.Tensor) -> None:
        """``KV[tgt] <- KV[src]`` in every layer, all sources read before any target is written; one launch per slab.

        ``tgt``, ``src``: as :func:`dsv4_npu.ops.move_kv_` takes them; pairs (-1, -1) are skipped.
        """
        for slab in self.tensors():
            ops.move_kv_(slab, tgt, src)
