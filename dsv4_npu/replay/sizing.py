"""How large the replayed deployment is: from a number of tokens, or from bytes of device memory."""

from __future__ import annotations

from dsv4_npu import addressing
from dsv4_npu.budget import DEFAULT_SWA_RATIO, PoolSizes, sizes_for_tokens
from dsv4_npu.config import CacheConfig
from dsv4_npu.errors import ConfigError
from dsv4_npu.pools.formats import indexer_format, kv_format

#: Bytes of one compressor state value (fp32).
STATE_BYTES = 4
GIB = 2**30


def pool_bytes(config: CacheConfig, sizes: PoolSizes) -> dict[str, int]:
    """Bytes of every slab at ``sizes``, dummy pages and banks and the draft stages' SWA rows included."""
    assert config.kv_row is not None
    assert config.indexer_row is not None
    model = config.model
    row = kv_format(config.kv_row, model.nope_dim, model.rope_dim).row_bytes
    key = indexer_format(config.indexer_row, model.indexer_dim).row_bytes
    n4, n128 = len(model.layers_of(4)), len(model.layers_of(128))
    c4_slots = (sizes.full_pages + 1) * config.c4_page
    by_page = config.platform.c4_state_owner == "swa_page"
    banks = sizes.swa_pages if by_page else sizes.request_rows
    state_rows = {
        4: addressing.state_pool_rows(banks, config.ring(4), 4),
        128: addressing.state_pool_rows(sizes.request_rows, config.ring(128), 128),
    }
    return {
        "swa": (model.num_layers + model.num_draft_stages) * (sizes.swa_pages + 1) * config.page * row,
        "c4": n4 * c4_slots * row,
        "c4 indexer": n4 * c4_slots * key,
        "c128": n128 * (sizes.c128_pages + 1) * config.c128_page_size * row,
        "c4 state": n4 * state_rows[4] * 4 * model.head_dim * STATE_BYTES,
        "c4 indexer state": n4 * state_rows[4] * 4 * model.indexer_dim * STATE_BYTES,
        "c128 state": n128 * state_rows[128] * 2 * model.head_dim * STATE_BYTES,
    }


def sizes_for_bytes(config: CacheConfig, budget: int, swa_ratio: float = DEFAULT_SWA_RATIO) -> PoolSizes:
    """The largest sizes whose slabs take at most ``budget`` bytes; ConfigError says what to change if none fits."""

    def fits(pages: int) -> bool:
        sizes = sizes_for_tokens(config, pages * config.page, swa_ratio)
        return sum(pool_bytes(config, sizes).values()) <= budget

    if not fits(1):
        fixed = sum(pool_bytes(config, sizes_for_tokens(config, config.page, swa_ratio)).values())
        raise ConfigError(
            f"{budget / GIB:.2f} GiB cannot hold the state of {config.request_rows} request rows and one page of "
            f"tokens ({fixed / GIB:.2f} GiB): raise --hbm-gib or lower --max-running"
        )
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return sizes_for_tokens(config, low * config.page, swa_ratio)
