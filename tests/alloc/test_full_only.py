"""A model with plain attention on the same ledger: FULL pages alone, of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.alloc.prefix_cache import PrefixCache
from dsv4_npu.alloc.state import HOLES
from dsv4_npu.errors import AuditError, CapacityError, ConfigError, InputError, OwnershipError

from .conftest import BACKENDS
from .world import OPERATIONS, Request, World, WorldError

SPECS = {
    "page of 16": AllocSpec.plain(page_size=16, full_pages=90, request_rows=5, row_width=640, verify_width=6),
    "page of 6": AllocSpec.plain(page_size=6, full_pages=260, request_rows=5, row_width=1000, verify_width=16),
}


class PlainWorld(World):
    """The world of the other geometries, with one family of memory."""

    def match(self, request: Request, limit: int) -> tuple[list[int], list[int], int]:
        pages: list[int] = []
        for end in range(self.group, limit + 1, self.group):
            node = self.cache.nodes.get(request.prints[end - 1])
            if node is None:
                return pages, [], end - self.group
            pages = pages + node.pages
        return pages, [], limit // self.group * self.group

    def write(self, row: int, start: int, prints: list[int]) -> None:
        slots = self.main.slots(row, start, start + len(prints))
        assert not slots.out_swa.any()
        assert not len(slots.out_c4)
        assert not len(slots.out_c128)
        self.mem[0][slots.out_full] = prints

    def check_reads(self, request: Request) -> None:
        if self.main.state.flags[request.row] & HOLES:
            return
        length = self.main.committed(request.row)
        got = self.mem[0][self.main.slots(request.row, 0, length).out_full]
        if not np.array_equal(got, np.array(request.prints[:length], np.int64)):
            raise WorldError(f"row {request.row} reads foreign content")


@pytest.mark.parametrize("name", sorted(SPECS))
def test_random_serving(name: str) -> None:
    world = PlainWorld(SPECS[name], tuple(BACKENDS))
    rng = np.random.default_rng(3)
    names = [one for one in OPERATIONS if one != "resize"]
    weights = np.array([OPERATIONS[one] for one in names], np.float64)
    for which in rng.choice(len(names), size=900, p=weights / weights.sum()).tolist():
        getattr(world, names[which])(*rng.integers(0, 1 << 16, size=3).tolist())
        world.check()
    for event in ("prefix hit", "take over", "overlapped verify", "freed in flight"):
        assert world.events[event], f"the run never showed: {event}"
    world.drain()


def plain(backend: str, **sizes: Any) -> KVAllocator:
    base = {"page_size": 4, "full_pages": 10, "request_rows": 3, "row_width": 32, "verify_width": 3}
    return KVAllocator(AllocSpec.plain(**{**base, **sizes}), backend=backend)  # type: ignore[arg-type]


def test_only_full_pages_and_rows_exist(backend: str) -> None:
    alloc = plain(backend)
    row = alloc.open("a")
    with alloc.transaction() as tx:
        tx.extend(row, 9)
        assert tuple(tx.need) == (3, 0, 0)
        tx.commit()
    alloc.commit(row, 9)
    slots = alloc.decode_step([row, 0], 6, 3)
    assert slots.out_full.reshape(2, 3).tolist() == [[13, 14, 15], [0, 0, 0]]
    assert alloc.usage() == {"FULL": (4, 4, 10), "ROW": (1, 1, 3)}
    alloc.flush()
    alloc.audit()
    assert alloc.evict_window(row) == 0
    alloc.close(row)
    alloc.audit()
    assert alloc.usage() == {"FULL": (0, 4, 10), "ROW": (0, 1, 3)}


def test_the_pool_runs_dry_before_anything_changes(backend: str) -> None:
    alloc = plain(backend, full_pages=3, row_width=16)
    row = alloc.open("a")
    with alloc.transaction() as tx:
        tx.extend(row, 13)
        with pytest.raises(CapacityError, match="FULL pages: need 4, free 3"):
            tx.commit()
    alloc.audit()
    with pytest.raises(CapacityError, match="needs 4 FULL pages: 3 exist"):
        alloc.admit_check(13)


def test_the_audit_sees_a_lost_page(backend: str) -> None:
    alloc = plain(backend)
    row = alloc.open("a")
    with alloc.transaction() as tx:
        tx.extend(row, 4)
        tx.commit()
    alloc.state.full_owner[1] = 2
    with pytest.raises(AuditError, match=r"FULL page 1.*KV page or compressor state: KV page\."):
        alloc.audit()


def test_what_belongs_to_other_families_is_refused(backend: str) -> None:
    alloc = plain(backend)
    with pytest.raises(InputError, match="C128 page 1: 1 to 0 is allowed"):
        alloc.retain_c128([1])
    with pytest.raises(InputError, match="FULL pages alone"):
        alloc.resize_c128(4)
    with pytest.raises(ConfigError, match="prefix cache over an allocator of FULL pages alone"):
        PrefixCache(alloc)
    with pytest.raises(OwnershipError):
        alloc.close(1)


@pytest.mark.parametrize(("swa", "c128", "name"), [(0, 4, "swa_pages"), (4, 0, "c128_pages")])
def test_one_missing_family_is_a_mistake(swa: int, c128: int, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = 0"):
        AllocSpec(128, 16, 64, swa, c128, 4, 2176)
