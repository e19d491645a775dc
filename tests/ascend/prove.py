"""All proofs of one op, in a process of its own: ``python -m tests.ascend.prove OP RESULT.json``."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from . import keys
from .case import Case, equal
from .lowering import element_loops, schedule
from .machine import Machine, Specialization, active
from .schedule import orders_aliases, read
from .toolchain import TARGETS, ToolError


def prove(op: str, folder: Path) -> dict[str, Any]:
    """Run every case of ``op`` on the CPU and compile every kernel that they launch; a dictionary for docs/ascend.json.

    ``failures`` lists what went wrong, in words; an op without failures is proven.
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(
        True, warn_only=True
    )  # torch.empty then fills its result with NaN or the maximum
    module = importlib.import_module(f"{__package__}.cases.{op}")
    not_carried: dict[str, str] = getattr(module, "NOT_CARRIED", {})
    machine = Machine(folder)
    production: set[str] = set()
    executed: dict[str, int] = {}
    failures: list[str] = []
    points = 0
    for case in module.cases():
        before = {key: kernel.launches for key, kernel in machine.kernels.items()}
        try:
            problem = _run(case, machine)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        if problem:
            failures.append(f"{op} at {case.label}: {problem}")
        points += case.execute
        launched = {key for key, kernel in machine.kernels.items() if kernel.launches > before.get(key, 0)}
        if case.production:
            production |= launched
        for key in launched if case.execute else ():
            executed[key] = executed.get(key, 0) + 1
    rows = []
    for key, kernel in machine.kernels.items():
        row, problems = _compile(kernel)
        row |= {"production": key in production, "executed": executed.get(key, 0)}
        rows.append(row)
        failures += problems
    launched_names = {kernel.kernel for kernel in machine.kernels.values()}
    failures += [f"{op}: no case launches {name}" for name in keys.kernels(op) if name not in launched_names]
    executed_names = {machine.kernels[key].kernel for key in executed} | set(not_carried)
    failures += [
        f"{op}: {name} is not executed on the CPU and not named in NOT_CARRIED"
        for name in launched_names - executed_names
    ]
    rows.sort(key=lambda row: (row["kernel"], not row["production"], row["key"]))
    return {"points": points, "not_carried": not_carried, "kernels": rows, "failures": sorted(failures)}


def _run(case: Case, machine: Machine) -> str | None:
    machine.execute = case.execute
    with active(machine, case.programs):
        actual = case.actual()
    if not case.execute:
        return None
    return (case.agree or equal)(actual, case.expected())


def _compile(kernel: Specialization) -> tuple[dict[str, Any], list[str]]:
    targets, problems, loops = {}, [], 0
    for target in TARGETS:
        try:
            scheduled = schedule(kernel.ir(target), target, kernel.folder / target.platform)
            targets[target.platform] = dataclasses.asdict(read(scheduled, target))
            loops = max(loops, element_loops(kernel.ir(target)))
            if kernel.aliased and not orders_aliases(scheduled):
                shared = ", ".join(sorted(kernel.aliased))
                raise ToolError(f"{shared} share a tensor, and no tl.debug_barrier() orders loads before stores")
        except Exception as error:
            problems.append(
                f"{kernel.kernel} {kernel.constants} for {target.platform}: {type(error).__name__}: {error}"
            )
    row = {
        "kernel": kernel.kernel,
        "key": kernel.key,
        "types": kernel.types,
        "constants": {name: _plain(value) for name, value in kernel.constants.items()},
        "aliased": sorted(kernel.aliased),
        "element_loops": loops,
        "targets": targets,
    }
    return row, problems


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool) else str(value)


def main() -> None:
    op, result = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="ascend-") as folder:
        outcome = prove(op, Path(folder))
    Path(result).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
