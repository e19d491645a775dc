"""How much a speculative decode allocates: reserve, next allocation, row width, tail reclaim. Pure integers."""

from __future__ import annotations

from dsv4_npu import addressing
from dsv4_npu.errors import InputError


def alloc_len(steps: int, verify_width: int, page: int, topk: int = 1) -> int:
    """Tokens that one decode of one request may write: ``max(topk · steps, D)``.

    With ``topk > 1`` and pages of more than one token every branch begins with its own copy of the partly filled last
    page, so it needs ``ceil((page − 1 + steps) / page)`` pages in the worst case; these are counted in tokens.
    """
    for name, value, least in (
        ("steps", steps, 0),
        ("verify_width", verify_width, 1),
        ("page", page, 1),
        ("topk", topk, 1),
    ):
        if value < least:
            raise InputError(f"{name} = {value}: {least} or more is allowed")
    drafted = topk * steps
    if topk > 1 and page > 1:
        drafted = topk * branch_pages(steps, page) * page
    return max(drafted, verify_width)


def branch_pages(steps: int, page: int) -> int:
    """Pages that one branch of ``steps`` drafts needs at most, whatever the offset at which it begins."""
    return addressing.pages_for(page - 1 + steps, page)


def reserve(alloc: int) -> int:
    """Positions kept allocated behind the committed end: two decodes, because the host learns lengths a step late."""
    return 2 * alloc


def next_allocated(allocated: int, committed: int, reserve: int, page: int) -> int:
    """Allocated length before the next decode: ``max(allocated, ceil_page(committed + reserve))``."""
    if not 0 <= committed <= allocated:
        raise InputError(f"committed = {committed}: 0 to allocated = {allocated} is allowed")
    return max(allocated, addressing.ceil_to(committed + reserve, page))


def row_width(context: int, reserve: int, page: int) -> int:
    """Tokens that a request row must hold: ``ceil_page(context + reserve)``."""
    return addressing.ceil_to(context + reserve, page)


def tail_start(boundary: int, allocator_page: int) -> int:
    """First position that may be reclaimed behind ``boundary``: ``ceil_align`` to the ALLOCATOR's page.

    That page can be wider than the cache's (context parallelism). Positions before it share a page with live rows.
    """
    return addressing.ceil_to(boundary, allocator_page)
