"""How many pages each family gets, and what one request takes of them."""

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


def sizes_for_tokens(
    config: CacheConfig,
    tokens: int,
    swa_ratio: float = DEFAULT_SWA_RATIO,
    *,
    swa_tokens: int | None = None,
    swa_floor: int = 0,
) -> PoolSizes:
    """Sizes that hold ``tokens`` positions of history over all requests.

    FULL gets the whole pages of ``tokens``. C128 gets the pages of the entries plus one page of slack per request row:
    each request may leave one page partly filled. SWA gets ``swa_ratio`` of the pages, or the whole pages of
    ``swa_tokens`` where given; never more than FULL, and a share is raised to what one request needs to make progress
    (:func:`request_swa_floor`) and to ``swa_floor`` tokens. Every size grows with ``tokens``, or stays.

    Raises:
        ConfigError: ``tokens`` below a page, ``swa_ratio`` outside of (0, 1], ``swa_tokens`` below the floor.
    """
    require_integer(tokens, "tokens", config.page)
    if type(swa_ratio) not in (int, float) or not 0 < swa_ratio <= 1:
        raise ConfigError(f"swa_ratio = {swa_ratio!r}; a number in (0, 1] is needed")
    full = tokens // config.page
    least = max(request_swa_floor(config), addressing.ceil_to(swa_floor, config.page))
    if swa_tokens is None:
        swa = max(int(full * swa_ratio), least // config.page)
    else:
        require_integer(swa_tokens, "swa_tokens", least)
        swa = swa_tokens // config.page
    c128 = addressing.c128_columns(full * config.page, config.c128_page_size) + config.request_rows
    return PoolSizes(full, min(full, swa), c128, config.request_rows)


def request_swa_floor(config: CacheConfig) -> int:
    """SWA tokens without which one request cannot go on: its window, a page of prefill and its reserve, whole pages.

    One page comes on top because the window may begin anywhere in a page. Draft stages lie on the same mapping, so they
    make a slot larger and need none of their own.
    """
    tokens = config.model.sliding_window + config.page + config.reserve
    return (addressing.pages_for(tokens, config.page) + 1) * config.page


def group_swa_floor(config: CacheConfig) -> int:
    """SWA tokens for a scheduler that gives SWA back only with complete C128 groups: one group and one request.

    This life cycle evicts the window while a request is prefilled, so it does not need them. SGLang's prefix cache
    takes a prompt only in complete C128 pages (2048 tokens at 16 entries), and what it has not taken is not evicted:
    with less than a group of SWA a chunked prompt was seen to stall there.
    """
    return addressing.C128_RATIO * config.c128_page_size + request_swa_floor(config)


def request_pages(config: CacheConfig, length: int | None = None) -> dict[str, int]:
    """Pages that a running request with ``length`` tokens of history holds at most (the full context by default).

    FULL and C128: everything up to ``ceil_page(length + reserve)``. SWA: from the page of the eviction cursor,
    ``floor_page(length − max(window, D))``, to the same end, at the worst offset in a page.
    """
    length = config.context_len if length is None else length
    require_integer(length, "length", 0)
    page, kept = config.page, max(config.model.sliding_window, config.verify_width)
    full = addressing.pages_for(length + config.reserve, page)
    span = max(addressing.pages_for(at + config.reserve, page) - (at - kept) // page for at in range(page))
    return {
        "FULL": full,
        "SWA": min(full, span),
        "C128": addressing.c128_columns(full * page, config.c128_page_size),
    }


def requests_by_family(config: CacheConfig, sizes: PoolSizes) -> dict[str, int]:
    """How many running requests of full context each family alone would hold; the least of them is the limit."""
    need = request_pages(config)
    have = {"FULL": sizes.full_pages, "SWA": sizes.swa_pages, "C128": sizes.c128_pages}
    return {**{family: have[family] // need[family] for family in need}, "request slots": sizes.request_rows}
