"""Checks of a call that was seen before are skipped: only where nothing they look at has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_npu.errors import InputError
from dsv4_npu.ops import _checks, clear_c128_draft_states_
from dsv4_npu.ops.clear_c128_draft_states import check

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


def test_a_call_that_passed_is_not_checked_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.zeros(2, 771, 8, device=device)
    given = (state, *(torch.ones(2, dtype=torch.int32, device=device) for _ in range(3)), 256, 4, None)
    check(*given)
    monkeypatch.setitem(check.__wrapped__.__globals__, "check_tensor", None)  # type: ignore[attr-defined]
    check(*given)
    with pytest.raises(TypeError):
        check(*given[:4], 256, 5, None)


def test_values_on_the_host_are_always_checked() -> None:
    state = torch.zeros(2, 771, 8)
    rows, lengths, accepted = (torch.ones(2, dtype=torch.int32) for _ in range(3))
    clear_c128_draft_states_(state, rows, lengths, accepted, 256, 4)
    accepted[0] = 5
    with pytest.raises(InputError, match="accept_lens holds 5"):
        clear_c128_draft_states_(state, rows, lengths, accepted, 256, 4)


def test_memory_of_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "MOST_REMEMBERED", 3)
    seen: list[int] = []
    once = _checks.remembered(seen.append)
    for n in (1, 2, 3, 1, 2, 3, 4, 1):
        once(n)
    assert seen == [1, 2, 3, 4, 1]
