"""What the budget says about requests of full context, proved by serving them all at once."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.budget import (
    PoolSizes,
    group_swa_floor,
    request_pages,
    request_swa_floor,
    requests_by_family,
    sizes,
    sizes_for_tokens,
)
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec
from dsv4_npu.errors import CapacityError

ROWS = 20


def config(drafts: int, context: int, page: int = 128) -> CacheConfig:
    speculation = SpeculationSpec("chain", drafts) if drafts else SpeculationSpec()
    model, platform = ModelSpec.load("tiny"), PlatformSpec.load("a3")
    return CacheConfig(model, platform, speculation, page_size=page, context_len=context, request_rows=ROWS)


def serve(setting: CacheConfig, pools: PoolSizes, requests: int) -> int:
    """Prefill ``requests`` prompts in turn, then decode all to the end of the context, one step behind; SWA's peak."""
    alloc = KVAllocator(AllocSpec.of(setting, pools))
    rows = [alloc.open(n) for n in range(requests)]
    width, prompt, page = setting.verify_width, setting.context_len // 2, setting.page
    for row in rows:
        for end in [*range(page, prompt, page), prompt]:
            with alloc.transaction() as tx:
                tx.extend(row, end)
                tx.commit(slots=False)
            alloc.done(alloc.launch())
            alloc.commit(row, end)
            alloc.evict_window(row)
    batch, running = np.array(rows, np.int64), list[int]()
    while alloc.committed(rows[0]) + (1 + len(running)) * width <= setting.context_len:
        alloc.decode_step(batch, setting.reserve)
        running.append(alloc.launch())
        if len(running) == 2:
            alloc.done(running.pop(0))
            for row in rows:
                alloc.commit(row, alloc.committed(row) + width)
                alloc.evict_window(row)
    assert alloc.committed(rows[0]) > setting.context_len - 3 * width
    return alloc.usage()["SWA"][1]


@pytest.mark.parametrize("drafts", [0, 3, 9])
@pytest.mark.parametrize(("context", "ratio", "binding"), [(2100, 0.5, "FULL"), (1921, 0.08, "SWA"), (700, 0.3, "SWA")])
@pytest.mark.parametrize("page", [128, 256])
def test_as_many_requests_as_it_says(page: int, context: int, ratio: float, binding: str, drafts: int) -> None:
    setting = config(drafts, context, page)
    pools = sizes_for_tokens(setting, 12 * setting.width + 100, ratio)
    limits = requests_by_family(setting, pools)
    most = min(limits.values())
    assert limits[binding] == most < ROWS
    peak = serve(setting, pools, most)
    assert peak <= most * request_pages(setting)["SWA"]
    with pytest.raises(CapacityError, match=binding):
        serve(setting, pools, most + 1)


def test_request_slots_can_be_the_limit() -> None:
    setting = config(3, 2000)
    pools = sizes_for_tokens(setting, 40 * setting.width, 1.0)
    assert (
        min(requests_by_family(setting, pools), key=requests_by_family(setting, pools).__getitem__) == "request slots"
    )


@pytest.mark.parametrize("wrong", [1, 2])
def test_a_window_counted_too_small_shows(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    real = sizes.request_pages
    monkeypatch.setattr(sizes, "request_pages", lambda c: {**real(c), "SWA": wrong})
    setting = config(9, 1921)
    pools = sizes_for_tokens(setting, 12 * setting.width, 0.08)
    with pytest.raises(CapacityError, match="SWA"):
        serve(setting, pools, min(requests_by_family(setting, pools).values()))


def test_pages_of_a_request() -> None:
    setting = config(5, 5000)
    assert request_pages(setting) == {"FULL": 40, "SWA": 3, "C128": 3}
    assert request_pages(setting, 100) == {"FULL": 1, "SWA": 1, "C128": 1}
    assert request_pages(setting, 2048) == {"FULL": 17, "SWA": 3, "C128": 2}
    assert request_swa_floor(setting) == 4 * 128
    assert group_swa_floor(setting) == 2048 + 4 * 128
