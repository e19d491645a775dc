"""Device memory as exact integers: how many pages each family gets, and the bytes of every slab and table.

Pure functions of a :class:`~dsv4_npu.config.CacheConfig`; no tensor is built here. ``docs/budget.md`` has the
rules.
"""

from dsv4_npu.budget.cost import (
    GIB,
    Budget,
    FamilyBytes,
    UnitCosts,
    budget_of,
    draft_stages,
    fixed_bytes,
    indexer_row_bytes,
    kv_row_bytes,
    unit_costs,
)
from dsv4_npu.budget.fit import largest_sizes
from dsv4_npu.budget.sizes import (
    DEFAULT_SWA_RATIO,
    PoolSizes,
    group_swa_floor,
    request_pages,
    request_swa_floor,
    requests_by_family,
    sizes_for_tokens,
)

__all__ = [
    "DEFAULT_SWA_RATIO",
    "GIB",
    "Budget",
    "FamilyBytes",
    "PoolSizes",
    "UnitCosts",
    "budget_of",
    "draft_stages",
    "fixed_bytes",
    "group_swa_floor",
    "indexer_row_bytes",
    "kv_row_bytes",
    "largest_sizes",
    "request_pages",
    "request_swa_floor",
    "requests_by_family",
    "sizes_for_tokens",
    "unit_costs",
]
