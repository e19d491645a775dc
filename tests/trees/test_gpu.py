"""On a GPU: the tensors of trees and the commit equal the CPU's, and ranks agree with their results on the device."""

from __future__ import annotations

import random

import pytest
import torch

from dsv4_npu import ops
from dsv4_npu.emulation.ranks import on_ranks
from dsv4_npu.pools.full_kv import FullKVPool
from dsv4_npu.spec.trees import accept_tree_greedy, tree_layout
from tests.trees import rank_jobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]


def commit(device: str, seed: int) -> list[torch.Tensor]:
    """One round's acceptance and commit; everything that it leaves."""
    draw, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, width, depth, page = 5, 12, 5, 16
    parents = torch.tensor([[-1] + [draw.randrange(j) for j in range(1, width)] for _ in range(batch)])
    tokens = torch.randint(3, (batch, width), generator=gen)
    choices = torch.randint(3, (batch, width), generator=gen)
    slots = torch.randperm(40 * page, generator=gen)[: batch * width] + page
    pool = FullKVPool(3, 40, page, heads=2, key_dim=8, value_dim=4, dtype=torch.float32, device=device)
    rows = torch.rand((batch * width, 2, 12), generator=gen).to(device)
    for layer in range(3):
        pool.write(layer, slots.to(device), rows[..., :8].contiguous() + layer, rows[..., 8:].contiguous())
    layout = tree_layout(parents.to(device))
    result = accept_tree_greedy(tokens.to(device), layout, choices.to(device), depth)
    tgt, src = ops.gather_accepted_slots(slots.to(device), result.accept_index, result.accept_lens)
    still = tgt == src
    pool.move_kv(tgt.masked_fill(still, -1), src.masked_fill(still, -1))
    hidden = torch.rand((batch * width, 6), generator=gen).to(device)
    ops.compact_accept_(result.predict, hidden, result.accept_index, result.accept_lens)
    left = [layout.next_token, layout.next_sibling, layout.depth, layout.mask, result.predict, result.accept_index]
    return [one.cpu() for one in (*left, result.accept_lens, hidden, *(slab[:, 1:] for slab in pool.tensors()))]


@pytest.mark.parametrize("seed", range(5))
def test_the_commit_equals_the_cpus(seed: int) -> None:
    for here, there in zip(commit("cpu", seed), commit("cuda", seed), strict=True):
        assert torch.equal(here, there)


def test_ranks_agree_with_results_on_the_device() -> None:
    first, second = on_ranks(2, rank_jobs.rounds, 200, True, rank_jobs.ranks_module.PARTS, "cuda")
    assert first["error"] == second["error"] == ""
    assert first["histories"] == second["histories"]
    assert second["overruled"] > 50
