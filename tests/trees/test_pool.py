"""The full-KV pool: shapes, bytes, reads and writes by slot, moves, the dummy page."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_npu.errors import ConfigError, InputError
from dsv4_npu.ops import move_kv
from dsv4_npu.pools.full_kv import FullKVPool

LAYOUTS: dict[str, dict[str, int]] = {
    "multi-head": {"heads": 4, "key_dim": 8, "value_dim": 8},
    "grouped": {"heads": 2, "key_dim": 8, "value_dim": 6},
    "latent": {"heads": 1, "key_dim": 12, "value_dim": 0},
}


@pytest.fixture(params=sorted(LAYOUTS))
def pool(request: pytest.FixtureRequest) -> FullKVPool:
    made = FullKVPool(3, 5, 4, dtype=torch.float32, **LAYOUTS[request.param])
    gen = torch.Generator().manual_seed(0)
    for slab in made.tensors():
        slab[:, 1:] = torch.randn(slab[:, 1:].shape, generator=gen)
    return made


def by_token(slab: torch.Tensor) -> torch.Tensor:
    return slab.view(slab.shape[0], -1, *slab.shape[3:])


def test_shapes_and_bytes(pool: FullKVPool) -> None:
    for slab in pool.tensors():
        assert slab.shape[:4] == (3, 6, 4, pool.heads)
        assert slab.is_contiguous()
    assert pool.usage_bytes() == sum(slab.numel() * 4 for slab in pool.tensors())
    assert len(pool.tensors()) == (1 if pool.values is None else 2)


def test_a_latent_pool_is_one_slab() -> None:
    pool = FullKVPool.latent(2, 3, 16, 576)
    assert [tuple(slab.shape) for slab in pool.tensors()] == [(2, 4, 16, 1, 576)]
    assert pool.usage_bytes() == 2 * 4 * 16 * 576 * 2


def test_what_is_written_is_read(pool: FullKVPool) -> None:
    before = [slab.clone() for slab in pool.tensors()]
    slots = torch.tensor([21, 4, 0, 13])  # the third is padding
    rows = [torch.randn(4, *slab.shape[3:]) for slab in pool.tensors()]
    pool.write(1, slots, *rows)
    real = slots >= 4
    for got, want, slab, old in zip(pool.read(1, slots), rows, pool.tensors(), before, strict=False):
        assert got is not None
        assert torch.equal(got[real], want[real])
        by_token(old)[1, slots[real]] = want[real]
        assert torch.equal(slab, old)


@pytest.mark.parametrize(
    ("tgt", "src"),
    [
        ([[17]], [[22]]),
        ([[5, 6, 7]], [[6, 7, 8]]),
        ([[6, 7, 8]], [[5, 6, 7]]),
        ([[5, 6]], [[6, 5]]),
        ([[5, -1, 7], [12, -1, -1]], [[6, -1, 9], [15, -1, -1]]),
        ([[-1, -1]], [[-1, -1]]),
    ],
)
def test_moves_read_every_source_first(pool: FullKVPool, tgt: list[list[int]], src: list[list[int]]) -> None:
    want = [slab.clone() for slab in pool.tensors()]
    pairs = [(t, s) for a, b in zip(tgt, src, strict=True) for t, s in zip(a, b, strict=True) if t >= 0]
    for slab in want:
        old = by_token(slab).clone()
        for t, s in pairs:
            by_token(slab)[:, t] = old[:, s]
    pool.move_kv(torch.tensor(tgt), torch.tensor(src))
    for slab, expected in zip(pool.tensors(), want, strict=True):
        assert torch.equal(slab, expected)


def test_one_launch_per_slab_serves_all_layers(pool: FullKVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = move_kv.OP.__class__.__call__

    def counted(self: Any, *args: Any) -> Any:
        calls.append(self.name)
        return real(self, *args)

    monkeypatch.setattr(move_kv.OP.__class__, "__call__", counted)
    pool.move_kv(torch.tensor([[5, 6]]), torch.tensor([[6, 8]]))
    assert calls == ["move_kv_"] * len(pool.tensors())


def test_the_dummy_page_stays_zero(pool: FullKVPool) -> None:
    rows = [torch.full((3, *slab.shape[3:]), float("nan")) for slab in pool.tensors()]
    pool.write(0, torch.tensor([0, 3, 0]), *rows)
    for slab in pool.tensors():
        assert not slab[:, 0].any()


def test_refusals(pool: FullKVPool) -> None:
    slots = torch.tensor([5, 6])
    rows = [torch.zeros(2, *slab.shape[3:]) for slab in pool.tensors()]
    with pytest.raises(InputError, match="are needed"):
        pool.write(0, slots[:1], *rows)
    with pytest.raises(InputError, match="are needed"):
        pool.write(0, slots, rows[0][..., :-1], *rows[1:])
    with pytest.raises(InputError, match="values: "):
        pool.write(0, slots, rows[0], *([] if pool.values is not None else [rows[0]]))
    with pytest.raises(InputError, match="groups that do not touch"):
        pool.move_kv(torch.tensor([[5], [6]]), torch.tensor([[6], [9]]))
    for name in ("layers", "pages", "page", "heads", "key_dim", "value_dim"):
        sizes = {"layers": 1, "pages": 1, "page": 1, "heads": 1, "key_dim": 1, "value_dim": 1, name: -1}
        with pytest.raises(ConfigError, match=f"{name} = -1"):
            FullKVPool(**sizes)
    with pytest.raises(ConfigError, match="heads = 2 with latent rows"):
        FullKVPool(1, 1, 1, heads=2, key_dim=4, value_dim=0)
