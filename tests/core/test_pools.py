"""Slabs: shapes, bytes, empty rows, and that nothing but the dummies absorbs what belongs to nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu import addressing
from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.budget import PoolSizes
from dsv4_npu.compressor import CompressorWeights, compress_batch
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec
from dsv4_npu.emulation.forward import Bounds, Tables, plan_batch, plan_batch_on_device
from dsv4_npu.errors import ConfigError, InputError
from dsv4_npu.pools import DSV4Pools, RowSlab, StateSlab, indexer_format, kv_format

torch.set_num_threads(1)
SIZES = PoolSizes(full_pages=10, swa_pages=6, c128_pages=5, request_rows=3)
CHAIN, NONE = SpeculationSpec("chain", 3), SpeculationSpec()


def config(model: str = "v4_flash", platform: str = "a3", spec: SpeculationSpec = CHAIN, **rest: Any) -> CacheConfig:
    return CacheConfig(ModelSpec.load(model), PlatformSpec.load(platform), spec, **{"request_rows": 3, **rest})


def meta_pools(setting: CacheConfig, sizes: PoolSizes = SIZES, **rest: Any) -> DSV4Pools:
    return DSV4Pools(setting, sizes, device="meta", **rest)


def reachable_tensors(thing: object) -> Iterator[torch.Tensor]:
    """Every tensor that hangs on the pools, found without asking them."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (DSV4Pools, RowSlab, StateSlab)):
        for value in vars(thing).values():
            yield from reachable_tensors(value)


# -- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_stages", [False, True])
def test_shapes_on_a3(draft_stages: bool) -> None:
    pools = meta_pools(config("v4_flash_dspark"), draft_stages=draft_stages)
    assert pools.swa.data.shape == (46 if draft_stages else 43, 7, 128, 1, 512)
    assert pools.c4.data.shape == (21, 11, 32, 1, 512)
    assert pools.index.data.shape == (21, 11, 32, 1, 128)
    assert pools.index.scale is not None
    assert pools.index.scale.shape == (21, 11, 32, 1, 1)
    assert pools.c128.data.shape == (20, 6, 16, 1, 512)
    assert (pools.swa.data.dtype, pools.index.data.dtype, pools.index.scale.dtype) == (
        torch.bfloat16,
        torch.int8,
        torch.float16,
    )
    # Banks of 6 SWA pages and page 0, then a bank's worth with the dummy row at the end.
    assert pools.c4_state.data.shape == (21, 8 * 16, 2048)
    assert pools.index_state.data.shape == (21, 8 * 16, 512)
    assert pools.c128_state.data.shape == (20, 5 * 256, 1024)
    assert pools.c4_state.data.dtype == torch.float32


def test_shapes_on_a5() -> None:
    pools = meta_pools(config("v4_pro", "a5", c128_page_size=32))
    assert pools.swa.data.shape == (61, 7, 128, 1, 640)
    assert pools.c4.data.shape == (30, 11, 32, 1, 640)
    assert pools.c128.data.shape == (31, 6, 32, 1, 640)
    assert pools.swa.data.dtype == pools.index.data.dtype == torch.float8_e4m3fn
    assert pools.index.scale is not None
    assert pools.index.scale.dtype == torch.float32
    # C4 states are owned by requests here: 3 rows and row 0.
    assert pools.c4_state.data.shape == (30, 5 * 16, 2048)
    assert not pools.c4_state_by_page


def test_pages_of_256_and_small_c128_pages() -> None:
    setting = config("tiny", page_size=256, c128_page_size=2, emulated_kernels=True, kv_row="fp64", indexer_row="fp32")
    pools = DSV4Pools(setting, SIZES, state_dtype=torch.float64)
    assert pools.swa.data.shape == (5, 7, 256, 1, 32)
    assert pools.c4.data.shape == (2, 11, 64, 1, 32)
    assert pools.c128.data.shape == (1, 6, 2, 1, 32)
    assert pools.c4_state.data.dtype == torch.float64
    assert pools.index.scale is None


@pytest.mark.parametrize("model", ["v4_flash", "v4_pro", "tiny"])
def test_layer_maps(model: str) -> None:
    setting = config(model)
    pools = meta_pools(setting)
    ratios = setting.model.compress_ratios[: setting.model.num_layers]
    for ratio, index, slab in ((4, pools.c4_index, pools.c4), (128, pools.c128_index, pools.c128)):
        assert list(index) == [layer for layer, r in enumerate(ratios) if r == ratio]
        assert list(index.values()) == list(range(slab.layers))


