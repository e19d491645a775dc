from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4_npu.errors import InputError
from dsv4_npu.ops import clear_c128_draft_states_

LAYERS, RING = 3, 256


def make_case(bs: int, width: int, half: int, *, index: torch.dtype = torch.int64, seed: int = 0) -> dict[str, Any]:
    """Random requests on distinct rows 1..bs; row 0 belongs to nobody."""
    gen = torch.Generator().manual_seed(seed)
    ring = RING if bs < 100 else 130  # the smallest ring that allows a width above 1 keeps large batches small
    return {
        "state": torch.rand(LAYERS, (bs + 1) * ring + 3, 2 * half, generator=gen),
        "req_pool_indices": (torch.randperm(bs, generator=gen) + 1).to(index),
        "seq_lens": torch.randint(0, 10_000, (bs,), generator=gen).to(index),
        "accept_lens": torch.randint(1, width + 1, (bs,), generator=gen).to(index),
        "ring_size": ring,
        "num_draft_tokens": width,
    }


def expected(case: dict[str, Any]) -> torch.Tensor:
    """Decided per state row, the other way round than the op: which position of the verify would land here?"""
    state, ring = case["state"].clone(), case["ring_size"]
    half = state.shape[2] // 2
    requests = (case[k].tolist() for k in ("req_pool_indices", "seq_lens", "accept_lens"))
    for request, seq, accept in zip(*requests, strict=True):
        first, end = seq + accept, seq + case["num_draft_tokens"]
        for slot in range(ring):
            latest = (end - 1) - (end - 1 - slot) % ring
            if latest >= first:
                state[:, request * ring + slot] = torch.tensor([0.0] * half + [-torch.inf] * half)
    return state


def check(run: Callable[..., None], cases: list[dict[str, Any]], device: str = "cpu") -> None:
    for case in cases:
        want = expected(case)
        arguments = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in case.items()}
        arguments["state"] = arguments["state"].clone()
        assert run(**arguments) is None
        assert torch.equal(arguments["state"].cpu(), want)


@pytest.mark.parametrize("width", range(1, 10))
@pytest.mark.parametrize("bs", [0, 1, 3])
def test_equals_the_rule_for_every_width(target: Any, bs: int, width: int) -> None:
    shapes = ((5, torch.int32), (512, torch.int64))
    cases = [make_case(bs, width, half, index=index, seed=width) for half, index in shapes]
    check(lambda **kw: clear_c128_draft_states_(**kw, backend=target.backend), cases, target.device)


def test_large_batch(target: Any) -> None:
    check(lambda **kw: clear_c128_draft_states_(**kw, backend=target.backend), [make_case(257, 4, 3)], target.device)


def test_double_state(target: Any) -> None:
    case = make_case(3, 6, 7)
    case["state"] = case["state"].double()
    check(lambda **kw: clear_c128_draft_states_(**kw, backend=target.backend), [case], target.device)


def test_widest_legal_verify(target: Any) -> None:
    case = make_case(2, 130, 2)
    case["accept_lens"][:] = 1
    check(lambda **kw: clear_c128_draft_states_(**kw, backend=target.backend), [case], target.device)


def test_padded_row_touches_only_the_reserved_bank(target: Any) -> None:
    case = make_case(3, 5, 4)
    case["req_pool_indices"] = torch.tensor([2, 0, 0])
    before = case["state"].clone()
    state = case.pop("state").to(target.device)
    rest = {k: v.to(target.device) if isinstance(v, torch.Tensor) else v for k, v in case.items()}
    clear_c128_draft_states_(state, **rest, backend=target.backend)
    after = state.cpu()
    assert torch.equal(after[:, RING : 2 * RING], before[:, RING : 2 * RING])
    assert torch.equal(after[:, 3 * RING :], before[:, 3 * RING :])


def mutant(name: str) -> Callable[..., None]:
    def run(
        state: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        accept_lens: torch.Tensor,
        ring_size: int,
        num_draft_tokens: int,
    ) -> None:
        half = state.shape[2] // 2
        first = -1 if name == "one accepted row too many" else 0
        shift = 1 if name == "ring address off by one" else 0
        layers = slice(0, -1) if name == "a layer left out" else slice(None)
        for b in range(len(seq_lens)):
            for o in range(int(accept_lens[b]) + first, num_draft_tokens):
                row = int(req_pool_indices[b]) * ring_size + (int(seq_lens[b]) + o + shift) % ring_size
                if name == "ring not wrapped":
                    row = int(req_pool_indices[b]) * ring_size + min(int(seq_lens[b]) % ring_size + o, ring_size - 1)
                state[layers, row, :half] = -torch.inf if name == "halves swapped" else 0
                state[layers, row, half:] = 0 if name == "halves swapped" else -torch.inf

    return run


