"""What only a GPU shows: captured graphs, several streams, and that no counter is left standing."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from brute_force import JUDGES
from verify_world import Batch, Result, random_batch, run_function

from dsv4_npu import ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
OPS = ("chain_speculative_sampling", "tree_speculative_sampling_target_only")


def on_gpu(batch: Batch) -> Batch:
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{name: x.cuda() for name, x in tensors.items() if isinstance(x, torch.Tensor)})


def as_result(outputs: tuple[torch.Tensor, ...]) -> Result:
    predicts, index, number = (x.cpu().tolist() for x in outputs)
    return Result(predicts, index, number)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("bs", "vocab"), [(1, 129280), (5, 9001), (700, 4099)])
def test_replayed_graph(op: str, bs: int, vocab: int) -> None:
    """New coins and probabilities in the same memory, poisoned outputs, replays beside calls from Python."""
    batch = on_gpu(random_batch(1, bs, 4, 4, vocab, exact=False))
    outputs = batch.outputs("cuda")
    getattr(ops, op)(*outputs, *batch.inputs(op))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        getattr(ops, op)(*outputs, *batch.inputs(op))
    for seed in range(4):
        fresh = random_batch(seed, bs, 4, 4, vocab, exact=False)
        for f in fields(batch):
            if isinstance(getattr(batch, f.name), torch.Tensor):
                getattr(batch, f.name).copy_(getattr(fresh, f.name))
        for output in outputs:
            output.fill_(-77)
        graph.replay()
        JUDGES[op](fresh, as_result(outputs))
        JUDGES[op](fresh, run_function(getattr(ops, op), op, fresh, "cuda"))


@pytest.mark.parametrize("op", OPS)
def test_streams_do_not_disturb_each_other(op: str) -> None:
    batches = [random_batch(seed, 9, 4, 4, 20_001, exact=False) for seed in range(4)]
    moved = [on_gpu(batch) for batch in batches]
    outputs = [batch.outputs("cuda") for batch in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, batch, output in zip(streams, moved, outputs, strict=True):
            with torch.cuda.stream(stream):
                getattr(ops, op)(*output, *batch.inputs(op))
    torch.cuda.synchronize()
    for batch, output in zip(batches, outputs, strict=True):
        JUDGES[op](batch, as_result(output))


@pytest.mark.parametrize("op", OPS)
def test_counters_return_to_zero(op: str) -> None:
    from dsv4_npu.ops import _draw_triton

    for bs in (1, 7, 64, 200):
        batch = random_batch(bs, bs, 3, 3, 5000, exact=False)
        JUDGES[op](batch, run_function(getattr(ops, op), op, batch, "cuda"))
    assert _draw_triton._pools
    assert all(not bool(pool.any()) for pool in _draw_triton._pools)


def test_backend_by_name_and_by_device_are_one() -> None:
    batch = random_batch(3, 4, 4, 4, 7000, exact=False)
    for op in OPS:

        def named(*arguments: object, op: str = op) -> None:
            getattr(ops, op)(*arguments, backend="triton")

        assert run_function(named, op, batch, "cuda") == run_function(getattr(ops, op), op, batch, "cuda")
