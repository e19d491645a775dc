"""Plain tensors on a device go to the Triton kernels without the dispatcher. Here CPU tensors pass for such tensors."""

from __future__ import annotations

import importlib.util
import os
import threading
from types import SimpleNamespace
from typing import NoReturn

import pytest
import test_repeats
import torch
from test_repeats import Call

from dsv4_npu import ops
from dsv4_npu.ops import _checks, _registry


def small(op: str) -> Call:
    """A call of the op that the interpreter does quickly."""
    rng = torch.Generator().manual_seed(5)
    if op == "clear_c128_draft_states_":
        rows, ends, accepted = torch.tensor([[1, 2], [250, 9], [1, 3]])
        return (torch.rand(2, 3 * 256, 16, generator=rng), rows, ends, accepted, 256, 4), (0,)
    if op == "clear_request_states_":
        return (torch.rand(2, 4 * 8, 16, generator=rng), torch.tensor([3, 1]), 8), (0,)
    if op == "move_kv_":
        slots = torch.arange(1, 7)
        return (torch.rand(2, 3, 4, 1, 16, generator=rng), slots, slots.flip(0)), (0,)
    if op.startswith("top_"):
        limits = torch.tensor([1, 9, 301]) if op == "top_k_renorm_prob" else torch.tensor([0.1, 0.5, 1.0])
        return (torch.rand(3, 301, generator=rng), limits), ()
    if op == "chain_speculative_sampling":
        return test_repeats.chain(rng, 301)
    if op == "tree_speculative_sampling_target_only":
        return test_repeats.tree(rng, 301)
    return test_repeats.CASES[op][1](rng)


@pytest.fixture
def plain_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs triton and its interpreter, which takes CPU tensors")
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(_checks, "values_known", lambda *tensors: False)
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "cpu")


def refused(op: _registry.Op) -> NoReturn:
    raise AssertionError(f"{op.name} went through the dispatcher")


@pytest.mark.parametrize("op", ops.__all__)
def test_the_dispatcher_is_not_asked(op: str, plain_npu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    call = small(op)
    wanted = test_repeats.run(op, call, "triton")
    monkeypatch.setattr(_registry.Op, "overload", property(refused))
    for _ in range(2):  # checked; known
        assert all(torch.equal(x, y) for x, y in zip(test_repeats.run(op, call), wanted, strict=True))


def test_versions_of_written_tensors_stay(plain_npu: None) -> None:
    (state, *rest), _ = small("clear_c128_draft_states_")
    before, version = state.clone(), state._version
    ops.clear_c128_draft_states_(state, *rest)
    assert not torch.equal(state, before)
    assert state._version == version


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_sees_the_operator(plain_npu: None) -> None:
    (slots, index, lengths), _ = small("gather_accepted_slots")
    for _ in range(2):
        ops.gather_accepted_slots(slots, index, lengths)
    traced = torch.jit.trace(lambda x: ops.gather_accepted_slots(x, index, lengths), (slots,), check_trace=False)
    assert "dsv4_npu::gather_accepted_slots" in str(traced.graph)


def test_launchers_fill_their_stores_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As scratch memory is kept by stream: looked for, allocated, written down."""
    store: dict[int, object] = {}
    given = []
    together = threading.Barrier(2)

    def run(tensor: torch.Tensor) -> None:
        known = store.get(0)
        if known is None:
            threading.Event().wait(0.02)
            known = store[0] = object()
        given.append(known)

    def launch() -> None:
        together.wait()
        _registry.ops["move_kv_"].on_device(torch.zeros(1))

    monkeypatch.setattr(_registry.Op, "triton", lambda self: run)
    threads = [threading.Thread(target=launch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(given) == 2
    assert given[0] is given[1]


class Npus:
    """``torch.npu`` of a machine with some NPUs."""

    def __init__(self) -> None:
        self.current = 0

    def current_device(self) -> int:
        return self.current

    def device(self, index: int) -> Npus:
        self.before, self.wanted = self.current, index
        return self

    def __enter__(self) -> None:
        self.current = self.wanted

    def __exit__(self, *error: object) -> None:
        self.current = self.before


@pytest.mark.parametrize("index", [0, 1])
def test_a_kernel_runs_on_the_npu_of_its_tensors(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name = torch._C._get_privateuse1_backend_name()
    npus, seen = Npus(), []
    monkeypatch.setattr(torch, name, npus, raising=False)
    monkeypatch.setattr(_registry.Op, "triton", lambda self: lambda tensor: seen.append(npus.current))
    monkeypatch.setattr(_registry, "_first_tensor", lambda args: SimpleNamespace(device=torch.device(name, index)))
    _registry.ops["move_kv_"].on_device(torch.zeros(1))
    assert seen == [index]
    assert npus.current == 0
