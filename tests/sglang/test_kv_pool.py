"""Our slabs behind SGLang's pool: shapes, clears, copies and buffer lists, beside SGLang's own pool."""

from __future__ import annotations

import pytest
import torch

from dsv4_npu.errors import ConfigError, InputError, OwnershipError
from tests.sglang.sides import GROUP, PAGE, Side, prepare

pytestmark = pytest.mark.filterwarnings("ignore")
RATIOS = (0, 4, 128, 4, 128)


@pytest.fixture(autouse=True, scope="module")
def _prepared() -> None:
    prepare()


def states(side: Side, ratio: int) -> list[torch.Tensor]:
    """State tensors of the layers of a ratio, indexer states last."""
    pools = [pool for pool in side.pool.compress_state_pools if pool is not None and pool.ratio == ratio]
    pools += [pool for pool in side.pool.indexer_compress_state_pools if pool is not None and pool.ratio == ratio]
    return [pool.kv_score_buffer.kv_score for pool in pools]


def test_shapes_and_types_are_those_of_sglang() -> None:
    theirs, ours = Side(False, ratios=RATIOS).pool, Side(True, ratios=RATIOS).pool
    for name in ("swa_kv_pool", "c4_kv_pool", "c128_kv_pool"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert [(t.shape, t.dtype) for t in mine.kv_buffer] == [(t.shape, t.dtype) for t in other.kv_buffer]
        for attribute in ("kernel_page_size", "bytes_per_page_padded", "kv_cache_total_dim", "page_size", "size"):
            assert getattr(mine, attribute) == getattr(other, attribute), (name, attribute)
    for name in ("index_k_buffer", "index_scale_buffer"):
        mine, other = (getattr(pool.c4_indexer_kv_pool, name) for pool in (ours, theirs))
        assert [(t.shape, t.dtype) for t in mine] == [(t.shape, t.dtype) for t in other]
    for layer, ratio in enumerate(RATIOS):
        assert ours.layer_mapping[layer][:2] == theirs.layer_mapping[layer][:2]
        for indexer in (False, True):
            if ratio == 4 or (ratio and not indexer):
                mine, other = ours.get_state_cache(layer, indexer), theirs.get_state_cache(layer, indexer)
                assert (mine.shape[1:], mine.dtype) == (other.shape[1:], other.dtype)
    missing = [name for name in dir(theirs) if not name.startswith("__") and not hasattr(ours, name)]
    assert missing == []


def test_buffers_are_views_of_one_slab_per_family() -> None:
    pool = Side(True, ratios=RATIOS).pool
    pool.slabs.swa.data[3].fill_(2.0)
    assert (pool.get_swa_buffer(3) == 2).all()
    assert (pool.get_swa_buffer(2) == 0).all()
    pool.get_state_cache(4, False)[1].fill_(5.0)
    assert (pool.slabs.c128_state.data[1, 128:256] == 5).all()
    assert pool.mem_usage == pool.slabs.usage_bytes() / 2**30


def test_rows_written_at_slots_come_back() -> None:
    pool = Side(True, ratios=RATIOS).pool
    slots = torch.tensor([128, 200, 4095])
    rows = torch.randn(3, 32).bfloat16()
    pool.set_swa_buffer(1, slots, rows)
    assert torch.equal(pool.get_swa_buffer(1, slots).view(3, 32), rows)
    pool.set_compress_buffer(3, slots // 4, rows, None, False)
    assert torch.equal(pool.get_compress_buffer(3, loc=slots // 4).view(3, 32), rows)
    pool.set_compress_buffer(4, slots // 16, rows, None, False)
    assert torch.equal(pool.get_compress_buffer(4, loc=slots // 16).view(3, 32), rows)
    keys = torch.randn(3, 128)
    pool.set_compress_buffer(1, slots // 4, keys, None, True)
    scale = pool.get_compress_dequant_scale_buffer(1, True).flatten(0, 1)[slots // 4].view(3, 1).float()
    read = pool.get_compress_buffer(1, True, slots // 4).view(3, 128).float() * scale
    assert (read - keys).abs().max() < keys.abs().max() / 100


def test_the_clears_leave_what_sglangs_leave() -> None:
    theirs, ours = Side(False, ratios=RATIOS), Side(True, ratios=RATIOS)
    for side in (theirs, ours):
        for state in states(side, 4) + states(side, 128):
            state.copy_(torch.arange(state.numel(), dtype=torch.float32).view_as(state) % 1000)
        side.pool.clear_request_scoped_state(3)
    for mine, other in zip(states(ours, 128), states(theirs, 128), strict=True):
        assert torch.equal(mine[: 9 * 128], other[: 9 * 128])
        assert (mine[3 * 128 : 4 * 128, mine.shape[1] // 2 :] == -torch.inf).all()
    for mine, other in zip(states(ours, 4), states(theirs, 4), strict=True):
        assert torch.equal(mine[:-8], other[: len(mine) - 8])


def test_buffer_lists_and_transfer_indices_agree() -> None:
    theirs, ours = Side(False, ratios=RATIOS), Side(True, ratios=RATIOS)
    for name in ("get_contiguous_buf_infos", "get_c128_kv_buf_infos", "get_c4_state_buf_infos", "get_state_buf_infos"):
        mine, other = getattr(ours.pool, name)(), getattr(theirs.pool, name)()
        assert mine[2] == other[2], name
        assert len(mine[0]) == len(other[0]), name
    pointers = [t.data_ptr() for t in states(ours, 128)]
    assert ours.pool.get_request_state_buf_infos()[0] == pointers
    assert ours.pool.get_request_state_buf_infos()[2] == theirs.pool.get_request_state_buf_infos()[2]
    for length in (0, 1, 127, 128, 129, 300, 2048):
        mine, other = (side.pool.request_state_transfer_indices(3, length) for side in (ours, theirs))
        assert mine.tolist() == other.tolist()
        assert mine.dtype == other.dtype


def test_a_request_goes_to_the_host_and_back_into_other_pages() -> None:
    side = Side(True, ratios=RATIOS, full_pages=128)
    first, second = side.open(2)
    length = GROUP + 301
    side.extend([first], [length])
    side.extend([second], [1000])
    for slab in side.pool.slabs.families().values():
        for tensor in slab.tensors():
            if tensor.dtype == torch.int8:
                tensor.random_(-100, 100)
            else:
                tensor.copy_(torch.randn(tensor.shape))

    def content(req: object) -> dict[str, tuple[torch.Tensor, ...]]:
        row = req.kv.req_pool_idx
        slots = side.table.req_to_token[row, :length]
        return side.alloc.get_cpu_copy(slots, req_pool_index=row)

    copy = content(first)
    before = {name: tuple(t.clone() for t in tensors) for name, tensors in copy.items()}
    side.finish(first)
    side.finish(second)
    (third,) = side.open(1)
    (other,) = side.open(1)
    side.extend([other], [700])
    side.extend([third], [length])
    row = third.kv.req_pool_idx
    side.alloc.load_cpu_copy(copy, side.table.req_to_token[row, :length], req_pool_index=row)
    after = content(third)
    for name, tensors in before.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, after[name], strict=True)), name
        assert all(t.numel() for t in tensors), name


def test_a_copy_holds_what_sglangs_own_addressing_finds() -> None:
    side = Side(True, ratios=RATIOS, full_pages=128)
    other, req = side.open(2)
    side.extend([other], [GROUP + 400])
    length = GROUP + 301
    side.extend([req], [length])
    for slab in side.pool.slabs.families().values():
        for tensor in slab.tensors():
            tensor.copy_(torch.randint(-90, 90, tensor.shape))
    row = req.kv.req_pool_idx
    slots = side.table.req_to_token[row, :length].long()
    swa = side.alloc.translate_loc_from_full_to_swa(slots)
    pages = side.table.req_to_c128_sidecar[row].long()
    entries = torch.arange(length // 128)
    c128 = pages[entries // 16] * 16 + entries % 16
    copy = side.alloc.get_cpu_copy(slots, req_pool_index=row)
    pool, seen = side.pool, {}
    seen["swa"] = [pool.get_swa_buffer(layer, swa[-127:]) for layer in range(5)]
    seen["c4"] = [pool.get_compress_buffer(layer, loc=slots[3::4] // 4) for layer in (1, 3)]
    seen["c4 indexer"] = [pool.get_compress_buffer(layer, True, slots[3::4] // 4) for layer in (1, 3)]
    seen["c128"] = [pool.get_compress_buffer(layer, loc=c128) for layer in (2, 4)]
    live4, live128 = torch.arange(length // 4 * 4 - 4, length), torch.arange(length // 128 * 128, length)
    for name, layers, pools in (
        ("c4 state", (1, 3), pool.compress_state_pools),
        ("c4 indexer state", (1, 3), pool.indexer_compress_state_pools),
        ("c128 state", (2, 4), pool.compress_state_pools),
    ):
        where = (
            pools[2].translate_from_req_position_to_state_loc(torch.full_like(live128, row), live128)
            if name == "c128 state"
            else pools[1].translate_from_swa_loc_to_state_loc(swa[live4])
        )
        seen[name] = [pools[layer].get_state_by_state_loc(where).kv_score for layer in layers]
    assert sorted(seen) == sorted(copy)
    for name, layers in seen.items():
        found = copy[name][0].view(layers[0].dtype)
        for mine, theirs in zip(found, layers, strict=True):
            assert torch.equal(mine, theirs.reshape(mine.shape)), name


def test_a_copy_needs_the_row_and_the_window() -> None:
    side = Side(True, full_pages=64)
    (req,) = side.open(1)
    side.extend([req], [600])
    slots = side.table.req_to_token[req.kv.req_pool_idx, :600]
    with pytest.raises(InputError, match="req_pool_index = None"):
        side.alloc.get_cpu_copy(slots)
    side.alloc.free_swa_segment(slots[512:], start_pos=512)
    with pytest.raises(OwnershipError, match="have no SWA page"):
        side.alloc.get_cpu_copy(slots, req_pool_index=req.kv.req_pool_idx)


def test_what_has_no_counterpart_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv cache dtype = torch\.float16"):
        Side(True, dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"compress_ratios holds \[2\]"):
        Side(True, ratios=(0, 2, 4))


def test_a_float64_pool_holds_float64_rows() -> None:
    pool = Side(True, dtype=torch.float64).pool
    assert pool.get_swa_buffer(0).dtype == torch.float64
    rows = torch.randn(1, 32, dtype=torch.float64)
    pool.set_swa_buffer(0, torch.tensor([PAGE]), rows)
    assert torch.equal(pool.get_swa_buffer(0, torch.tensor([PAGE])).view(1, 32), rows)


def test_a_draft_pool_has_swa_rows_alone() -> None:
    side = Side(True, ratios=(0, 0, 0))
    assert side.pool.c4_kv_pool is None
    assert len(side.pool.swa_kv_pool.kv_buffer) == 3
    assert side.pool.get_contiguous_buf_infos() == ([], [], [])
    side.pool.clear_request_scoped_state(1)
    side.pool.clear_unaccepted_c128_draft_states(torch.tensor([1]), torch.tensor([5]), torch.tensor([1]), 4)
