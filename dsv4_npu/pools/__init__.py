"""Storage of the six families: slabs and row formats. Who owns which page is decided in :mod:`dsv4_npu.alloc`."""

from dsv4_npu.pools.formats import RowFormat, indexer_format, kv_format
from dsv4_npu.pools.kv_pool import DSV4Pools
from dsv4_npu.pools.slab import RowSlab, StateSlab

__all__ = ["DSV4Pools", "RowFormat", "RowSlab", "StateSlab", "indexer_format", "kv_format"]