def test_every_slab_is_one_contiguous_tensor_with_a_leading_layer_axis() -> None:
    pools = meta_pools(config("v4_flash", "a3"), draft_stages=True)
    for slab in pools.families().values():
        for tensor in slab.tensors():
            assert tensor.is_contiguous()
            assert tensor.shape[0] == slab.layers


def test_a_model_without_compression_has_empty_slabs() -> None:
    data = {**ModelSpec.load("tiny").raw, "num_hidden_layers": 2, "compress_ratios": [0, 0]}
    setting = CacheConfig(ModelSpec.from_dict(data), PlatformSpec.load("a3"), CHAIN, request_rows=3)
    pools = DSV4Pools(setting, SIZES)
    assert pools.c4.nbytes == pools.index.nbytes == pools.c128.nbytes == pools.c4_state.nbytes == 0
    assert pools.usage_bytes() == pools.swa.nbytes


def test_fewer_banks_than_request_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"request_rows = 3 in the pool sizes; at least 4"):
        meta_pools(config(request_rows=4))
    assert meta_pools(config(request_rows=2)).c128_state.banks == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32], ids=str)
def test_states_are_float32_or_float64(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"state_dtype = {dtype}"):
        meta_pools(config(), state_dtype=dtype)


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["a2", "a3", "a5", "cpu"])
@pytest.mark.parametrize("model", ["v4_flash", "v4_pro_dspark", "tiny"])
def test_usage_is_the_sum_of_all_tensors(model: str, platform: str) -> None:
    pools = meta_pools(config(model, platform), draft_stages=True)
    held = sum(tensor.untyped_storage().nbytes() for tensor in reachable_tensors(pools))
    assert pools.usage_bytes() == held == sum(slab.nbytes for slab in pools.families().values())


def marginal(setting: CacheConfig, family: str, draft_stages: bool = False) -> dict[str, int]:
    """Bytes that one page or row more of ``family`` adds to each slab."""
    more = {f: getattr(SIZES, f) + (f == family) for f in SIZES.__dataclass_fields__}
    before, after = (meta_pools(setting, s, draft_stages=draft_stages).families() for s in (SIZES, PoolSizes(**more)))
    return {name: after[name].nbytes - before[name].nbytes for name in before}


def compressed_bytes_per_token(setting: CacheConfig) -> float:
    full, c128 = marginal(setting, "full_pages"), marginal(setting, "c128_pages")
    return (full["c4"] + full["c4 indexer"]) / setting.page + c128["c128"] / (128 * setting.c128_page_size)


MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("model", "platform", "per_token", "swa_slot", "gib"),
    [
        ("v4_flash", "a2", 6218.5, 44032, 6.07),
        ("v4_flash", "a3", 6218.5, 44032, 6.07),
        ("v4_flash", "a5", 4153, 27520, 4.06),
        ("v4_pro", "a2", 8903, 62464, 8.69),
        ("v4_pro", "a3", 8903, 62464, 8.69),
        ("v4_pro", "a5", 5945, 39040, 5.81),
    ],
)
@pytest.mark.parametrize("c128_page", [16, 64])
def test_bytes_per_token(
    model: str, platform: str, per_token: float, swa_slot: int, gib: float, c128_page: int
) -> None:
    setting = config(model, platform, c128_page_size=c128_page)
    assert compressed_bytes_per_token(setting) == per_token
    assert round(per_token * 2**20 / GIB, 2) == gib
    assert marginal(setting, "swa_pages")["swa"] == swa_slot * setting.page
    row = swa_slot // setting.model.num_layers
    for stages, name in ((1, model), (3, f"{model}_dspark")):
        with_drafts = marginal(config(name, platform), "swa_pages", draft_stages=True)["swa"]
        assert with_drafts == (swa_slot + stages * row) * setting.page


