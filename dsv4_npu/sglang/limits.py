"""Sizes with which SGLang's scheduler would wait for ever, refused before it starts."""

from __future__ import annotations

from dsv4_npu.errors import ConfigError

TOKENS_PER_C128_ROW = 128


def check_swa_tokens(swa_tokens: int, c128_page_size: int, full_tokens: int | None = None) -> None:
    """Refuse a sliding-window pool smaller than one C128 group.

    SGLang caches a prefix in whole groups of 128 × ``c128_page_size`` tokens, and a request that is prefilled in
    chunks gives its sliding-window pages back only once a group is cached. With a smaller pool the second chunk waits
    for pages that the first one never returns.

    Args:
        swa_tokens: sliding-window slots, without the dummy page.
        c128_page_size: C128 rows of a page, SGLang's ``--c128-page-size``.
        full_tokens: full-KV tokens, to say which ratio would do.

    Raises ConfigError with the numbers.
    """
    group = TOKENS_PER_C128_ROW * c128_page_size
    if swa_tokens >= group:
        return
    ratio = ""
    if full_tokens:
        ratio = f" --swa-full-tokens-ratio of at least {group / full_tokens:.3g} gives them with {full_tokens} tokens;"
    raise ConfigError(
        f"the sliding-window pool holds {swa_tokens} tokens and one C128 group takes {group} "
        f"(128 × --c128-page-size {c128_page_size}): chunked prefill would wait for ever.{ratio} "
        f"raise --mem-fraction-static or --max-total-tokens, or lower --c128-page-size"
    )
