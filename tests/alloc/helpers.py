"""What the allocator tests share."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

from dsv4_npu.alloc import AllocSpec, KVAllocator, OutCacheLoc

PAGE = 128


QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make(backend: str, **sizes: Any) -> KVAllocator:
    base = {
        "page_size": PAGE,
        "c128_page_size": 16,
        "full_pages": 64,
        "swa_pages": 64,
        "c128_pages": 32,
        "request_rows": 8,
        "row_width": 4096,
    }
    return KVAllocator(AllocSpec(**{**base, **sizes}), backend=backend)  # type: ignore[arg-type]


def extend(alloc: KVAllocator, row: int, length: int, tail: int | None = None, commit: bool = True) -> OutCacheLoc:
    with alloc.transaction() as tx:
        tx.extend(row, length, tail)
        out = tx.commit()
    if commit:
        alloc.commit(row, length)
    return out


def used(alloc: KVAllocator) -> dict[str, int]:
    return {name: count for name, (count, _, _) in alloc.usage().items()}


EMPTY = {"FULL": 0, "SWA": 0, "C128": 0, "ROW": 0}


class Shelf:
    """A holder of pages that were taken over."""

    def __init__(self) -> None:
        self.full: list[int] = []
        self.swa: list[int] = []
        self.c128: list[int] = []

    def held_pages(self) -> tuple[list[int], list[int], list[int]]:
        return self.full, self.swa, self.c128


def shelve(alloc: KVAllocator, tokens: int, rid: object = "donor") -> Shelf:
    """``tokens`` of history that a holder outside owns."""
    row = alloc.open(rid)
    extend(alloc, row, tokens)
    shelf = Shelf()
    full, c128 = alloc.take_over(row, tokens // alloc.spec.page_size)
    shelf.full, shelf.swa, shelf.c128 = full.tolist(), full.tolist(), c128.tolist()
    alloc.register_holder(f"shelf of {rid}", shelf)
    alloc.close(row)
    alloc.audit()
    return shelf