@pytest.mark.parametrize(
    ("model", "c4_mib", "c128_mib"),
    [("v4_flash", (1.64, 3.28), (10, 20)), ("v4_pro", (2.34, 4.69), (15.5, 31))],
)
@pytest.mark.parametrize(("spec", "at"), [(NONE, 0), (CHAIN, 1)])
def test_bytes_of_states(
    model: str, c4_mib: tuple[float, float], c128_mib: tuple[float, float], spec: SpeculationSpec, at: int
) -> None:
    page_owned, request_owned = config(model, "a3", spec), config(model, "a5", spec)
    by_page = marginal(page_owned, "swa_pages")
    assert round((by_page["c4 state"] + by_page["c4 indexer state"]) / MIB, 2) == c4_mib[at]
    assert by_page["c128 state"] == 0
    by_row = marginal(page_owned, "request_rows")
    assert by_row["c128 state"] / MIB == c128_mib[at]
    assert by_row["c4 state"] == by_row["c4 indexer state"] == 0
    # A5 owns the same C4 rows by request, so pages add none.
    on_a5 = marginal(request_owned, "request_rows")
    assert on_a5["c4 state"] + on_a5["c4 indexer state"] == by_page["c4 state"] + by_page["c4 indexer state"]
    assert on_a5["c128 state"] / MIB == c128_mib[at]
    assert marginal(request_owned, "swa_pages")["c4 state"] == 0


def test_pools_of_a_million_tokens_count_without_memory() -> None:
    setting = config("v4_pro", "a5", context_len=2**20, request_rows=8)
    sizes = PoolSizes(full_pages=2**13, swa_pages=820, c128_pages=2**9 + 8, request_rows=8)
    pools = meta_pools(setting, sizes)
    kv = pools.c4.nbytes + pools.index.nbytes + pools.c128.nbytes
    exact = 5945 * 2**20 / GIB
    assert exact < kv / GIB < exact + 0.01, "a dummy page of each family and the slack come on top"


def test_a_forgotten_family_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DSV4Pools.families
    monkeypatch.setattr(DSV4Pools, "families", lambda self: {k: v for k, v in real(self).items() if k != "c4 indexer"})
    with pytest.raises(AssertionError):
        test_usage_is_the_sum_of_all_tensors("v4_flash", "a3")


def test_scales_left_out_of_the_count_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowSlab, "tensors", lambda self: [self.data])
    with pytest.raises(AssertionError):
        test_bytes_per_token("v4_flash", "a3", 6218.5, 44032, 6.07, 16)


# -- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_states_start_as_empty_rows_with_the_dummy_last(platform: str) -> None:
    pools = DSV4Pools(config("tiny", platform), SIZES)
    for slab in (pools.c4_state, pools.index_state, pools.c128_state):
        assert slab.dummy == slab.data.shape[1] - 1
        assert slab.dummy >= (slab.banks + 1) * slab.ring, "no bank owns the dummy row"
        kv, score = slab.data.chunk(2, dim=-1)
        assert slab.half == kv.shape[-1]
        assert bool((kv == 0).all())
        assert bool((score == float("-inf")).all())


def test_c4_rows_follow_the_owner() -> None:
    rows, at, swa = torch.tensor([[2]]), torch.tensor([[0, 17, 300]]), torch.tensor([[128, 145, -1]])
    by_page = meta_pools(config("tiny", "a3")).c4_state_rows(rows, at, swa, 16, 999)
    by_request = meta_pools(config("tiny", "a5")).c4_state_rows(rows, at, swa, 16, 999)
    assert by_page.tolist() == [[16, 17, 999]]
    assert by_request.tolist() == [[32, 33, 44]]


# -- rows -------------------------------------------------------------------------------------------------------------

ROW_FORMATS = [kv_format("bf16", 448, 64), kv_format("fp8_packed", 448, 64), kv_format("fp64", 16, 16)]
ROW_FORMATS += [indexer_format("int8_fp16", 128), indexer_format("fp8_fp32", 128)]


@settings(max_examples=15, deadline=None)
@given(writes=st.lists(st.lists(st.integers(-2, 31), max_size=6, unique_by=lambda s: max(s, 0)), max_size=4))
@pytest.mark.parametrize("row", ROW_FORMATS, ids=lambda r: r.name)
def test_rows_against_a_dictionary(row: Any, writes: list[list[int]]) -> None:
    slab = RowSlab(3, 4, 8, row, "cpu")
    before = [t.clone() for t in slab.tensors()]
    gen = torch.Generator().manual_seed(1)
    held: dict[int, torch.Tensor] = {}
    for slots in writes:
        rows = torch.randn(len(slots), row.dim, generator=gen)
        slab.write(1, torch.tensor(slots, dtype=torch.int64), rows)
        held |= {max(slot, 0): r for slot, r in zip(slots, rows, strict=True)}
    zero = torch.zeros(row.dim)
    want = torch.stack([held.get(slot, zero) for slot in [*range(32), 0]])
    back = slab.read(1, torch.tensor([*range(32), -1]), torch.float64)
    assert bool(((back - want).abs() <= row.bound(want)).all())
    for tensor, old in zip(slab.tensors(), before, strict=True):
        raw, was = (t.contiguous().view(torch.uint8).flatten(1) for t in (tensor, old))
        assert torch.equal(raw[[0, 2]], was[[0, 2]]), "other layers are untouched"


