"""Sizes of the ledger: how many pages of each family, how many request rows, and how wide a row is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from dsv4_npu import addressing
from dsv4_npu.errors import ConfigError

if TYPE_CHECKING:
    from dsv4_npu.budget import PoolSizes
    from dsv4_npu.config import CacheConfig

C4StateOwner = Literal["swa_page", "request"]

#: Table entries are int32 and the mirrors are addressed by one flat index.
MAX_TABLE_ENTRIES = 2**31 - 1


class FamilyCounts(NamedTuple):
    """Pages of each family."""

    full: int
    swa: int
    c128: int


@dataclass(frozen=True)
class AllocSpec:
    """Sizes of one allocator. Counts are usable pages and rows; the dummy page 0 and row 0 come on top.

    ``page_size`` counts tokens, ``c128_page_size`` C128 entries (128 tokens each), ``row_width`` tokens
    (``ceil_page(context + reserve)``). ``window`` is the sliding window and ``verify_width`` the widest verify (root
    included); together they bound window eviction. ``c4_state_owner`` says who owns C4 compressor state: the SWA page
    (A2/A3) or the request bank (A5).

    A model with plain attention has FULL pages alone (:meth:`plain`): no SWA and no C128 pages, and pages of any size.
    """

    page_size: int
    c128_page_size: int
    full_pages: int
    swa_pages: int
    c128_pages: int
    request_rows: int
    row_width: int
    window: int = 128
    verify_width: int = 1
    c4_state_owner: C4StateOwner = "swa_page"

    def __post_init__(self) -> None:
        for name in (
            "page_size",
            "c128_page_size",
            "full_pages",
            "swa_pages",
            "c128_pages",
            "request_rows",
            "row_width",
            "window",
            "verify_width",
        ):
            value = getattr(self, name)
            if self.full_only and name in ("swa_pages", "c128_pages"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} = {value!r}: an integer >= 1 is needed")
        if self.page_size % addressing.C4_RATIO and not self.full_only:
            raise ConfigError(
                f"page_size = {self.page_size}: a multiple of {addressing.C4_RATIO} is needed, "
                f"because C4 pages share the ids of FULL pages"
            )
        if self.c4_state_owner not in ("swa_page", "request"):
            raise ConfigError(f"c4_state_owner = {self.c4_state_owner!r}: 'swa_page' or 'request' is allowed")
        if self.table_entries > MAX_TABLE_ENTRIES:
            raise ConfigError(
                f"request_rows = {self.request_rows} of row_width = {self.row_width} make {self.table_entries} table "
                f"entries: at most {MAX_TABLE_ENTRIES} are allowed"
            )

    @classmethod
    def of(cls, config: CacheConfig, sizes: PoolSizes) -> AllocSpec:
        """The spec of a cache configuration and the pool sizes chosen for it."""
        return cls(
            page_size=config.page,
            c128_page_size=config.c128_page_size,
            full_pages=sizes.full_pages,
            swa_pages=sizes.swa_pages,
            c128_pages=sizes.c128_pages,
            request_rows=config.request_rows,
            row_width=config.width,
            window=config.model.sliding_window,
            verify_width=config.verify_width,
            c4_state_owner=config.platform.c4_state_owner,
        )

    @classmethod
    def plain(
        cls, *, page_size: int, full_pages: int, request_rows: int, row_width: int, verify_width: int = 1
    ) -> AllocSpec:
        """The spec of a model with plain attention: FULL pages alone, whose slots hold its keys and values."""
        return cls(
            page_size,
            1,
            full_pages,
            0,
            0,
            request_rows,
            row_width,
            verify_width=verify_width,
            c4_state_owner="request",
        )

    @property
    def full_only(self) -> bool:
        """Whether the model has FULL pages and no other family."""
        return self.swa_pages == 0 and self.c128_pages == 0

    @property
    def columns(self) -> int:
        """FULL pages in a request row."""
        return addressing.pages_for(self.row_width, self.page_size)

    @property
    def sidecar_columns(self) -> int:
        """C128 pages in a request row."""
        return 0 if self.full_only else addressing.sidecar_width(self.row_width, self.c128_page_size)

    @property
    def group_tokens(self) -> int:
        """Tokens whose C128 entries fill one C128 page: the granule of a shared C128 prefix."""
        return addressing.C128_RATIO * self.c128_page_size

    @property
    def table_entries(self) -> int:
        """Entries of the three mirrored tables together."""
        rows = self.request_rows + 1
        return rows * (self.columns + self.sidecar_columns) + self.full_pages + 1
