"""All key-value memory of a DeepSeek-V4 model on one device."""

from __future__ import annotations

import torch

from dsv4_npu import addressing
from dsv4_npu.budget import PoolSizes
from dsv4_npu.config import CacheConfig
from dsv4_npu.errors import ConfigError
from dsv4_npu.pools.formats import indexer_format, kv_format
from dsv4_npu.pools.slab import RowSlab, StateSlab


class DSV4Pools:
    """Slabs of SWA, C4, C128 and indexer rows and of the compressor states.

    FULL has no payload on DeepSeek-V4: it is the index space that C4 slots derive from and SWA pages are mapped from.
    A model without layers of some ratio has slabs of zero layers for it, so that no caller needs a special case.

    Attributes:
        swa: ``[target layers + draft stages, SWA pages + 1, page, 1, row]``.
        c4, index: ``[C4 layers, FULL pages + 1, page / 4, 1, row]``; they share FULL's page ids.
        c128: ``[C128 layers, C128 pages + 1, c128_page_size, 1, row]``.
        c4_state, index_state: ``[C4 layers, rows, 4 · D]``, banks owned by SWA pages (A2/A3) or requests (A5).
        c128_state: ``[C128 layers, rows, 2 · D]``, banks owned by requests.

    Raises:
        ConfigError: sizes with fewer request rows than the configuration gives out, or another dtype of states.
    """

    def __init__(
        self,
        config: CacheConfig,
        sizes: PoolSizes,
        *,
        device: torch.device | str = "cpu",
        state_dtype: torch.dtype = torch.float32,
        draft_stages: bool = False,
    ) -> None:
        if sizes.request_rows < config.request_rows:
            raise ConfigError(
                f"request_rows = {sizes.request_rows} in the pool sizes; at least {config.request_rows} are needed: "
                "each request row of the configuration owns a bank of states"
            )
        if state_dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"state_dtype = {state_dtype}; torch.float32 or torch.float64 is needed")
        model = config.model
        assert config.kv_row is not None
        assert config.indexer_row is not None
        self.config, self.sizes, self.device = config, sizes, torch.device(device)
        row = kv_format(config.kv_row, model.nope_dim, model.rope_dim)
        key = indexer_format(config.indexer_row, model.indexer_dim)
        c4_layers, c128_layers = model.layers_of(4), model.layers_of(128)
        self.c4_index = {layer: i for i, layer in enumerate(c4_layers)}
        self.c128_index = {layer: i for i, layer in enumerate(c128_layers)}

        swa_layers = model.num_layers + (model.num_draft_stages if draft_stages else 0)
        self.swa = RowSlab(swa_layers, sizes.swa_pages + 1, config.page, row, device)
        self.c4 = RowSlab(len(c4_layers), sizes.full_pages + 1, config.c4_page, row, device)
        self.index = RowSlab(len(c4_layers), sizes.full_pages + 1, config.c4_page, key, device)
        self.c128 = RowSlab(len(c128_layers), sizes.c128_pages + 1, config.c128_page_size, row, device)

        by_page = config.platform.c4_state_owner == "swa_page"
        c4_banks = sizes.swa_pages if by_page else sizes.request_rows
        ring4, ring128 = config.ring(addressing.C4_RATIO), config.ring(addressing.C128_RATIO)
        self.c4_state = StateSlab(len(c4_layers), c4_banks, ring4, 4, model.head_dim, state_dtype, device)
        self.index_state = StateSlab(len(c4_layers), c4_banks, ring4, 4, model.indexer_dim, state_dtype, device)
        self.c128_state = StateSlab(
            len(c128_layers), sizes.request_rows, ring128, 128, model.head_dim, state_dtype, device
        )

    @property
    def c4_state_by_page(self) -> bool:
        """Whether C4 states are owned by SWA pages (A2/A3) rather than by requests (A5)."""
        return self.config.platform.c4_state_owner == "swa_page"

    def families(self) -> dict[str, RowSlab | StateSlab]:
        """Every slab by the name that reports use."""
        return {
            "swa": self.swa,
            "c4": self.c4,
            "c4 indexer": self.index,
            "c128": self.c128,
            "c4 state": self.c4_state,
            "c4 indexer state": self.index_state,
            "c128 state": self.c128_state,
        }

    def usage_bytes(self) -> int:
        """Bytes of all slabs: the sum of the tensors' bytes."""
        return sum(slab.nbytes for slab in self.families().values())

    def c4_state_rows(
        self, rows: torch.Tensor, positions: torch.Tensor, swa_slots: torch.Tensor, ring: int, dummy: int
    ) -> torch.Tensor:
        """C4 state rows by the platform's ownership rule; ``swa_slots`` of the same positions are used on A2/A3."""
        if self.c4_state_by_page:
            return addressing.swa_state_rows(swa_slots, self.config.page, ring, dummy)
        return addressing.request_state_rows(rows, positions, ring)
