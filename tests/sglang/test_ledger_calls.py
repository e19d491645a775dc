"""Calls of SGLang that end badly or seldom come: what they leave behind in our allocator and request table."""

from __future__ import annotations

import pytest
import torch

from dsv4_npu.errors import OwnershipError
from dsv4_npu.sglang.shadow_audit import ShadowAudit
from tests.sglang.sides import GROUP, Side, prepare

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def _prepared() -> None:
    prepare()


def test_a_refused_free_leaves_the_mapping() -> None:
    side = Side(True, full_pages=64)
    (req,) = side.open(1)
    slots = side.extend([req], [128]).out_full_loc
    mapping = side.alloc.full_to_swa_index_mapping.clone()
    with pytest.raises(OwnershipError):
        side.alloc.free_segment(torch.cat((slots, slots)), start_pos=0)
    assert torch.equal(side.alloc.full_to_swa_index_mapping, mapping)
    assert side.alloc.verify_byte_accounting() == []


def test_every_call_counts_for_the_shadow_audit() -> None:
    side = Side(True, full_pages=64)
    side.alloc._shadow = ShadowAudit(side.alloc._census, 1)
    (req,) = side.open(1)
    side.extend([req], [128])
    # With speculation SGLang extends and never decodes.
    assert side.alloc._shadow.audits == 1
    side.decode([req])
    assert side.alloc._shadow.audits == 2
    assert side.alloc._shadow.violations == 0


def test_rows_that_leave_without_their_request_are_emptied() -> None:
    side = Side(True, full_pages=64)
    (req,) = side.open(1)
    side.extend([req], [GROUP])
    row = req.kv.req_pool_idx
    (page,) = side.table.req_to_c128_sidecar[row, :1].tolist()
    side.table.free_rows([row])
    assert not side.table.req_to_c128_sidecar[row].any()
    assert side.alloc.c128_page_refcount[page] == 0
