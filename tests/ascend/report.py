"""docs/ascend.json (keys and results, one kernel a line) and docs/ascend.md (the same for people)."""

from __future__ import annotations

import json
from typing import Any

from . import keys

PAGE = keys.ROOT / "docs" / "ascend.md"

TEXT = """# The Triton kernels on Ascend, without an NPU

Written by `make ascend`; do not edit. Nothing on this page was run on an NPU: it says what Ascend's own compilers make
of the kernels, and that their intermediate form computes what the oracles say.

Each op's real launcher (`dsv4_npu/ops/<op>/triton.py`) is called with CPU tensors. A stand-in for the NPU driver sits
under Triton's JIT, so arguments are bound and specialised as on an NPU. Every kernel that is launched so is

1. **compiled** for Ascend910B3 (A2), Ascend910_9382 (A3) and Ascend950PR_9589 (A5): Triton IR, `triton-adapter-opt`
   (triton-ascend), `bishengir-compile` (ascendnpu-ir) up to the fully scheduled module. Only the last, external step
   (`hivmc`, part of CANN) is missing. A kernel that a compiler refuses or that exceeds the unified buffer fails.
2. **executed**: the linalg IR that Ascend's front end produced, lowered with LLVM {mlir} to an object for this CPU, is
   called once per program and its results are compared with `ref.py`, bit for bit unless the case says otherwise. Each
   launch runs four times: programs ascending, descending and shuffled on the IR of A2/A3, and once on the IR of A5;
   all must agree bit for bit. Buffers stand between guard zones, and guard zones, fresh outputs and on-chip buffers
   are filled with different bytes in different runs, so a read of what was never written shows as a difference.

What it does not show: timing, the hardware's own reduction order and transcendental functions, BiSheng's scheduling
(its synchronisation is reported, not executed), and races between programs, or between the load and the store pipe of
one core, other than by program order.

Tools: {tools}.

## Kernels

Sizes as served. Bytes are of the unified buffer of one vector core, double buffering included. *Barriers*, *waits* and
*stores* are instructions of the scheduled text, `inside loops / in all`: those inside loops run once per row or block.
*Element loops* move single elements between global memory and the core, one after another: correct, and slow where the
loop is long. *Aliased* arguments are given the same tensor, which the kernel writes; the compilers take arguments as
distinct, so such a kernel must hold a barrier of all pipes between its loads and its stores, or the proof fails.

| op | kernel | constants | element loops | aliased | chip | core | unified buffer | barriers | waits | stores |
|---|---|---|---|---|---|---|---|---|---|---|
{rows}

## Execution against the oracles

| op | kernels | points | specialisations compiled (times three chips) | largest unified buffer A2/A3, A5 |
|---|---|---|---|---|
{ops}

## Not carried

{not_carried} Variants that a launcher chooses on a GPU only (SHARED=True, AHEAD=True: several programs share a row by
atomics, and loads run ahead) are never launched on an NPU and so have no row.
"""


def load() -> dict[str, Any]:
    if not keys.RESULTS.is_file():
        return {"tools": {}, "ops": {}}
    content: dict[str, Any] = json.loads(keys.RESULTS.read_text())
    return content


def save(results: dict[str, Any]) -> None:
    """Write both files; the same results give the same bytes."""
    lines = ["{", f' "tools": {json.dumps(results["tools"], sort_keys=True)},', ' "ops": {']
    ops = sorted(results["ops"].items())
    for number, (op, entry) in enumerate(ops):
        head = {name: entry[name] for name in ("key", "points", "not_carried")}
        lines.append(f'  "{op}": {json.dumps(head)[:-1]}, "kernels": [')
        rows = [f"   {json.dumps(row)}" for row in entry["kernels"]]
        lines.append(",\n".join(rows))
        lines.append("  ]}" + ("," if number + 1 < len(ops) else ""))
    lines += [" }", "}"]
    keys.RESULTS.write_text("\n".join(lines) + "\n")
    PAGE.write_text(page(results))


def page(results: dict[str, Any]) -> str:
    ops = sorted(results["ops"].items())
    carried = [f"- `{name}` ({op}): {why}" for op, entry in ops for name, why in sorted(entry["not_carried"].items())]
    tools = results["tools"]
    return TEXT.format(
        mlir=tools.get("mlir", ""),
        tools=", ".join(f"{name} {version}" for name, version in sorted(tools.items())),
        rows="\n".join(line for op, entry in ops for line in kernel_lines(op, entry)),
        ops="\n".join(op_line(op, entry) for op, entry in ops),
        not_carried="\n".join(carried) or "Every kernel above is carried by both proofs.",
    )


def kernel_lines(op: str, entry: dict[str, Any]) -> list[str]:
    """The table's lines of one op: its kernels at served sizes on each chip; equal chips share a line."""
    lines = []
    for row in entry["kernels"]:
        if not row["production"]:
            continue
        chips: dict[str, list[str]] = {}
        for platform, facts in row["targets"].items():
            cells = (
                f"{facts['core_type']} | {facts['unified_buffer']} of {facts['budget']} | "
                f"{facts['barriers_row']} / {facts['barriers']} | {facts['waits_row']} / {facts['waits']} | "
                f"{facts['stores_row']} / {facts['stores']}"
            )
            chips.setdefault(cells, []).append(platform)
        constants = " ".join(f"{name}={value}" for name, value in row["constants"].items())
        pointers = ",".join(kind.removeprefix("*") for kind in row["types"].values() if kind.startswith("*"))
        for cells, platforms in chips.items():
            lines.append(
                f"| {op} | `{row['kernel']}` ({pointers}) | {constants} | {row['element_loops']} | "
                f"{', '.join(row['aliased'])} | {', '.join(platforms)} | {cells} |"
            )
    return lines


def op_line(op: str, entry: dict[str, Any]) -> str:
    rows = entry["kernels"]
    names = sorted({row["kernel"] for row in rows})
    executed = [f"`{name}`" for name in names if any(row["executed"] for row in rows if row["kernel"] == name)]
    largest = [
        max((row["targets"][platform]["unified_buffer"] for row in rows), default=0) for platform in ("A2", "A5")
    ]
    return f"| {op} | {', '.join(executed)} | {entry['points']} | {len(rows)} | {largest[0]}, {largest[1]} |"
