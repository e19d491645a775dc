"""The A5 layout: packed rows, C4 states owned by requests, beside SGLang's pool of the same kind of NPU."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from sglang.srt.hardware_backend.npu import utils
from sglang.srt.hardware_backend.npu.dsv4 import dsv4_memory_pool

from dsv4_npu.alloc.rollback import RingRule
from dsv4_npu.sglang import layout
from tests.sglang.sides import Side, prepare

pytestmark = pytest.mark.filterwarnings("ignore")
RATIOS = (0, 4, 128)


@pytest.fixture(autouse=True)
def _a5(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare()
    for module in (layout, dsv4_memory_pool, utils):
        monkeypatch.setattr(module, "is_npu_arch35", lambda: True)


def test_shapes_types_and_buffer_lists_are_those_of_sglang() -> None:
    theirs, ours = Side(False, ratios=RATIOS).pool, Side(True, ratios=RATIOS).pool
    for name in ("swa_kv_pool", "c4_kv_pool", "c128_kv_pool"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert [(t.shape, t.dtype) for t in mine.kv_buffer] == [(t.shape, t.dtype) for t in other.kv_buffer]
        assert mine.kv_buffer[0].dtype == torch.float8_e4m3fn
        assert mine.bytes_per_page_padded == other.bytes_per_page_padded
    for name in ("index_k_buffer", "index_scale_buffer"):
        mine, other = (getattr(pool.c4_indexer_kv_pool, name) for pool in (ours, theirs))
        assert [(t.shape, t.dtype) for t in mine] == [(t.shape, t.dtype) for t in other]
    for name in ("get_contiguous_buf_infos", "get_c128_kv_buf_infos", "get_c4_state_buf_infos", "get_state_buf_infos"):
        mine, other = getattr(ours, name)(), getattr(theirs, name)()
        assert (len(mine[0]), mine[2]) == (len(other[0]), other[2]), name


def test_a_row_that_changes_hands_has_empty_c4_banks_too() -> None:
    side = Side(True, ratios=RATIOS)
    slabs = side.pool.slabs
    for slab in (slabs.c4_state, slabs.index_state, slabs.c128_state):
        slab.data.fill_(3.0)
    side.pool.clear_request_scoped_state(4)
    for slab in (slabs.c4_state, slabs.index_state, slabs.c128_state):
        bank = slab.data[:, 4 * slab.ring : 5 * slab.ring]
        assert (bank[..., : slab.half] == 0).all()
        assert (bank[..., slab.half :] == -torch.inf).all()
        assert (slab.data[:, 3 * slab.ring : 4 * slab.ring] == 3).all()
        assert (slab.data[:, 5 * slab.ring : 6 * slab.ring] == 3).all()


def test_c4_rows_of_a_transfer_pair_up_between_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 31: C4, length 9, row 3: ring 8 -> 28..31 and 24; ring 16 -> 52..56."""
    conn = types.ModuleType("sglang.srt.disaggregation.ascend.conn")
    conn.AscendStateType = types.SimpleNamespace(DSV4_C128="C128", DSV4_C4_STATE="C4")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation.ascend", types.ModuleType("ascend"))
    monkeypatch.setitem(sys.modules, conn.__name__, conn)
    theirs, ours = Side(False, ratios=RATIOS), Side(True, ratios=RATIOS)
    for ring, rows in ((8, [28, 29, 30, 31, 24]), (16, [52, 53, 54, 55, 56])):
        for side in (theirs, ours):
            table = side.table
            monkeypatch.setattr(table, "get_dsv4_c4_state_ring_size", lambda r=ring: r)
            payloads = side.parts.hooks["dsv4_state_payloads"](table, 3, 9, 128)
            assert payloads["C4"]().tolist() == rows
    for length in range(40):
        found = [s.parts.hooks["dsv4_state_payloads"](s.table, 3, length, 128)["C4"]().tolist() for s in (theirs, ours)]
        assert found[0] == found[1], length


def test_rows_written_come_back_within_fp8() -> None:
    pool = Side(True, ratios=RATIOS).pool
    rows = torch.randn(2, 32)
    slots = torch.tensor([128, 300])
    pool.set_swa_buffer(0, slots, rows)
    read = pool.slabs.swa.read(0, slots, torch.float32)
    assert ((read - rows).abs() <= rows.abs() / 8 + 1e-3).all()


def test_the_ring_rule_is_the_live_tail() -> None:
    assert RingRule(4, 8, "request").live(9) == (4, 9)
