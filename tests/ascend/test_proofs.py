"""The proofs notice what they are for. Runs in .venv-ascend: ``make ascend-test``."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton.backends.ascend", reason="needs triton-ascend: make ascend-test")

from triton.compiler.errors import CompilationError

from . import kernels, keys, prove
from .cases import (
    chain_speculative_sampling,
    clear_c128_draft_states,
    move_kv,
    top_k_renorm_prob,
    tree_speculative_sampling_target_only,
    verify_tree_greedy,
)
from .cpu_object import CpuObject
from .lowering import Scheduled, element_loops, schedule
from .machine import FILLINGS, LaunchError, Machine, Specialization, active
from .schedule import _allocated, orders_aliases, read
from .toolchain import TARGETS, ToolError, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason="; ".join(missing()))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    with active(Machine(tmp_path), programs=3) as machine:
        yield machine


def run(kernel: object, length: int = 100, block: int = 32, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x, y = values(length), torch.zeros(length, dtype=dtype)
    kernel[(3,)](x, y, length, BLOCK=block)  # type: ignore[index]
    return y


def values(length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(length))


def only(machine: Machine) -> Specialization:
    (kernel,) = machine.kernels.values()
    return kernel


@pytest.mark.parametrize("length", [1, 31, 32, 33, 96, 100])
def test_a_right_kernel_equals_torch_through_ascends_ir(machine: Machine, length: int) -> None:
    assert torch.equal(run(kernels.double, length), 2 * values(length))


def test_a_wrong_store_gives_other_results(machine: Machine) -> None:
    assert not torch.equal(run(kernels.wrong_store), 2 * values(100))


@pytest.mark.parametrize(
    "kernel",
    [kernels.write_beyond, kernels.read_beyond, kernels.last_program_wins],
    ids=lambda kernel: kernel.__name__,
)
def test_runs_that_differ_are_refused(machine: Machine, kernel: object) -> None:
    with pytest.raises(LaunchError):
        run(kernel, length=100, block=128)


def test_fresh_buffers_are_poisoned(tmp_path: Path) -> None:
    types = ", ".join(
        f"%arg{k}: {kind}" for k, kind in enumerate(["memref<?xi8>"] * 2 + ["memref<?xi8>"] + ["i32"] * 6)
    )
    linalg = f"""module {{
  func.func @copies_what_nobody_wrote({types}) attributes {{}} {{
    %fresh = memref.alloc() : memref<64xi8>
    %out = memref.reinterpret_cast %arg2 to offset: [0], sizes: [64], strides: [1] : memref<?xi8> to memref<64xi8>
    memref.copy %fresh, %out : memref<64xi8> to memref<64xi8>
    return
  }}
}}"""
    kernel, out = CpuObject(linalg, tmp_path), torch.zeros(64, dtype=torch.uint8)
    for poison in FILLINGS:
        kernel.run([(out.data_ptr(), 64)], (1, 1, 1), [0], poison)
        assert (out == poison).all()


def test_the_supplied_running_sum(machine: Machine) -> None:
    assert torch.allclose(run(kernels.running_sum, 100, 128), values(100).cumsum(0), atol=1e-5)
    for axis in (0, 1):
        x, y = torch.arange(32.0), torch.zeros(32)
        kernels.running_sum_of_rows[(1,)](x, y, 32, ROWS=4, COLUMNS=8, AXIS=axis)
        assert torch.equal(y.view(4, 8), x.view(4, 8).cumsum(axis))


def test_the_supplied_rounding_to_bfloat16(machine: Machine) -> None:
    assert torch.equal(run(kernels.to_bfloat16, 100, 128, torch.bfloat16), values(100).bfloat16())


def test_a_library_call_that_the_route_lacks_is_named(machine: Machine) -> None:
    with pytest.raises(ToolError, match=r"not carried.*triton_sort"):
        run(kernels.sorted_block, 64, 64)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.platform)
def test_a_block_over_the_unified_buffer_is_refused(machine: Machine, target: object, tmp_path: Path) -> None:
    machine.execute = False
    run(kernels.double, length=1 << 17, block=1 << 16)
    with pytest.raises(ToolError):
        read(schedule(only(machine).ir(target), target, tmp_path), target)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.platform)
def test_the_facts_of_a_schedule(machine: Machine, target: object, tmp_path: Path) -> None:
    machine.execute = False
    run(kernels.double, block=2048)
    scheduled = schedule(only(machine).ir(target), target, tmp_path)  # type: ignore[arg-type]
    facts = read(scheduled, target)  # type: ignore[arg-type]
    assert facts.core_type == "AIV"
    assert 2 * 2048 * 4 <= facts.unified_buffer <= 8 * 2048 * 4
    assert facts.stores == facts.stores_row == 1
    if scheduled.printed_bits is not None:
        assert _allocated(scheduled.text) * 8 == scheduled.printed_bits
    tight = dataclasses.replace(target, unified_buffer=facts.unified_buffer - 1)  # type: ignore[type-var]
    smaller = scheduled.text.replace(f'"UB_SIZE", {facts.budget * 8}', f'"UB_SIZE", {tight.unified_buffer * 8}')
    with pytest.raises(ToolError, match="over the budget"):
        read(Scheduled(smaller, scheduled.printed_bits), tight)


def test_a_type_that_the_chips_lack_is_refused(machine: Machine) -> None:
    x = torch.zeros(64, dtype=torch.float64)
    with pytest.raises(CompilationError, match="fp64"):
        kernels.double[(1,)](x, x.clone(), 64, BLOCK=64)


@pytest.mark.parametrize(("columns", "loops"), [(4, 1), (64, 0)])
def test_scattered_elements_are_counted_and_scattered_rows_are_not(machine: Machine, columns: int, loops: int) -> None:
    machine.execute = False
    kernels.turn_rows[(1,)](torch.zeros(8 * columns), torch.zeros(8), 8, ROWS=8, COLUMNS=columns)
    assert [element_loops(only(machine).ir(target)) for target in TARGETS] == [loops] * 3


def test_arguments_that_share_a_tensor_are_named(machine: Machine) -> None:
    x = torch.zeros(64)
    kernels.double[(1,)](x, x, 64, BLOCK=64)
    assert only(machine).aliased == {"x", "y"}


def test_a_tensor_that_is_only_read_may_be_shared(machine: Machine) -> None:
    x, y = torch.zeros(64), torch.zeros(64)
    kernels.add[(1,)](x, x, y, 64, BLOCK=64)
    assert only(machine).aliased == set()
    assert only(machine).accessed("0") == {"x", "y"}
    assert only(machine).accessed("12") == {"z"}


def test_an_argument_that_is_not_used_may_be_shared(machine: Machine) -> None:
    x = torch.zeros(64)
    kernels.clear[(1,)](x, x, 64, BLOCK=64)
    assert only(machine).aliased == set()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.platform)
def test_a_barrier_between_the_loads_and_stores_of_a_shared_tensor(
    machine: Machine, target: object, tmp_path: Path
) -> None:
    machine.execute = False
    for kernel in (kernels.swap, kernels.swap_ordered):
        x = torch.zeros(128)
        kernel[(1,)](x, x, 64, BLOCK=64)
    found = {
        kernel.kernel: orders_aliases(schedule(kernel.ir(target), target, tmp_path))  # type: ignore[arg-type]
        for kernel in machine.kernels.values()
    }
    assert found == {"swap": False, "swap_ordered": True}


MUTATIONS = [
    (clear_c128_draft_states, "range(accepted, num_draft_tokens)", "range(accepted + 1, num_draft_tokens)"),
    (clear_c128_draft_states, "% ring_size", "% (ring_size + 1)"),
    (verify_tree_greedy, "node = sibling", "node = node + 1"),
    (verify_tree_greedy, "(accepted + 1 < width) & ", ""),
    (chain_speculative_sampling, "(coin * q < p)", "(coin * q <= p)"),
    (chain_speculative_sampling, "tl.where(p > q, p - q, 0.0)", "p"),
    (tree_speculative_sampling_target_only, "tl.where(again > 0, 0.0, p)", "p"),
    (tree_speculative_sampling_target_only, "tl.where(column == token, 0.0, weight)", "weight"),
    (move_kv, "* ROW + column[None, :])", "* ROW + 0 * column[None, :])"),
]


def load(source: str, folder: Path) -> ModuleType:
    path = folder / "mutant.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("cases", "right", "wrong"), MUTATIONS)
def test_a_mutated_op_fails_its_proof(
    cases: ModuleType, right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(cases.triton.__file__).read_text()
    assert right in source, "the kernel was rewritten: choose another mutation"
    monkeypatch.setattr(cases, "triton", load(source.replace(right, wrong), tmp_path))
    machine = Machine(tmp_path)
    for case in cases.cases():
        try:
            if prove._run(case, machine):
                return
        except (LaunchError, ToolError):
            return
    pytest.fail(f"no case notices {wrong!r} in place of {right!r}")


def test_a_move_without_its_barrier_fails_its_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(move_kv.triton.__file__).read_text()
    assert source.count("tl.debug_barrier()") == 1
    monkeypatch.setattr(move_kv, "triton", load(source.replace("tl.debug_barrier()", "pass"), tmp_path))
    machine = Machine(tmp_path)
    case = next(case for case in move_kv.cases() if case.production)
    assert prove._run(case, machine) is None
    _, problems = prove._compile(only(machine))
    assert len(problems) == len(TARGETS)
    assert all("no tl.debug_barrier()" in problem for problem in problems)


def test_an_op_of_which_a_kernel_is_never_launched_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_k_renorm_prob, "cases", lambda: iter(()))
    failures = prove.prove("top_k_renorm_prob", tmp_path)["failures"]
    assert failures == [f"top_k_renorm_prob: no case launches {name}" for name in keys.kernels("top_k_renorm_prob")]
    assert failures
