"""4096 requests with 8 drafts each: the launch of every op stays within Ascend's limit of 65535 programs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4_npu.ops import _registry

BATCH, DRAFTS, VOCAB = 4096, 8, 129280
LAYERS, RING, WIDTH, PAGE, HIDDEN = 31, 256, 1024, 128, 4096
LIMIT = 65535


def meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor without memory: a launcher looks at shapes only."""
    return torch.empty(shape, dtype=dtype, device="meta")


def state() -> torch.Tensor:
    return meta(LAYERS, (BATCH + 1) * RING, WIDTH, dtype=torch.float32)


def slab() -> torch.Tensor:
    return meta(LAYERS, 2048, PAGE, 1, 512, dtype=torch.bfloat16)


def outputs() -> tuple[torch.Tensor, ...]:
    return tuple(meta(*shape, dtype=torch.int32) for shape in ((BATCH * DRAFTS,), (BATCH, DRAFTS), (BATCH,)))


def tree(links: int) -> tuple[torch.Tensor, ...]:
    return (*outputs(), *(meta(BATCH, DRAFTS) for _ in range(links)))


def coins() -> tuple[torch.Tensor, ...]:
    return tuple(meta(*shape, dtype=torch.float32) for shape in ((BATCH, DRAFTS), (BATCH,), (BATCH, DRAFTS, VOCAB)))


def rows() -> torch.Tensor:
    return meta(BATCH * DRAFTS, VOCAB, dtype=torch.float32)


PATHS = (meta(BATCH, DRAFTS, dtype=torch.int32), meta(BATCH))
PREDICTED = meta(BATCH * DRAFTS, dtype=torch.int32)

CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "clear_c128_draft_states_": lambda: (state(), meta(BATCH), meta(BATCH), meta(BATCH), RING, DRAFTS),
    "clear_request_states_": lambda: (state(), meta(BATCH), RING),
    "move_kv_": lambda: (slab(), meta(BATCH, DRAFTS), meta(BATCH, DRAFTS)),
    "move_kv_ as one list": lambda: (slab(), meta(BATCH * DRAFTS), meta(BATCH * DRAFTS)),
    "compact_accept_": lambda: (PREDICTED, meta(BATCH * DRAFTS, HIDDEN, dtype=torch.bfloat16), *PATHS),
    "fill_bonus_tokens_": lambda: (meta(BATCH), PREDICTED, *PATHS),
    "gather_accepted_slots": lambda: (meta(BATCH * DRAFTS), *PATHS),
    "extend_slots": lambda: (
        meta(BATCH + 1, 64, dtype=torch.int32),
        *(meta(BATCH) for _ in range(3)),
        PAGE,
        BATCH * DRAFTS,
        64,
    ),
    "verify_tree_greedy": lambda: tree(5),
    "chain_speculative_sampling": lambda: (
        *tree(2),
        *coins(),
        meta(BATCH, DRAFTS - 1, VOCAB, dtype=torch.float32),
    ),
    "tree_speculative_sampling_target_only": lambda: (*tree(4), *coins(), 1.0, 1.0),
    "top_k_renorm_prob": lambda: (rows(), meta(BATCH * DRAFTS)),
    "top_p_renorm_prob": lambda: (rows(), meta(BATCH * DRAFTS, dtype=torch.float32)),
}


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The grids that launches ask for; nothing is run."""
    jit = pytest.importorskip("triton.runtime.jit", reason="triton is not installed")
    seen: list[tuple[int, ...]] = []

    def note(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        seen.append(grid)
        return lambda *args, **constants: None

    monkeypatch.setattr(jit.KernelInterface, "__getitem__", note)
    return seen


def launch_module() -> Any:
    return importlib.import_module("dsv4_npu.ops._launch")


def test_every_op_is_here() -> None:
    assert {call.split()[0] for call in CALLS} == set(_registry.ops)


@pytest.mark.parametrize("call", CALLS)
def test_the_grid_on_an_npu(call: str, grids: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """One dimension, one program per vector core; by the smallest NPU's number where the driver does not tell."""
    launch = launch_module()
    rule = launch.program_limit.__wrapped__
    assert rule("npu", 0) == launch.FEWEST_VECTOR_CORES
    monkeypatch.setattr(launch, "program_limit", lambda kind, index: rule("npu", index))
    _registry.ops[call.split()[0]].triton()(*CALLS[call]())
    assert grids == [(launch.FEWEST_VECTOR_CORES,)] * len(grids)
    assert 1 <= len(grids) <= 2


@pytest.mark.parametrize("call", CALLS)
def test_the_grid_on_any_device(call: str, grids: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many programs a device would take at once."""
    launch = launch_module()
    monkeypatch.setattr(launch, "program_limit", lambda *device: 10**9)
    _registry.ops[call.split()[0]].triton()(*CALLS[call]())
    assert grids
    assert all(len(grid) == 1 and 1 <= grid[0] <= LIMIT for grid in grids)


def test_without_the_cap_a_grid_is_too_large(grids: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself."""
    launch = launch_module()
    monkeypatch.setattr(launch, "program_limit", lambda *device: 10**9)
    monkeypatch.setattr(launch, "MOST_PROGRAMS", 10**9)
    _registry.ops["clear_c128_draft_states_"].triton()(*CALLS["clear_c128_draft_states_"]())
    assert grids == [(BATCH * LAYERS,)]
    assert grids[0][0] > LIMIT


def test_an_npu_that_tells_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launch_module()

    class Driver:
        class active:  # noqa: N801 (Triton's name)
            class utils:  # noqa: N801
                @staticmethod
                def get_device_properties(index: int) -> dict[str, int]:
                    return {"num_vectorcore": 48 + index}

    monkeypatch.setattr(launch.triton.runtime, "driver", Driver)
    assert launch.program_limit.__wrapped__("npu", None) == 48
    assert launch.program_limit.__wrapped__("npu", 1) == 49
