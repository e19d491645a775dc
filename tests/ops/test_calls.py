"""A call that was seen before is not checked again, and its launch is repeated: only where nothing has changed."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_npu.errors import InputError
from dsv4_npu.ops import _calls, _checks, _registry, _signature, clear_c128_draft_states_
from dsv4_npu.ops.clear_c128_draft_states import OP

DEVICES = [
    pytest.param(None, id="pretended"),
    pytest.param(
        "cuda",
        id="cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")],
    ),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device whose tensors' values the host has not; without one, CPU tensors pass for such."""
    if request.param is None:
        monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
        monkeypatch.setattr(_checks, "values_known", lambda *tensors: False)
        return "cpu"
    return str(request.param)


def test_a_changed_call_is_checked_again(device: str) -> None:
    memory = torch.zeros(2 * 771 * 8 + 64, device=device)
    state = memory[: 2 * 771 * 8].view(2, 771, 8)
    rows, lengths, accepted = (torch.ones(2, dtype=torch.int32, device=device) for _ in range(3))
    fine: dict[str, Any] = {
        "state": state,
        "req_pool_indices": rows,
        "seq_lens": lengths,
        "accept_lens": accepted,
        "ring_size": 256,
        "num_draft_tokens": 4,
    }
    for _ in range(3):
        clear_c128_draft_states_(**fine)
    for change in (
        {"seq_lens": lengths.view(torch.float32)},
        {"seq_lens": lengths[:1]},
        {"seq_lens": torch.ones(4, dtype=torch.int32, device=device)[::2]},
        {"seq_lens": memory[:2].view(torch.int32)},
        {"state": state.view(4, 771, 4).transpose(1, 2)},
        {"state": memory[:1542].view(2, 771)},
        {"num_draft_tokens": 131},
        {"ring_size": 128},
        {"write_pad": 3},
    ):
        for _ in range(2):
            with pytest.raises(InputError):
                clear_c128_draft_states_(**(fine | change))
    clear_c128_draft_states_(**fine)


def test_a_call_that_passed_is_not_checked_again(device: str) -> None:
    state = torch.zeros(2, 771, 8, device=device)
    given = (state, *(torch.ones(2, dtype=torch.int32, device=device) for _ in range(3)), 256)
    seen: list[int] = []
    op = fresh()

    def check(*args: Any) -> None:
        seen.append(args[-1])

    for width, pad in ((4, 8), (4, 8), (5, 8), (4, 9), (4, 8)):
        op.checked(check, "auto", *given, width, also=(pad,))
    assert seen == [8, 8, 9]
    for number, moved in enumerate((state.clone(), state[:1].clone(), state[:, :514].clone(), state.double())):
        for _ in range(2):
            op.checked(check, "auto", moved, *given[1:], 4, also=(8,))
        assert seen[3:] == [8] * number
    inside = state.flatten()[:2].view(torch.int32)
    for lengths in (inside, given[2].clone(), inside):
        op.checked(check, "auto", state, given[1], lengths, given[3], 256, 4, also=(8,))
    assert len(seen) == 7  # the first one of the two, whose memory lies in the state's


def fresh() -> _registry.Op:
    """The op with no call remembered."""
    return dataclasses.replace(OP, calls=_calls.Calls(), passed=set())


@pytest.mark.parametrize("seed", range(40))
def test_overlap_is_seen(seed: int) -> None:
    """Against pairs compared byte by byte."""
    rng = random.Random(seed)
    memory = torch.zeros(60, dtype=torch.uint8)
    spans = []
    for _ in range(5):
        start = rng.randrange(60)
        spans.append(range(start, start + rng.randrange(0, min(14, 61 - start))))
    written = tuple(i for i in range(5) if rng.random() < 0.5)
    shared = any(set(spans[i]) & set(spans[j]) for i in written for j in range(5) if i != j)
    args = [memory[span.start : span.stop] for span in spans]
    args = [x if x.numel() else torch.empty(0, dtype=torch.uint8) for x in args]
    assert _signature.apart((*args, 3, None), written) == (not shared)


def test_written_arguments_are_those_of_the_schema() -> None:
    for op in _registry.ops.values():
        wanted = [i for i, x in enumerate(op.overload._schema.arguments) if x.alias_info and x.alias_info.is_write]
        assert op.written == tuple(wanted)


def test_values_on_the_host_are_always_checked() -> None:
    state = torch.zeros(2, 771, 8)
    rows, lengths, accepted = (torch.ones(2, dtype=torch.int32) for _ in range(3))
    clear_c128_draft_states_(state, rows, lengths, accepted, 256, 4)
    accepted[0] = 5
    with pytest.raises(InputError, match="accept_lens holds 5"):
        clear_c128_draft_states_(state, rows, lengths, accepted, 256, 4)


