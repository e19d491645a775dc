"""Bytes of every slab and device table, and the unit costs behind them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from dsv4_npu import addressing
from dsv4_npu.budget.sizes import PoolSizes
from dsv4_npu.config import CacheConfig

GIB = 2**30
_PLAIN_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}
#: Bytes of an indexer key's scale beside one byte per channel.
_SCALE_BYTES = {"int8_fp16": 2, "fp8_fp32": 4}
#: Bytes of one compressor state value: the pools keep states in fp32 unless they are told otherwise.
STATE_BYTES = 4
#: Device tables are int32.
_TABLE_BYTES = 4


@dataclass(frozen=True)
class FamilyBytes:
    """One slab: ``layers · rows · row_bytes`` bytes.

    Attributes:
        units: pages or banks that can be given out.
        unit_rows: rows of one of them.
        rows: rows of one layer as allocated: the usable ones, the dummy page or bank, for states also the dummy row and
            what rounding adds.
    """

    layers: int
    units: int
    unit_rows: int
    rows: int
    row_bytes: int

    @property
    def usable_rows(self) -> int:
        """Rows of one layer that an address can reach besides the dummies."""
        return self.units * self.unit_rows

    @property
    def nbytes(self) -> int:
        """Bytes allocated over all layers."""
        return self.layers * self.rows * self.row_bytes


@dataclass(frozen=True)
class Budget:
    """Every byte of device memory that a deployment's pools and mirrored tables take.

    ``families`` has the names and the order of ``DSV4Pools.families()``; ``table_bytes`` are the device mirrors of the
    block table, the SWA mapping and the C128 sidecar, which are not part of the pools.
    """

    config: CacheConfig
    sizes: PoolSizes
    families: dict[str, FamilyBytes]
    table_bytes: int

    @property
    def pool_bytes(self) -> int:
        """Bytes of all slabs: ``DSV4Pools.usage_bytes()``."""
        return sum(family.nbytes for family in self.families.values())

    @property
    def total_bytes(self) -> int:
        """Slabs and tables."""
        return self.pool_bytes + self.table_bytes


@dataclass(frozen=True)
class UnitCosts:
    """What one more of each thing costs, in bytes over all layers.

    Attributes:
        token: C4, indexer and C128 entries of one token of history (fractional: an entry serves 4 or 128 tokens).
        swa_slot, swa_draft_slot: one SWA slot of all target layers; of the draft stages on top.
        c4_bank: C4 states of one SWA page (A2/A3) or of one request (A5), attention and indexer together.
        c128_bank: C128 states of one request.
        c128_page: one C128 page.
    """

    token: Fraction
    swa_slot: int
    swa_draft_slot: int
    c4_bank: int
    c128_bank: int
    c128_page: int


def kv_row_bytes(config: CacheConfig) -> int:
    """Bytes of one KV row: ``D`` plain values, or packed fp8: nope + 2 · rope + a scale byte per 64, 128-aligned."""
    model = config.model
    if config.kv_row == "fp8_packed":
        return addressing.ceil_to(model.nope_dim + 2 * model.rope_dim + -(-model.nope_dim // 64), 128)
    return model.head_dim * _PLAIN_BYTES[str(config.kv_row)]


def indexer_row_bytes(config: CacheConfig) -> int:
    """Bytes of one indexer key, its scale included."""
    if config.indexer_row in _SCALE_BYTES:
        return config.model.indexer_dim + _SCALE_BYTES[config.indexer_row]
    return config.model.indexer_dim * _PLAIN_BYTES[str(config.indexer_row)]


def draft_stages(config: CacheConfig) -> int:
    """Draft stages that get SWA rows: all that the checkpoint carries, none without speculation."""
    return config.model.num_draft_stages if config.speculation.speculative else 0


def budget_of(config: CacheConfig, sizes: PoolSizes, state_bytes: int = STATE_BYTES) -> Budget:
    """The bytes of ``DSV4Pools(config, sizes, draft_stages=True)`` (False without speculation) and of its tables.

    ``state_bytes`` is 4, or 8 for float64 states.
    """
    tables = _table_bytes(config, sizes.full_pages)
    pages = (sizes.full_pages, sizes.swa_pages, sizes.c128_pages)
    return Budget(config, sizes, _families(config, *pages, sizes.request_rows, state_bytes), tables)


def fixed_bytes(config: CacheConfig, swa_tokens: int | None = None) -> int:
    """Bytes that are there before the first token: states of the request rows, their C128 slack, dummies and tables.

    SWA belongs to them where it is given as a number of tokens.
    """
    swa, rows = (swa_tokens or 0) // config.page, config.request_rows
    families = _families(config, 0, swa, rows, rows, STATE_BYTES)
    return sum(family.nbytes for family in families.values()) + _table_bytes(config, 0)


def unit_costs(config: CacheConfig) -> UnitCosts:
    """The unit costs of a configuration."""
    row, key = kv_row_bytes(config), indexer_row_bytes(config)
    model = config.model
    n4, n128 = len(model.layers_of(4)), len(model.layers_of(128))
    states = _families(config, 1, 1, 1, 1, STATE_BYTES)
    c4_rows = [states[name] for name in ("c4 state", "c4 indexer state")]
    return UnitCosts(
        token=Fraction(n4 * (row + key), addressing.C4_RATIO) + Fraction(n128 * row, addressing.C128_RATIO),
        swa_slot=model.num_layers * row,
        swa_draft_slot=draft_stages(config) * row,
        c4_bank=sum(state.layers * state.unit_rows * state.row_bytes for state in c4_rows),
        c128_bank=n128 * config.ring(128) * states["c128 state"].row_bytes,
        c128_page=n128 * config.c128_page_size * row,
    )


def _families(config: CacheConfig, full: int, swa: int, c128: int, rows: int, state: int) -> dict[str, FamilyBytes]:
    model = config.model
    n4, n128 = len(model.layers_of(4)), len(model.layers_of(128))
    row, key = kv_row_bytes(config), indexer_row_bytes(config)
    banks = swa if config.platform.c4_state_owner == "swa_page" else rows

    def paged(layers: int, pages: int, page: int, row_bytes: int) -> FamilyBytes:
        return FamilyBytes(layers, pages, page, (pages + 1) * page, row_bytes)

    def states(layers: int, banks: int, ratio: int, dim: int) -> FamilyBytes:
        ring = config.ring(ratio)
        values = 2 * addressing.OVERLAP[ratio] * dim
        return FamilyBytes(layers, banks, ring, addressing.state_pool_rows(banks, ring, ratio), values * state)

    return {
        "swa": paged(model.num_layers + draft_stages(config), swa, config.page, row),
        "c4": paged(n4, full, config.c4_page, row),
        "c4 indexer": paged(n4, full, config.c4_page, key),
        "c128": paged(n128, c128, config.c128_page_size, row),
        "c4 state": states(n4, banks, addressing.C4_RATIO, model.head_dim),
        "c4 indexer state": states(n4, banks, addressing.C4_RATIO, model.indexer_dim),
        "c128 state": states(n128, rows, addressing.C128_RATIO, model.head_dim),
    }


def _table_bytes(config: CacheConfig, full: int) -> int:
    """Block table and sidecar of every request row and of row 0, and the SWA page of every FULL page and of page 0."""
    columns = addressing.pages_for(config.width, config.page) + config.sidecar_columns
    return _TABLE_BYTES * ((config.request_rows + 1) * columns + full + 1)
