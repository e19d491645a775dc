"""A Triton kernel through Ascend's compilers: Triton IR, linalg IR, BiSheng's scheduled module."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .toolchain import Target, ToolError, bisheng_bin, complaint

SCHEDULED = "module.hivm.opt.mlir"


@dataclass(frozen=True)
class Scheduled:
    """The module as BiSheng schedules it, and the unified-buffer bits that the compiler itself printed (A5 only)."""

    text: str
    printed_bits: int | None


def lower(source: Any, target: Target, options: dict[str, Any]) -> str:
    """Linalg IR of Ascend's Triton adapter for a ``triton.compiler.ASTSource``.

    ``options`` are the launch options that the kernel was called with; the front end refuses unknown ones itself.
    """
    from triton._C.libtriton import ir
    from triton.backends.ascend import compiler as ascend
    from triton.backends.compiler import GPUTarget

    backend = ascend.AscendBackend(GPUTarget("npu", target.arch, 0))
    parsed = backend.parse_options({**options, "compile_on_910_95": target.a5})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(parsed, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"target": backend.target, **parsed.__dict__, "hash": "unused"}
    module = ascend.make_ttir(module, metadata, parsed)
    try:
        return str(ascend.ttir_to_linalg(module, metadata, parsed, named_ops=True))
    except subprocess.CalledProcessError as error:
        raise ToolError(f"{target.arch}: triton-adapter-opt: {complaint(error.stderr.decode())}") from error


def element_loops(linalg: str) -> int:
    """The loops into which the front end has broken a load or store of scattered elements (rows of 32 bytes and more
    stay whole)."""
    lines = linalg.splitlines()
    found = 0
    for end, line in enumerate(lines):
        indent = line[: len(line) - len(line.lstrip())]
        if not line.startswith(f"{indent}}} {{ExtractedLoadOrStore"):
            continue
        start = max(k for k in range(end) if re.match(rf"{indent}(?:%\S+ = )?scf\.for\b", lines[k]))
        nested = [k for k in range(start + 1, end) if re.match(rf"{indent}  (?:%\S+ = )?scf\.for\b", lines[k])]
        body = lines[start + 1 : nested[0] if nested else end]
        found += any("memref.reinterpret_cast" in line and "sizes: [1]," in line for line in body)
    return found


def schedule(linalg: str, target: Target, folder: Path) -> Scheduled:
    """BiSheng's scheduled module for the linalg IR; raises ToolError when the compiler refuses.

    The compiler's last step is an external program (hivmc) that only CANN has. Everything before it has passed when
    the scheduled module is there and the run ended for want of that program alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scheduled = folder / SCHEDULED
    scheduled.unlink(missing_ok=True)
    source = folder / "kernel.mlir"
    source.write_text(re.sub(r', mix_mode\s*=\s*"[^"]*"', "", linalg))
    command = [
        str(bisheng_bin() / target.compiler),
        str(source),
        f"--target={target.arch}",
        "--enable-auto-multi-buffer=True",
        "--enable-auto-bind-sub-block=True",
        "--enable-hfusion-compile=true",
        "--enable-hivm-compile=true",
        "--enable-triton-kernel-compile=true",
        f"--save-temps={folder}",
        "-o",
        str(folder / "kernel.o"),
    ]
    if target.a5:
        command.append("--enable-print-memory-allocated-size")
    run = subprocess.run(command, capture_output=True, text=True)
    output = run.stdout + run.stderr
    if not scheduled.exists() or (run.returncode and "Cannot find hivmc" not in output):
        raise ToolError(f"{target.arch}: {target.compiler}: {complaint(output)}")
    printed = re.findall(r"Allocated UB size = (\d+) bits", output)
    return Scheduled(scheduled.read_text(), int(printed[-1]) if printed else None)