@pytest.mark.parametrize("row", ROW_FORMATS, ids=lambda r: r.name)
def test_slot_minus_1_touches_the_dummy_slot_alone(row: Any) -> None:
    slab = RowSlab(2, 3, 8, row, "cpu")
    for layer in range(2):
        slab.write(layer, torch.arange(24), torch.ones(24, row.dim))
    before = [t.clone().view(torch.uint8) for t in slab.tensors()]
    slab.write(0, torch.tensor([-1, -7]), torch.full((2, row.dim), 5.0))
    for old, tensor in zip(before, slab.tensors(), strict=True):
        changed = (tensor.view(torch.uint8) != old).flatten(3).any(-1)
        assert changed.nonzero().tolist() in ([[0, 0, 0]], []), "layer 0, page 0, offset 0"
    assert float(slab.read(0, torch.tensor([-1]), torch.float32)[0, 0]) == pytest.approx(5.0, rel=1 / 16)


@pytest.mark.parametrize(
    ("slots", "shape"), [([1, 2], (2, 1)), ([1, 2], (1, 32)), ([1], (2, 32)), ([[1, 2]], (2, 32)), ([1], (1, 33))]
)
def test_rows_that_do_not_fit_are_refused(slots: list, shape: tuple[int, int]) -> None:
    slab = RowSlab(1, 2, 8, kv_format("fp64", 16, 16), "cpu")
    with pytest.raises(InputError, match=r"\[n, 32\] are needed"):
        slab.write(0, torch.tensor(slots), torch.zeros(shape))
    assert bool((slab.data == 0).all())


# -- a padded batch row -----------------------------------------------------------------------------------------------


class Scene:
    """Pools full of a sentinel, one request of ``prefix`` tokens on row 1 and a bystander on row 2."""

    def __init__(self, platform: str, prefix: int) -> None:
        setting = config("tiny", platform, c128_page_size=1, emulated_kernels=True, kv_row="fp64", indexer_row="fp64")
        sizes = PoolSizes(full_pages=12, swa_pages=12, c128_pages=12, request_rows=3)
        self.pools = DSV4Pools(setting, sizes, state_dtype=torch.float64)
        self.alloc = KVAllocator(AllocSpec.of(setting, sizes))
        assert [self.alloc.open("first"), self.alloc.open("bystander")] == [1, 2]
        with self.alloc.transaction() as tx:
            tx.extend(1, prefix + 16)
            tx.extend(2, prefix + 16)
            tx.commit()
        self.alloc.flush()
        mirrors = self.alloc.mirrors
        self.tables = Tables(mirrors.block_table, mirrors.full_to_swa, mirrors.c128_table)
        self.prefix = prefix
        for slab in self.pools.families().values():
            slab.data.fill_(7.0)
            if isinstance(slab, StateSlab):
                slab.data[:, slab.dummy, : slab.half] = 0
                slab.data[:, slab.dummy, slab.half :] = float("-inf")

    def forward(self, rows: list[int], starts: list[int], lengths: list[int], check_resident: bool = True) -> None:
        """Everything that a forward writes, with random projections."""
        pools = self.pools
        if check_resident:
            plan = plan_batch(pools, self.tables, rows, starts, lengths)
        else:
            at = (torch.tensor(values) for values in (rows, starts, lengths))
            plan = plan_batch_on_device(pools, self.tables, *at, Bounds(starts, starts, lengths))
        batch, width = plan.positions.shape
        gen = torch.Generator().manual_seed(3)

        def random(layer: int, channels: int) -> torch.Tensor:
            # One request's rows are the same whatever else is in the batch.
            gen.manual_seed(layer)
            return torch.randn(1, 5, channels, generator=gen, dtype=torch.float64)[:, :width].repeat(batch, 1, 1)

        for layer in range(pools.swa.layers):
            pools.swa.write(layer, plan.swa_new.flatten(), random(layer, 32).flatten(0, 1))
        for ratio, state, slab in (
            (4, pools.c4_state, pools.c4),
            (4, pools.index_state, pools.index),
            (128, pools.c128_state, pools.c128),
        ):
            weights = CompressorWeights(torch.zeros(ratio, state.half), torch.ones(slab.row.dim), 1e-6, torch.ones(2))
            for i in range(state.layers):
                kv, gate = random(i, state.half), random(i + 50, state.half)
                made = compress_batch(state.data[i], kv, gate, plan.rings[ratio], weights, plan.start_positions)
                if plan.rings[ratio].windows:
                    slab.write(i, plan.entries[ratio].new_slots.flatten(), made.flatten(0, 1))

    def touched_by(self, other: Scene) -> dict[str, set[int]]:
        """Pages (rows for states) that differ between two scenes, in any layer."""
        found = {}
        for name, slab in self.pools.families().items():
            difference = slab.data != other.pools.families()[name].data
            found[name] = set(difference.flatten(2).any(-1).any(0).nonzero().flatten().tolist())
        return found