@pytest.mark.parametrize(
    "name",
    ["one accepted row too many", "ring address off by one", "a layer left out", "ring not wrapped", "halves swapped"],
)
def test_the_check_sees_a_broken_clear(name: str) -> None:
    cases = [make_case(3, 6, 4, seed=seed) for seed in range(3)]
    cases[0]["seq_lens"][:] = RING - 3
    check(mutant("none"), cases)
    with pytest.raises(AssertionError):
        check(mutant(name), cases)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ring_size": 8, "num_draft_tokens": 10}, "num_draft_tokens is 10; allowed: at most 0"),
        ({"ring_size": 128, "num_draft_tokens": 4}, "num_draft_tokens is 4; allowed: at most 0"),
        ({"num_draft_tokens": 131}, "num_draft_tokens is 131; allowed: at most 130"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0"),
        ({"ring_size": 0}, "ring_size is 0"),
        ({"write_pad": 3}, "num_draft_tokens is 4; allowed: at most 3"),
        ({"accept_lens": torch.tensor([1, 5])}, "accept_lens holds 5; allowed: 1 to 4"),
        ({"accept_lens": torch.tensor([0, 1])}, "accept_lens holds 0"),
        ({"req_pool_indices": torch.tensor([1, 3])}, "req_pool_indices holds 3; allowed: 0 to 2"),
        ({"req_pool_indices": torch.tensor([-1, 1])}, "req_pool_indices holds -1"),
        ({"seq_lens": torch.tensor([-1, 1])}, "seq_lens holds -1"),
        ({"seq_lens": torch.tensor([1])}, "seq_lens has shape"),
        ({"seq_lens": torch.tensor([1.0, 2.0])}, "seq_lens has dtype torch.float32"),
        ({"seq_lens": torch.tensor([1, 2, 3, 4])[::2]}, "seq_lens is not contiguous"),
        ({"seq_lens": torch.tensor([1, 2], device="meta")}, "seq_lens is on meta"),
        ({"state": torch.zeros(2, 771, 5)}, "state has rows of 5"),
        ({"state": torch.zeros(2, 771, 8, dtype=torch.bfloat16)}, "state has dtype"),
        ({"state": torch.zeros(771, 8)}, "state has shape"),
        ({"state": torch.zeros(2, 8, 771).transpose(1, 2)}, "state is not contiguous"),
        ({"backend": "gpu"}, "backend is 'gpu'; allowed: auto, cpu, triton, ref"),
    ],
)
def test_refused_by_name_and_unchanged(change: dict[str, Any], named: str) -> None:
    case = make_case(2, 4, 4) | change
    before = case["state"].clone()
    with pytest.raises(InputError, match=r"clear_c128_draft_states_: ") as caught:
        clear_c128_draft_states_(**case)
    assert named in str(caught.value)
    assert torch.equal(case["state"], before)


def test_refuses_indices_inside_the_state() -> None:
    memory = torch.zeros(2 * 771 * 8 + 4)
    state = memory[: 2 * 771 * 8].view(2, 771, 8)
    inside, beside = memory[:2].view(torch.int32), memory[2 * 771 * 8 :][:2].view(torch.int32)
    fine = torch.ones(2, dtype=torch.int32)
    with pytest.raises(InputError, match="seq_lens shares memory with state"):
        clear_c128_draft_states_(state, fine, inside, fine, RING, 4)
    clear_c128_draft_states_(state, fine, beside, fine, RING, 4)
    shared = state.numpy()
    other = torch.from_numpy(shared)[0, 0, :2].view(torch.int32)
    with pytest.raises(InputError, match="req_pool_indices shares memory with state"):
        clear_c128_draft_states_(state, other, fine, fine, RING, 4)


def test_the_bare_cpp_op_refuses_to_write_outside() -> None:
    from dsv4_npu.ops import _registry

    if _registry.extension_problem:
        pytest.skip(_registry.extension_problem)
    state = torch.zeros(2, 300, 4)
    one = torch.tensor([1])
    with pytest.raises(RuntimeError, match="outside the state"):
        torch.ops.dsv4_npu.clear_c128_draft_states_(state, one, torch.tensor([60]), one, RING, 4)
    assert not state.any()


def test_opcheck() -> None:
    case = make_case(3, 5, 4)
    torch.library.opcheck(torch.ops.dsv4_npu.clear_c128_draft_states_.default, tuple(case.values()))
