"""The emulated npu device: operators, kernels, and what is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dsv4_npu import ops
from dsv4_npu.emulation import device as emulated
from dsv4_npu.emulation.device import NpuTensor, held
from dsv4_npu.emulation.stream import EVENTS, POISON, STREAM, Events
from dsv4_npu.errors import AuditError, InputError, UnavailableError

pytest.importorskip("triton", reason="the emulated npu device runs kernels under Triton's interpreter")


@pytest.fixture(scope="module", autouse=True)
def npu() -> None:
    try:
        emulated.activate()
    except UnavailableError as error:
        pytest.skip(str(error))


def counted(call: Callable[[], Any]) -> tuple[Any, Events]:
    before = EVENTS.copy()
    result = call()
    return result, EVENTS.since(before)


def on_npu(*values: Any) -> list[torch.Tensor]:
    return [torch.tensor(value, device="npu") for value in values]


MAKERS: list[Callable[[str], torch.Tensor]] = [
    lambda device: torch.zeros(3, 2, device=device),
    lambda device: torch.full((2,), 3, device=device),
    lambda device: torch.arange(4, device=device),
    lambda device: torch.arange(1, 9, 3, device=device),
    lambda device: torch.eye(3, device=device),
    lambda device: torch.linspace(0, 1, 5, device=device),
    lambda device: torch.tensor([[1, 2], [3, 4]], device=device),
    lambda device: torch.tensor([[1, 2], [3, 4]]).to(device, torch.int32),
    lambda device: torch.tensor([1.5]).to(device).new_ones(3),
    lambda device: torch.empty_like(torch.zeros(2), device=device).fill_(2),
]


@pytest.mark.parametrize("index", range(len(MAKERS)))
def test_tensors_are_made_on_the_device(index: int) -> None:
    made, want = MAKERS[index]("npu"), MAKERS[index]("cpu")
    assert isinstance(made, NpuTensor)
    assert str(made.device) == "npu:0"
    assert (made.shape, made.dtype, made.stride()) == (want.shape, want.dtype, want.stride())
    assert torch.equal(held(made), want)


WORK: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x + 1,
    lambda x: x.t()[1:, 0] * x[:, 1:].sum(),
    lambda x: torch.where(x > 3, x, -1),
    lambda x: x.float().softmax(-1),
    lambda x: torch.cat((x, x.flip(0)), dim=1),
    lambda x: x[x[:, 0] // 4],
    lambda x: x.index_put_((x[:, 0] // 4, x[:, 1] % 4), x[:, 2]),
    lambda x: x.view(torch.int32)[:, ::2].argmax(-1),
    lambda x: torch.stack([row * 2 for row in x]),
    lambda x: x.sort(descending=True).values,
    lambda x: x.scatter_(1, x[:, :1] % 4, 1),
]


@pytest.mark.parametrize("index", range(len(WORK)))
def test_operators_compute_what_they_compute_on_a_cpu(index: int) -> None:
    data = torch.arange(12).view(3, 4)
    moved = data.to("npu")
    result, events = counted(lambda: WORK[index](moved))
    want = WORK[index](data.clone() if index not in (6, 10) else data)
    assert str(result.device) == "npu:0"
    torch.testing.assert_close(held(result), want)
    torch.testing.assert_close(held(moved), data)
    assert events.operators
    assert not events.reads
    assert not events.copies_in


def test_views_share_memory_and_launch_nothing() -> None:
    x = torch.zeros(4, 4, device="npu")
    view, events = counted(lambda: x[1:3].t().view(-1, 2)[:, 1])
    assert not events.operators
    view.fill_(5)
    assert held(x).sum() == 20


READS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x[0, 1].item(),
    lambda x: int(x.sum()),
    lambda x: bool((x > 3).any()),
    lambda x: [1 for _ in range(x[1, 0])],
    lambda x: x.tolist(),
    lambda x: x.cpu(),
    lambda x: x.numpy(force=True),
    lambda x: torch.zeros(3, 4, dtype=torch.int64).copy_(x),
    lambda x: x.nonzero(),
    lambda x: x[x > 3],
    lambda x: x.masked_select(x > 3),
    lambda x: x.unique(),
    lambda x: torch.equal(x, x),
    lambda x: torch.repeat_interleave(x[0]),
    lambda x: x.__setitem__(x > 3, torch.arange(8, device="npu")),
    lambda x: torch.npu.synchronize(),  # type: ignore[attr-defined]
]


@pytest.mark.parametrize("index", range(len(READS)))
def test_a_look_at_values_is_counted_as_a_read(index: int) -> None:
    (x,) = on_npu(np.arange(12).reshape(3, 4).tolist())
    result, events = counted(lambda: READS[index](x))
    assert sum(events.reads.values()) == 1
    if not isinstance(result, torch.Tensor):
        assert result == READS[index](torch.arange(12).view(3, 4)) if index < 5 else True


def test_copies_to_the_device_are_counted_and_others_are_not() -> None:
    _, events = counted(lambda: [torch.ones(3).to("npu"), torch.tensor([1], device="npu"), torch.zeros(2).npu()])
    assert events.copies_in == 3
    x = torch.zeros(3, 2, device="npu")
    _, events = counted(lambda: x[torch.tensor([2, 0])])
    assert events.copies_in == 1, "an index tensor of the CPU is copied"
    _, events = counted(lambda: (x.to("npu"), x.clone(), x.copy_(x + 1), x + torch.tensor(1.0)))
    assert events.copies_in == 0


def test_tensors_of_two_devices_do_not_mix() -> None:
    x = torch.zeros(3, device="npu")
    with pytest.raises(InputError, match="one device is needed"):
        x + torch.ones(3)
    with pytest.raises(TypeError, match="no numpy view"):
        np.asarray(x)
    with pytest.raises(UnavailableError, match="keeps its shape"):
        x.unsqueeze_(0)
    with pytest.raises(UnavailableError, match="keeps its shape"):
        torch.add(x, x, out=torch.empty(0, device="npu"))


# -- asynchronous copies ----------------------------------------------------------------------------------------------


def test_an_asynchronous_copy_arrives_when_the_host_waits() -> None:
    x = torch.arange(3, device="npu")

    def begin() -> tuple[torch.Tensor, torch.Tensor, Any]:
        first = x.to("cpu", non_blocking=True)
        second = torch.zeros(3, dtype=torch.int64)
        second.copy_(x, non_blocking=True)
        event = torch.npu.Event()  # type: ignore[attr-defined]
        event.record()
        return first, second, event

    (first, second, event), events = counted(begin)
    assert (events.copies_out, sum(events.reads.values())) == (2, 0)
    assert first.tolist() == second.tolist() == [POISON] * 3, "the host looked too early"
    x.add_(10)
    _, events = counted(event.synchronize)
    assert first.tolist() == second.tolist() == [0, 1, 2], "the values at the place of the copy in the stream"
    assert (events.waits, events.stalls) == (1, 0), "work was enqueued behind the event"


def test_a_wait_for_the_newest_work_is_a_stall() -> None:
    x = torch.arange(3, device="npu")
    host = x.to("cpu", non_blocking=True)
    event = torch.npu.Event()  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="not recorded"):
        event.synchronize()
    event.record()
    _, events = counted(event.synchronize)
    assert (events.waits, events.stalls) == (1, 1)
    assert host.tolist() == [0, 1, 2]


def test_a_read_waits_for_everything_before_it() -> None:
    x = torch.arange(3, device="npu")
    host = x.to("cpu", non_blocking=True)
    x.sum().item()
    assert host.tolist() == [0, 1, 2]


def test_a_host_buffer_that_is_changed_too_early_is_found() -> None:
    buffer = torch.arange(4)
    sent = buffer.to("npu", non_blocking=True)
    buffer.numpy()[2] = 9
    with pytest.raises(AuditError, match="4 elements was changed before"):
        sent.sum().item()
    buffer.to("npu", non_blocking=True)
    STREAM.catch_up(STREAM.clock)
    buffer.numpy()[2] = 8
    sent.sum().item()


# -- our kernels ------------------------------------------------------------------------------------------------------


def clear_arguments(layers: int, device: str) -> tuple[Any, ...]:
    state = torch.ones(layers, 3 * 256, 8, device=device)
    rows = [torch.tensor(v, device=device) for v in ([1, 2], [254, 100], [2, 3])]
    return state, *rows, 256, 5


@pytest.mark.parametrize("layers", [1, 4, 9])
def test_an_op_of_ours_is_one_launch_of_its_triton_kernel(layers: int) -> None:
    on_device, on_host = clear_arguments(layers, "npu"), clear_arguments(layers, "cpu")
    _, events = counted(lambda: ops.clear_c128_draft_states_(*on_device))
    assert events.launches == {"clear_c128_draft_states_kernel": 1}
    assert not events.reads
    assert not events.operators
    ops.clear_c128_draft_states_(*on_host, backend="ref")
    assert torch.equal(held(on_device[0]), on_host[0])


def greedy_arguments(device: str) -> list[torch.Tensor]:
    outputs = [torch.empty(shape, dtype=torch.int32, device=device) for shape in ((4,), (1, 4), (1,))]
    chain = [[[7, 5, 6, 9]], [[0, 1, 2, 3]], [[1, 2, 3, -1]], [[-1] * 4], [[5, 6, 8, 1]]]
    return outputs + [torch.tensor(one, device=device) for one in chain]


def test_the_device_reaches_the_triton_kernel_and_the_cpus_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_npu.ops.verify_tree_greedy import triton

    called: list[str] = []
    real = triton.run

    def run(*args: torch.Tensor) -> None:
        called.append("triton")
        real(*args)

    monkeypatch.setattr(triton, "run", run)
    with torch.library._scoped_library("dsv4_npu", "IMPL") as library:  # type: ignore[no-untyped-call]
        library.impl("verify_tree_greedy", lambda *args: called.append("cpu"), "CPU", allow_override=True)
        ops.verify_tree_greedy(*greedy_arguments("cpu"))
        assert called == ["cpu"], "the replaced implementation is what a CPU tensor reaches"
        arguments = greedy_arguments("npu")
        _, events = counted(lambda: ops.verify_tree_greedy(*arguments))
    assert called == ["cpu", "triton"]
    assert events.launches == {"verify_tree_greedy_kernel": 1}
    assert held(arguments[1]).tolist() == [[0, 1, 2, -1]]
    assert held(arguments[0]).tolist()[:3] == [5, 6, 8]
    _, events = counted(lambda: ops.verify_tree_greedy(*greedy_arguments("cpu")))
    assert called == ["cpu", "triton"]
    assert not events.launches


def test_a_kernel_that_is_replaced_under_the_devices_key_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_npu.ops.clear_request_states import triton

    def run(state: torch.Tensor, rows: torch.Tensor, ring: int) -> None:
        state.fill_(3)

    monkeypatch.setattr(triton, "run", run)
    state = torch.zeros(2, 16, 4, device="npu")
    ops.clear_request_states_(state, torch.tensor([1], device="npu"), 4)
    assert bool((held(state) == 3).all())


def test_an_op_without_a_kernel_for_the_device_is_refused() -> None:
    library = torch.library.Library("emulated_npu_test", "DEF")
    library.define("only_cpu(Tensor x) -> Tensor")
    library.impl("only_cpu", lambda x: x + 1, "CPU")
    with pytest.raises(UnavailableError, match="emulated_npu_test::only_cpu has no kernel for the npu device"):
        torch.ops.emulated_npu_test.only_cpu(torch.zeros(2, device="npu"))
    state, rows, *rest = clear_arguments(1, "npu")
    with pytest.raises(InputError, match="one device is needed"):
        torch.ops.dsv4_npu.clear_c128_draft_states_(state, rows.cpu(), *rest)
