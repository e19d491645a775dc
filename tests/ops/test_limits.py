"""Offsets beyond 32 bits, grids within the device's limit, and what stands under which dispatch key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dsv4_npu import ops
from dsv4_npu.errors import InputError
from dsv4_npu.ops import _registry

FAR = 4_200_000  # a row whose offset, times a width of 1024, does not fit 32 bits


def virtual(target: Any, *shape: int) -> torch.Tensor:
    """17 GB of which only the touched pages exist: on the CPU ``empty`` reserves addresses, not memory."""
    try:
        return torch.empty(shape, dtype=torch.float32, device=target.device)
    except RuntimeError as error:
        pytest.skip(f"no address space for 17 GB: {error}")


@pytest.mark.parametrize("layers", [1, 3])
def test_clear_of_a_far_row(target: Any, layers: int) -> None:
    rows = FAR // layers + 256
    state = virtual(target, layers, rows, 1024)
    request, slot = divmod(FAR // layers, 256)
    row = request * 256 + slot
    for layer in range(layers):
        state[layer, row - 1 : row + 2] = 1
    args = (torch.tensor([x], device=target.device) for x in (request, slot - 1, 1))
    ops.clear_c128_draft_states_(state, *args, 256, 2, backend=target.backend)
    for layer in range(layers):
        assert state[layer, row - 1 : row + 2, 511:513].tolist() == [[1, 1], [0, -torch.inf], [1, 1]]


def test_clear_of_a_far_bank(target: Any) -> None:
    state = virtual(target, 1, FAR + 16, 1024)
    state[0, FAR - 1 : FAR + 9] = 1
    ops.clear_request_states_(state, torch.tensor([FAR // 8], device=target.device), 8, backend=target.backend)
    assert state[0, FAR - 1 : FAR + 9, 512].isinf().tolist() == [False] + [True] * 8 + [False]


@pytest.mark.parametrize("layers", [1, 3])
def test_move_of_a_far_row(target: Any, layers: int) -> None:
    slots = FAR // layers
    slab = virtual(target, layers, slots // 100 + 1, 100, 1, 1024)
    rows = slab.view(layers, -1, 1024)
    for layer in range(layers):
        rows[layer, 7], rows[layer, slots], rows[layer, slots - 1] = 1, 2, 3
    tgt, src = (torch.tensor(x, device=target.device) for x in ([7, slots - 1], [slots, 7]))
    ops.move_kv_(slab, tgt, src, backend=target.backend)
    for layer in range(layers):
        assert [float(rows[layer, at, 1023]) for at in (7, slots, slots - 1)] == [2, 2, 1]


def test_compaction_of_a_far_row(target: Any) -> None:
    hidden = virtual(target, FAR + 1, 1024)
    hidden[1], hidden[FAR] = 1, 2
    predict = torch.zeros(FAR + 1, dtype=torch.int32, device=target.device)
    predict[FAR] = 9
    index = torch.tensor([[0, FAR]], device=target.device)
    lens = torch.tensor([2], device=target.device)
    ops.compact_accept_(predict, hidden, index, lens, backend=target.backend)
    assert (float(hidden[1, 1023]), int(predict[1])) == (2, 9)


@pytest.fixture
def launches() -> Iterator[list[Any]]:
    launch = pytest.importorskip("dsv4_npu.ops._launch", reason="triton is not installed")
    seen: list[Any] = []
    launch.observers.append(seen.append)
    yield seen
    launch.observers.remove(seen.append)


def test_a_batch_of_4096_is_one_launch_within_the_limit(target: Any, launches: list[Any]) -> None:
    state = torch.ones(1, 4097 * 256, 2, device=target.device)
    requests = torch.arange(1, 4097, device=target.device)
    accepted = torch.full((4096,), 8, device=target.device)
    accepted[-1] = 7
    ops.clear_c128_draft_states_(state, requests, requests * 0, accepted, 256, 8, backend=target.backend)
    assert (state != 1).nonzero().tolist() == [[0, 4096 * 256 + 7, 0], [0, 4096 * 256 + 7, 1]]
    if target.device == "cuda" or target.backend == "triton":
        assert [seen.kernel for seen in launches] == ["clear_c128_draft_states_kernel"]
        assert 1 <= launches[0].programs <= 65535


@pytest.mark.parametrize("layers", [1, 31])
def test_layers_never_cost_a_launch(target: Any, launches: list[Any], layers: int) -> None:
    if target.backend in ("ref", "cpu"):
        pytest.skip("not a device kernel")
    one = torch.ones(1, dtype=torch.int64, device=target.device)
    ops.clear_c128_draft_states_(torch.ones(layers, 600, 2, device=target.device), one, one, one, 256, 3)
    expected = 1 if target.device == "cuda" else 0  # CPU tensors dispatch to the CPU kernel
    assert len(launches) == expected
    ops.clear_c128_draft_states_(
        torch.ones(layers, 600, 2, device=target.device), one, one, one, 256, 3, backend="triton"
    )
    assert len(launches) == expected + 1


class Recorder:
    """A kernel that notes its grid."""

    def __init__(self) -> None:
        self.fn = type(self)
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *args, **constants: None


@pytest.mark.parametrize(("cores", "items", "programs"), [(40, 4096 * 31, 40), (10**9, 4096 * 31, 65535), (48, 5, 5)])
def test_grid_is_capped(monkeypatch: pytest.MonkeyPatch, cores: int, items: int, programs: int) -> None:
    launch = pytest.importorskip("dsv4_npu.ops._launch", reason="triton is not installed")
    monkeypatch.setattr(launch, "program_limit", lambda *device: cores)
    kernel = Recorder()
    launch.launch(kernel, items, torch.device("meta"))
    launch.launch(kernel, 0, torch.device("meta"))
    assert kernel.grids == [(programs,)]


@pytest.mark.parametrize("op", _registry.ops.values(), ids=lambda op: op.name)
def test_every_key_is_filled(op: _registry.Op) -> None:
    for key in ("CPU", "Meta", "PrivateUse1", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op.qualified_name, key), key
    assert op.overload._schema.is_mutable == ("!" in op.schema)
    assert op.name.endswith("_") <= op.overload._schema.is_mutable
    with pytest.raises(InputError, match="backend is 'nowhere'"):
        op("nowhere")


def test_the_npu_key_holds_the_triton_kernel(launches: list[Any]) -> None:
    """The dispatcher's NPU key, called on CPU memory as an emulated NPU would."""
    launch = pytest.importorskip("dsv4_npu.ops._launch", reason="triton is not installed")
    kernel = pytest.importorskip("dsv4_npu.ops.move_kv.triton").copy_rows_kernel
    if not isinstance(kernel, launch.InterpretedFunction):
        pytest.skip("Triton's interpreter is off: with a GPU the kernels run compiled")
    slab = torch.arange(8).view(1, 2, 4, 1, 1)
    key = torch._C.DispatchKey.PrivateUse1
    torch.ops.dsv4_npu.move_kv_.default._op_dk(key, slab, torch.tensor([4, 5]), torch.tensor([5, 4]))
    assert slab.flatten().tolist() == [0, 1, 2, 3, 5, 4, 6, 7]
    assert [seen.kernel for seen in launches] == ["copy_rows_kernel"]
