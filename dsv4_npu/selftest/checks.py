"""Runs the table of cases, the compressor's probe and a build of the pools."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from dsv4_npu.budget import PoolSizes, budget_of
from dsv4_npu.compressor.probe import Operator, probe
from dsv4_npu.config import CacheConfig
from dsv4_npu.errors import Dsv4NpuError
from dsv4_npu.pools import DSV4Pools
from dsv4_npu.selftest.case import FUNCTIONS
from dsv4_npu.selftest.far_cases import far_cases
from dsv4_npu.selftest.memory_cases import memory_cases
from dsv4_npu.selftest.sampling_cases import SGLANG_FUNCTIONS, handed_cases, sampling_cases

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
#: Ratio, ring, head dimension and verify width of what is probed: D = 6 is DSpark's.
COMPRESSORS = ((4, 16, 512, 6), (4, 16, 128, 6), (128, 256, 512, 6))


class Checked(Protocol):
    """A case of any kind."""

    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def slow(self) -> bool: ...
    def run(self, function: Callable[..., Any], device: torch.device) -> str:
        """What is wrong, in words, or "" ."""


@dataclass(frozen=True)
class Result:
    """The outcome of one case; ``detail`` says what is wrong, or why it was skipped."""

    op: str
    case: str
    outcome: str
    detail: str
    seconds: float


def table() -> list[Checked]:
    """Every case of every op."""
    return [*memory_cases(), *sampling_cases(), *handed_cases(), *far_cases()]


def run_cases(
    device: torch.device,
    interpreted: bool,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    cases: Sequence[Checked] | None = None,
) -> Iterator[Result]:
    """One result per case, in order. An op that raises has failed; nothing stops the rest.

    Args:
        interpreted: whether kernels run in Triton's interpreter, where slow cases are skipped.
        functions: what is tested, by op; this package's own by default.
    """
    functions = {**FUNCTIONS, **SGLANG_FUNCTIONS, **(functions or {})}
    for case in table() if cases is None else cases:
        if case.slow and interpreted:
            yield Result(case.op, case.name, SKIPPED, "too slow in Triton's interpreter", 0.0)
            continue
        began = time.perf_counter()
        try:
            wrong = case.run(functions[case.op], device)
        except MemoryError as error:
            yield Result(case.op, case.name, SKIPPED, str(error), time.perf_counter() - began)
            continue
        except Exception as error:  # whatever a device throws is this case's result
            wrong = f"raised {type(error).__name__}: {error}"
        yield Result(case.op, case.name, FAILED if wrong else PASSED, wrong, time.perf_counter() - began)


def probe_compressors(operator: Operator, device: torch.device) -> Iterator[Result]:
    """One result per kind of compressor, at the width of DSpark."""
    for ratio, ring, head_dim, width in COMPRESSORS:
        name = f"save rule of C{ratio}, D = {head_dim}, verify width {width}"
        began = time.perf_counter()
        try:
            found = probe(operator, ratio, ring, width, head_dim, device)
            outcome, detail = (PASSED if found.ok else FAILED), str(found)
        except Exception as error:
            outcome, detail = FAILED, f"raised {type(error).__name__}: {error}"
        yield Result("compressor", name, outcome, detail, time.perf_counter() - began)


def build_pools(config: CacheConfig, sizes: PoolSizes, device: torch.device | str) -> Result:
    """Allocate every slab, empty the state of one request in each, and compare bytes with the budget's."""
    name = f"{sizes.full_pages * config.page:,} tokens of {config.model.name} on {device}"
    began = time.perf_counter()
    try:
        pools = DSV4Pools(config, sizes, device=device, draft_stages=config.speculation.speculative)
        wanted, built = budget_of(config, sizes).pool_bytes, pools.usage_bytes()
        wrong = "" if built == wanted else f"{built:,} bytes were allocated, the budget says {wanted:,}"
        if not wrong and torch.device(device).type != "meta":
            state, ring = pools.c128_state.data, config.ring(128)
            FUNCTIONS["clear_request_states_"](state, torch.tensor([1], device=device), ring)
            half = state.shape[2] // 2
            bank = state[:, ring : 2 * ring].cpu()
            if not (bank[..., :half] == 0).all() or not bank[..., half:].isneginf().all():
                wrong = "the bank of request 1 is not empty after its clear"
    except (Dsv4NpuError, RuntimeError, MemoryError) as error:
        wrong, built = f"raised {type(error).__name__}: {error}", 0
    detail = wrong or f"{built / 2**30:.3f} GiB, as the budget says"
    return Result("pools", name, FAILED if wrong else PASSED, detail, time.perf_counter() - began)


def as_data(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Results as plain data."""
    return [asdict(one) for one in results]
