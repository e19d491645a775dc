"""How large the replayed deployment is: from a number of tokens, or from bytes of device memory."""

from __future__ import annotations

from dsv4_npu.budget import DEFAULT_SWA_RATIO, GIB, PoolSizes, budget_of, largest_sizes
from dsv4_npu.config import CacheConfig

__all__ = ["GIB", "pool_bytes", "sizes_for_bytes"]


def pool_bytes(config: CacheConfig, sizes: PoolSizes) -> dict[str, int]:
    """Bytes of every slab at ``sizes``, dummy pages and banks and, with speculation, the draft stages included."""
    return {name: family.nbytes for name, family in budget_of(config, sizes).families.items()}


def sizes_for_bytes(config: CacheConfig, budget: int, swa_ratio: float = DEFAULT_SWA_RATIO) -> PoolSizes:
    """The largest sizes whose slabs and tables take at most ``budget`` bytes; ConfigError says what to change."""
    return largest_sizes(config, budget, swa_ratio)
