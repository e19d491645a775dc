"""Where SGLang's classes are wrong: what they do, and that ours do not. docs/sglang-differences.md lists each test."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsv4_npu.errors import ConfigError, InputError, OwnershipError
from tests.sglang.serving import Server
from tests.sglang.sides import GROUP, PAGE, UNIT, Side, prepare

pytestmark = pytest.mark.filterwarnings("ignore")
DOCUMENT = Path(__file__).parents[2] / "docs" / "sglang-differences.md"


@pytest.fixture(autouse=True, scope="module")
def _prepared() -> None:
    prepare()


def both(**sizes: Any) -> tuple[Side, Side]:
    return Side(False, **sizes), Side(True, **sizes)


def two_pages(side: Side) -> list[int]:
    """Two C128 pages that one request holds."""
    (req,) = side.open(1)
    side.extend([req], [GROUP + 128])
    return side.table.req_to_c128_sidecar[req.kv.req_pool_idx, :2].tolist()


def test_release_of_a_multiset() -> None:
    theirs, ours = both()
    for side, left in ((theirs, 2), (ours, 1)):
        x, y = two_pages(side)
        pages = torch.tensor([x, x, y])
        side.alloc.retain_c128_pages(pages)
        side.alloc.release_c128_pages(pages)
        assert side.alloc.c128_page_refcount[[x, y]].tolist() == [left, 1]


def test_page_zero_is_nobodys() -> None:
    theirs, ours = both()
    theirs.alloc.retain_c128_pages(torch.tensor([0]))
    assert theirs.alloc.c128_page_refcount[0] == 1
    with pytest.raises(InputError, match=r"C128 page 0: 1 to 16 is allowed"):
        ours.alloc.retain_c128_pages(torch.tensor([0]))
    assert ours.alloc.c128_page_refcount[0] == 0


def test_a_second_release() -> None:
    theirs, ours = both()
    for side in (theirs, ours):
        x, _ = two_pages(side)
        page = torch.tensor([x])
        side.alloc.release_c128_pages(page)
        if side is theirs:
            side.alloc.release_c128_pages(page)
            assert side.alloc.c128_page_refcount[x] == -1
        else:
            with pytest.raises(OwnershipError, match=rf"C128 page {x} has count 0 and is free"):
                side.alloc.release_c128_pages(page)
            assert side.alloc.c128_page_refcount[x] == 0


def test_a_page_is_freed_once() -> None:
    theirs, ours = both(full_pages=64)
    for side in (theirs, ours):
        (req,) = side.open(1)
        bundle = side.extend([req], [128])
        before = side.counts()["full"]
        side.alloc.free_segment(bundle.out_full_loc, start_pos=0)
        if side is theirs:
            side.alloc.full_attn_allocator.free_segment(bundle.out_full_loc, start_pos=0)
            assert side.counts()["full"] == before + 2 * PAGE
        else:
            with pytest.raises(OwnershipError, match="is free: it must be held outside"):
                side.alloc.full_attn_allocator.free_segment(bundle.out_full_loc, start_pos=0)
            assert side.counts()["full"] == before + PAGE


def test_an_unmapped_page_gives_no_swa_page() -> None:
    theirs, ours = both(full_pages=64)
    for side in (theirs, ours):
        (other, req) = side.open(2)
        side.extend([other], [256])
        bundle = side.extend([req], [256])
        side.alloc.free_swa_segment(bundle.out_full_loc[:128], start_pos=0)
        side.alloc.free_segment(bundle.out_full_loc, start_pos=0)
        free = side.alloc.swa_attn_allocator.get_all_free_pages()
        assert (0 in free.tolist()) == (side is theirs)


def test_resize_keeps_counts_and_pages_in_step() -> None:
    config = types.SimpleNamespace(
        full_max_total_num_tokens=256 * PAGE, swa_max_total_num_tokens=256 * PAGE, c128_max_total_num_tokens=8 * UNIT
    )
    theirs, ours = both(full_pages=256)
    theirs.alloc.resize(types.SimpleNamespace(**{**vars(config), "c128_max_total_num_tokens": 64 * UNIT}))
    assert theirs.alloc.c128_attn_allocator.num_pages == 64
    assert len(theirs.alloc.c128_page_refcount) == 17
    ours.alloc.resize(config)
    assert ours.alloc.c128_attn_allocator.num_pages == 8
    assert len(ours.alloc.c128_page_refcount) == 9
    for page in two_pages(ours):
        assert ours.alloc.c128_page_refcount[page] == 1
    config.c128_max_total_num_tokens = 64 * UNIT
    with pytest.raises(InputError, match=r"resize: c128 = 1024 slots; 1 to 256, what the pool was built with"):
        ours.alloc.resize(config)


def test_a_row_is_released_by_its_content() -> None:
    theirs, ours = both()
    for side in (theirs, ours):
        (req,) = side.open(1)
        side.extend([req], [GROUP])
        row = req.kv.req_pool_idx
        req.kv.kv_committed_len = req.kv.kv_allocated_len = 0
        side.table.free(req)
        held = bool(side.table.req_to_c128_sidecar[row].any())
        assert held == (side is theirs)
        assert side.counts()["c128"] == (15 if side is theirs else 16) * UNIT


def test_a_failed_decode_takes_nothing() -> None:
    theirs, ours = both(full_pages=64, swa_pages=20)
    for side in (theirs, ours):
        (req,) = side.open(1)
        side.extend([req], [20 * PAGE])
        before = side.counts()
        assert side.decode([req]) is None
        assert (side.counts() == before) == (side is ours)


def test_room_in_held_pages_is_capacity() -> None:
    theirs, ours = both(full_pages=64, c128_pages=1)
    for side in (theirs, ours):
        (req,) = side.open(1)
        side.extend([req], [128])
    assert theirs.alloc.available_size() == 0
    assert ours.alloc.available_size() == 15 * 128


def test_short_requests_are_admitted_by_pages() -> None:
    for ours in (False, True):
        server = Server(ours, full_pages=128, rows=12)
        admitted = 0
        while admitted < 12:
            budget = server.alloc.create_prefill_budget(server.cache)
            fits, _ = budget.check_prefill(
                extend_input_len=200,
                total_tokens=200,
                max_new_tokens=8,
                input_tokens=200,
                swa_host_hit_length=0,
                chunk_limit=None,
            )
            if not fits:
                break
            req = server.request(str(admitted), [admitted] * 200)
            if not ours and admitted == 8:
                with pytest.raises(RuntimeError, match="Prefill out of memory"):
                    server.prefill(req)
                break
            server.prefill(req)
            admitted += 1
        assert admitted == 8
        assert fits == (not ours)


def test_eviction_is_not_tried_where_it_cannot_help() -> None:
    for ours in (False, True):
        server = Server(ours, full_pages=192, c128_pages=4, rows=8)
        cached = server.request("cached", [1] * GROUP)
        server.prefill(cached)
        server.end(cached)
        for name in range(3):
            server.prefill(server.request(str(name), [5 + name] * 300))
        server.alloc.retain_c128_pages(server.table.req_to_c128_sidecar[1:9, 0][:0])
        before = server.tree()["full evictable"]
        assert not server.alloc.ensure_c128_capacity(server.cache, 3)
        assert (server.tree()["full evictable"] == before) == ours


def test_a_hole_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    conn = types.ModuleType("sglang.srt.disaggregation.ascend.conn")  # its imports need a transfer engine
    conn.AscendStateType = types.SimpleNamespace(DSV4_C128="C128", DSV4_C4_STATE="C4")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation.ascend", types.ModuleType("ascend"))
    monkeypatch.setitem(sys.modules, conn.__name__, conn)
    theirs, ours = both()
    for side in (theirs, ours):
        (req,) = side.open(1)
        side.extend([req], [3 * GROUP])
        row = req.kv.req_pool_idx
        side.table.req_to_c128_sidecar[row, 1] = 0
        payloads = side.parts.hooks["dsv4_state_payloads"](side.table, row, 3 * GROUP, PAGE)
        pages = payloads["C128"]
        if side is theirs:
            assert len(pages()) == 2
        else:
            with pytest.raises(OwnershipError, match=rf"row {row}: C128 column 1 is empty"):
                pages()


def test_an_allocation_without_its_table_write_is_noticed() -> None:
    theirs, ours = both()
    for side in (theirs, ours):
        side.parts.hooks["maybe_write_dsv4_extend"] = lambda *_: None
        (req,) = side.open(1)
        side.extend([req], [GROUP])
        if side is theirs:
            side.extend([req], [GROUP + 128])
            assert not side.table.req_to_c128_sidecar.any()
        else:
            with pytest.raises(OwnershipError, match="written to no request row"):
                side.extend([req], [GROUP + 128])
            assert "C128 page 1: allocated, but written to no request row" in side.alloc.verify_byte_accounting()


def test_the_leak_check_covers_c128() -> None:
    theirs, ours = both()
    for side in (theirs, ours):
        x, _ = two_pages(side)
        side.alloc.retain_c128_pages(torch.tensor([x]))
    assert theirs.alloc.verify_byte_accounting() == []
    assert ours.alloc.verify_byte_accounting() == [f"C128 page {x}: count 2, 1 holders name it"]


def test_a_small_swa_pool_is_refused() -> None:
    Side(False, full_pages=64, swa_pages=12)
    with pytest.raises(ConfigError, match=r"holds 1536 tokens and one C128 group takes 2048"):
        Side(True, full_pages=64, swa_pages=12)


def test_frees_of_a_set_do_not_expand_to_tokens() -> None:
    sizes: dict[bool, int] = {}
    theirs, ours = both(full_pages=64)
    for side in (theirs, ours):
        (req,) = side.open(1)
        bundle = side.extend([req], [2048])
        most = 0

        class Watch(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal most
                out = function(*args, **(kwargs or {}))
                if isinstance(out, torch.Tensor):
                    most = max(most, out.numel())
                return out

        with Watch():
            side.alloc.free(bundle.out_full_loc)
        sizes[side.ours] = most
    assert sizes[False] >= 2048 * PAGE
    assert sizes[True] == ours.alloc.full_to_swa_index_mapping.numel() - 1


def test_the_clear_of_all_layers_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_npu import ops

    ours = Side(True, ratios=(0, 4, 128, 128, 128))
    calls: list[Any] = []
    real = ops.clear_c128_draft_states_
    monkeypatch.setattr(ops, "clear_c128_draft_states_", lambda *args: (calls.append(args), real(*args, write_pad=9)))
    state = ours.pool.slabs.c128_state.data
    state.fill_(1.0)
    ours.pool.clear_unaccepted_c128_draft_states(
        torch.tensor([2]), torch.tensor([126]), torch.tensor([1], dtype=torch.int32), 4
    )
    assert len(calls) == 1
    for pool in ours.pool.compress_state_pools[2:]:
        rows = pool.kv_score_buffer.kv_score[2 * 128 : 3 * 128]
        cleared = [(126 + o) % 128 for o in (1, 2, 3)]
        assert (rows[cleared, :32] == 0).all()
        assert (rows[cleared, 32:] == -np.inf).all()
        assert (rows[[126, 2, 3]] == 1).all()


def test_every_line_of_the_list_has_its_test() -> None:
    named = set(re.findall(r"`(test_\w+)`", DOCUMENT.read_text()))
    here = {name for name in globals() if name.startswith("test_")} - {"test_every_line_of_the_list_has_its_test"}
    assert named == here


def test_decode_writes_need_no_device_read() -> None:
    """A decode batch whose device row numbers cannot be read: ours takes the host's copy of them."""

    class Unreadable:
        def cpu(self) -> None:
            raise AssertionError("read")

    for ours in (False, True):
        side = Side(ours)
        (req,) = side.open(1)
        side.extend([req], [127])
        row = torch.tensor([req.kv.req_pool_idx])
        new = torch.tensor([128])
        last = side.table.req_to_token[row, new - 2]
        bundle = side.alloc.alloc_decode(new, new, last, req_pool_indices=row, req_to_token_pool=side.table)
        batch = types.SimpleNamespace(
            out_cache_loc_dsv4=bundle,
            req_to_token_pool=side.table,
            req_pool_indices=Unreadable(),
            req_pool_indices_cpu=row,
        )
        write = side.parts.hooks["maybe_write_dsv4_decode"]
        if ours:
            write(batch, new, 1)
            assert side.table.req_to_c128_sidecar[req.kv.req_pool_idx, 0] > 0
        else:
            with pytest.raises(AssertionError, match="read"):
                write(batch, new, 1)