def check_padded_row(platform: str, prefix: int, length: int) -> None:
    """A batch of request row 1 and a padded row leaves what row 1 alone leaves, dummies and bank 0 aside."""
    alone, padded = Scene(platform, prefix), Scene(platform, prefix)
    fresh = Scene(platform, prefix)
    alone.forward([1], [prefix], [5])
    padded.forward([1, 0], [prefix, prefix if length else 0], [5, length], check_resident=not length)
    for name, places in padded.touched_by(alone).items():
        slab = padded.pools.families()[name]
        dummies = set(range(slab.ring)) | {slab.dummy} if isinstance(slab, StateSlab) else {0}
        assert places <= dummies, f"{name}: {sorted(places - dummies)} are touched by the padded row"
    for slab in (padded.pools.c4_state, padded.pools.index_state, padded.pools.c128_state):
        kv, score = slab.data[:, slab.dummy].chunk(2, dim=-1)
        assert bool((kv == 0).all())
        assert bool((score == float("-inf")).all())
    # The batch itself wrote: the comparison above is not between two idle pools.
    assert all(places for places in alone.touched_by(fresh).values())


@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("prefix", [124, 126, 251])
@pytest.mark.parametrize("platform", ["a2", "a3", "a5"])
def test_a_padded_row_touches_bank_0_and_dummies_only(platform: str, prefix: int, length: int) -> None:
    check_padded_row(platform, prefix, length)


def row_0_is_row_2(rows: Any, at: torch.Tensor, ring: int) -> Any:
    return torch.where(rows == 0, 2, rows) * ring + at % ring


def swa_page_0_is_valid(full: torch.Tensor, full_to_swa: torch.Tensor, page: int) -> torch.Tensor:
    pages = full_to_swa[full // page].to(torch.int64)
    return torch.where(pages > 0, pages, 5) * page + full % page


def empty_column_is_page_5(table: torch.Tensor, rows: Any, entries: torch.Tensor, page: int) -> torch.Tensor:
    pages = table[rows, entries // page].to(torch.int64)
    return torch.where(pages > 0, pages, 5) * page + entries % page


@pytest.mark.parametrize(
    ("name", "mutant", "platform"),
    [
        ("request_state_rows", row_0_is_row_2, "a3"),
        ("request_state_rows", row_0_is_row_2, "a5"),
        ("swa_slots", swa_page_0_is_valid, "a3"),
        ("c128_slots", empty_column_is_page_5, "a5"),
    ],
)
def test_a_padded_row_that_hits_somebody_shows(
    monkeypatch: pytest.MonkeyPatch, name: str, mutant: Callable[..., torch.Tensor], platform: str
) -> None:
    monkeypatch.setattr(addressing, name, mutant)
    with pytest.raises(AssertionError, match="touched by the padded row"):
        check_padded_row(platform, 126, 5)


def test_negative_slots_that_wrap_around_show(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RowSlab.write

    def wrapping(self: RowSlab, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        real(self, layer, slots % (self.pages * self.page), rows)

    monkeypatch.setattr(RowSlab, "write", wrapping)
    with pytest.raises(AssertionError, match="touched by the padded row"):
        check_padded_row("a3", 126, 5)
    with pytest.raises(AssertionError):
        test_slot_minus_1_touches_the_dummy_slot_alone(ROW_FORMATS[0])


def test_a_dummy_row_that_is_not_reset_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_npu.compressor.reference.reset_dummy_row", lambda state, dummy: None)
    with pytest.raises(AssertionError):
        check_padded_row("a3", 126, 5)
