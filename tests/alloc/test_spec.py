from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest

from dsv4_npu.alloc import AllocSpec, KVAllocator, make_ledger
from dsv4_npu.errors import ConfigError, InputError, OwnershipError, UnavailableError

GOOD = AllocSpec(128, 16, 64, 16, 8, 4, 2176)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *((name, 0, f"{name} = 0: an integer >= 1") for name in ("full_pages", "swa_pages", "c128_pages", "window")),
        *((name, -3, f"{name} = -3") for name in ("request_rows", "row_width", "verify_width", "c128_page_size")),
        ("page_size", 126, "page_size = 126: a multiple of 4"),
        ("page_size", 128.0, "page_size = 128.0"),
        ("request_rows", True, "request_rows = True"),
        ("c4_state_owner", "row", "c4_state_owner = 'row'"),
        ("request_rows", 2**28, "table entries"),
    ],
)
def test_wrong_sizes_are_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(GOOD, **{field: value})


def test_every_page_of_every_family_is_usable_once(backend: str) -> None:
    alloc = KVAllocator(GOOD, backend=backend)  # type: ignore[arg-type]
    full, swa, c128 = alloc.ledger.take(64, 16, 8)
    assert (sorted(full), sorted(swa), sorted(c128)) == (
        list(range(1, 65)),
        list(range(1, 17)),
        list(range(1, 9)),
    )
    assert sorted(alloc.open(i) for i in range(4)) == [1, 2, 3, 4]


def test_names_of_requests(backend: str) -> None:
    alloc = KVAllocator(GOOD, backend=backend)  # type: ignore[arg-type]
    row = alloc.open("a")
    assert (alloc.rid_of(row), alloc.row_of("a"), alloc.rows()) == ("a", row, [row])
    with pytest.raises(OwnershipError, match="request 'a' has row 1 already"):
        alloc.open("a")
    with pytest.raises(OwnershipError, match="row 2 is not open"):
        alloc.rid_of(2)
    with pytest.raises(OwnershipError, match="request 'b' has no row"):
        alloc.row_of("b")


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="backend = 'rust'"):
        make_ledger(GOOD, "rust")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "dsv4_npu._ledger", None)
    assert make_ledger(GOOD, "auto")[0].backend == "python"
    with pytest.raises(UnavailableError, match="C\\+\\+20 compiler"):
        make_ledger(GOOD, "cpp")


def test_two_dimensional_ids_are_refused(backend: str) -> None:
    alloc = KVAllocator(GOOD, backend=backend)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="one dimension"):
        alloc.retain_c128([[1, 2]])  # type: ignore[list-item]


def test_holders_have_one_name(backend: str) -> None:
    alloc = KVAllocator(GOOD, backend=backend)  # type: ignore[arg-type]

    class Nobody:
        def held_pages(self) -> tuple[list[int], list[int], list[int]]:
            return [], [], []

    alloc.register_holder("x", Nobody())
    with pytest.raises(InputError, match="'x' is registered"):
        alloc.register_holder("x", Nobody())
