"""Sizes of the families: how many pages and state rows each one has.

Pure functions of a :class:`~dsv4_npu.config.CacheConfig`; no tensor is built here.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_npu import addressing
from dsv4_npu.config import CacheConfig, require_integer
from dsv4_npu.errors import ConfigError

#: Share of FULL tokens that the SWA family gets when nothing else is said.
DEFAULT_SWA_RATIO = 0.1


@dataclass(frozen=True)
class PoolSizes:
    """Usable pages per family (the dummy page 0 of each comes on top) and usable request rows."""

    full_pages: int
    swa_pages: int
    c128_pages: int
    request_rows: int

    def __post_init__(self) -> None:
        for name in ("full_pages", "swa_pages", "c128_pages", "request_rows"):
            require_integer(getattr(self, name), name)


def sizes_for_tokens(config: CacheConfig, tokens: int, swa_ratio: float = DEFAULT_SWA_RATIO) -> PoolSizes:
    """Sizes that hold ``tokens`` positions of history over all requests.

    C128 gets the pages of the entries plus one page of slack per request row: each request may leave one page partly
    filled. SWA gets ``swa_ratio`` of the pages, but never less than one request needs to make progress (its window, one
    page of prefill and its reserve).
    """
    require_integer(tokens, "tokens", config.page)
    if type(swa_ratio) not in (int, float) or not 0 < swa_ratio <= 1:
        raise ConfigError(f"swa_ratio = {swa_ratio!r}; a number in (0, 1] is needed")
    full = tokens // config.page
    floor = addressing.pages_for(config.model.sliding_window + config.page + config.reserve, config.page) + 1
    swa = min(full, max(int(full * swa_ratio), floor))
    c128 = addressing.c128_columns(full * config.page, config.c128_page_size) + config.request_rows
    return PoolSizes(full, swa, c128, config.request_rows)
