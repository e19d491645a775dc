"""The largest deployment that fits into a number of bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dsv4_npu.budget.cost import GIB, budget_of
from dsv4_npu.budget.sizes import DEFAULT_SWA_RATIO, PoolSizes, sizes_for_tokens
from dsv4_npu.config import CacheConfig, require_integer
from dsv4_npu.errors import ConfigError

USUAL_C128_PAGE = 16


def largest_sizes(
    config: CacheConfig,
    budget: int,
    swa_ratio: float = DEFAULT_SWA_RATIO,
    *,
    swa_tokens: int | None = None,
    swa_floor: int = 0,
    max_tokens: int | None = None,
) -> PoolSizes:
    """The largest sizes whose slabs and tables take at most ``budget`` bytes: one page of tokens more would not fit.

    The fixed part (states of the request rows, their C128 slack, dummies, tables) comes out first. ``max_tokens`` is a
    limit of the user's: kept where it fits, in whole pages. The other arguments are :func:`sizes_for_tokens`'.

    Raises:
        ConfigError: not even one page fits (the message says which option to change, and to what), or a wrong argument.
    """
    require_integer(budget, "budget", 0)
    if max_tokens is not None:
        require_integer(max_tokens, "max_tokens", config.page)

    def sizes(pages: int, of: CacheConfig = config) -> PoolSizes:
        return sizes_for_tokens(of, pages * config.page, swa_ratio, swa_tokens=swa_tokens, swa_floor=swa_floor)

    def fits(pages: int) -> bool:
        return budget_of(config, sizes(pages)).total_bytes <= budget

    pages = _largest(fits, None if max_tokens is None else max_tokens // config.page)
    if not pages:
        need = budget_of(config, sizes(1)).total_bytes
        rows = _largest_rows(config, budget, sizes)
        raise ConfigError(
            f"{_gib(budget)} cannot hold the state of {config.request_rows} request rows and one page of tokens "
            f"({_gib(need)}): raise --hbm-gib or lower --max-running "
            + (f"(at most {rows} fit)" if rows else "(not even one fits)")
            + _unusual_pages(config)
        )
    return sizes(pages)


def _unusual_pages(config: CacheConfig) -> str:
    """Advice about pages that are larger than usual, which make the smallest deployment large."""
    usual = config.platform.page_size
    advice = f", or lower --page-size ({config.page}; usual is {usual})" if config.page > usual else ""
    if config.c128_page_size > USUAL_C128_PAGE:
        advice += f", or lower --c128-page-size ({config.c128_page_size}; usual is {USUAL_C128_PAGE})"
    return advice


def _largest_rows(config: CacheConfig, budget: int, sizes: Callable[[int, CacheConfig], PoolSizes]) -> int:
    """The most request rows with which one page of tokens, ``sizes(1, config)``, fits into ``budget`` bytes, or 0."""

    def fits(rows: int) -> bool:
        fewer = replace(config, request_rows=rows)
        return budget_of(fewer, sizes(1, fewer)).total_bytes <= budget

    return _largest(fits, None)


def _largest(fits: Callable[[int], bool], limit: int | None) -> int:
    """The largest n ≥ 0 (at most ``limit``) for which ``fits(n)`` holds; ``fits`` turns from true to false once."""
    if limit is not None and fits(limit):
        return limit
    low, high = 0, 1
    while (limit is None or high < limit) and fits(high):
        low, high = high, 2 * high
    if limit is not None:
        high = min(high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes * 10 >= GIB else f"{nbytes:,} bytes"