def test_memory_of_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "MOST_REMEMBERED", 3)
    calls = _calls.Calls()
    for n in range(3):
        calls.remember((n,))
    assert all(calls.known((n,)) for n in range(3))
    calls.remember((3,))
    assert [calls.known((n,)) for n in range(4)] == [False, False, False, True]


def test_facts_tell_calls_apart(device: str) -> None:
    memory = torch.zeros(64, device=device)
    x = memory[:16].view(4, 4)
    others = [memory[1:17].view(4, 4), x.view(2, 8), x.view(torch.int32), x.t(), x.view(16)]
    facts = [_calls.facts_of((y, 3, 0.5, None)) for y in (x, *others)]
    facts += [_calls.facts_of(args) for args in ((x, 4, 0.5, None), (x, 3, 1.5, None), (x, 3, None, 0.5))]
    assert None not in facts
    assert len(set(facts)) == len(facts)
    assert _calls.facts_of((memory[:16].view(4, 4), 3, 0.5, None)) == facts[0]
    for odd in (x.as_subclass(Wrapped), torch.zeros(4, device=device, requires_grad=True), "name", True):
        assert _calls.facts_of((x, odd)) is None


class Wrapped(torch.Tensor):
    """A tensor whose memory need not be where it says."""


class Seen(TorchDispatchMode):
    """Notes the operators that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def clear_args(device: str) -> tuple[Any, ...]:
    ones = (torch.ones(2, dtype=torch.int32, device=device) for _ in range(3))
    return (torch.zeros(2, 771, 8, device=device), *ones, 256, 4)


def test_who_watches_operators_sees_every_call(device: str) -> None:
    given = clear_args(device)
    clear_c128_draft_states_(*given)
    assert _calls.undisturbed()
    with Seen() as seen:
        assert not _calls.undisturbed()
        for _ in range(2):
            clear_c128_draft_states_(*given)
    assert seen.names == [OP.qualified_name + ".default"] * 2 or seen.names == [OP.qualified_name] * 2
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(2):
            clear_c128_draft_states_(*given)
    assert [event.count for event in profile.key_averages() if event.key == OP.qualified_name] == [2]
    assert _calls.undisturbed()


class Compiled:
    """A compiled kernel that notes what it is run with."""

    function, packed_metadata = 7, (1, 2, 3)

    def __init__(self) -> None:
        self.runs: list[tuple[Any, ...]] = []

    def run(self, *given: Any) -> None:
        self.runs.append(given)


def test_a_launch_is_repeated_only_where_it_would_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("dsv4_npu.ops._launch", reason="triton is not installed")
    here = {"_cuda_getDevice": 1, "_cuda_isCurrentStreamCapturing": False, "_cuda_getCurrentRawStream": 77}
    for name in here:
        monkeypatch.setattr(torch._C, name, lambda *index, name=name: here[name], raising=False)
    compiled, seen = Compiled(), []
    monkeypatch.setattr(launch, "observers", [seen.append])
    repeat = launch._repeat(compiled, launch.Launch("kernel", 5), 1, 77, [11, 12])
    for _ in range(2):
        assert repeat()
    assert compiled.runs == [(5, 1, 1, 77, 7, (1, 2, 3), None, None, None, 11, 12)] * 2
    assert seen == [launch.Launch("kernel", 5)] * 2
    for name, other in (
        ("_cuda_getDevice", 0),
        ("_cuda_isCurrentStreamCapturing", True),
        ("_cuda_getCurrentRawStream", 78),
    ):
        was, here[name] = here[name], other
        assert not repeat()
        here[name] = was
    hooks = launch.triton.knobs.runtime.launch_enter_hook
    hook = seen.append
    hooks.add(hook)
    try:
        assert not repeat()
    finally:
        hooks.remove(hook)
    assert repeat()
    assert len(compiled.runs) == len(seen) == 3


def test_only_a_single_launch_is_recorded() -> None:
    def launches(*repeats: Any) -> Any:
        return lambda: _calls.recording.launches.extend(repeats)  # type: ignore[union-attr]

    def repeat() -> bool:
        return True

    assert _calls.recorded(launches(repeat), ()) is repeat
    for others in ((), (None,), (repeat, repeat), (repeat, None)):
        assert _calls.recorded(launches(*others), ()) is None
    assert _calls.recording.launches is None
    with pytest.raises(ZeroDivisionError):
        _calls.recorded(lambda: 1 // 0, ())  # type: ignore[arg-type]
    assert _calls.recording.launches is None
