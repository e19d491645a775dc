"""Linalg IR of Ascend's front end, as a shared object that computes one program of the grid on the CPU."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import torch

from .toolchain import LLVM, MLIR_RUNTIME, ToolError, tool

PASSES = (
    "--inline",
    "--convert-elementwise-to-linalg",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-func-to-llvm",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)
SCALARS = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}


def supply_library_calls(linalg: str) -> str:
    """The IR with bodies for the calls that BiSheng's device library would serve, and without barriers.

    A barrier orders the pipes of one core; a program on the CPU runs in order anyway. Of the library, the cumulative
    sum is supplied; a kernel with another call (sort, gather, histogram) is not carried, and says so.
    """
    linalg = re.sub(r"^\s*gpu\.barrier.*\n", "", linalg, flags=re.MULTILINE)
    linalg = re.sub(
        r"^  func\.func private @(triton_cumsum\w*)\((tensor<\S+>), i32, i1\) -> tensor<\S+>$",
        lambda match: _cumsum(match[1], match[2], linalg),
        linalg,
        flags=re.MULTILINE,
    )
    if foreign := re.search(r"^  func\.func private @(\w+)\([^%]*$|\b(hfusion\.\w+)", linalg, flags=re.MULTILINE):
        raise ToolError(f"not carried: the IR calls {foreign[1] or foreign[2]}, which only Ascend's device library has")
    return linalg


def _cumsum(name: str, tensor: str, linalg: str) -> str:
    """A definition of the cumulative sum: element k along the axis becomes element k plus sum k - 1."""
    calls = set(re.findall(rf"call @{name}\([^,]*, (%\w+), (%\w+)\)", linalg))
    if len(calls) != 1:
        raise ToolError(f"{name} is called with different axes")
    axis_value, reverse = calls.pop()
    if not reverse.startswith("%false"):
        raise ToolError(f"not carried: {name} runs in reverse")
    axis_text = re.search(rf"{re.escape(axis_value)} = arith\.constant (\d+) : i32", linalg)
    if axis_text is None:
        raise ToolError(f"{name}: the axis {axis_value} is no constant")
    axis = int(axis_text[1])
    *shape, element = tensor.removeprefix("tensor<").removesuffix(">").split("x")
    add = "arith.addf" if "f" in element else "arith.addi"
    here = ", ".join(f"%i{k}" for k in range(len(shape)))
    before = ", ".join("%p" if k == axis else f"%i{k}" for k in range(len(shape)))
    rank = len(shape)
    head = [f"  func.func private @{name}(%x: {tensor}, %axis: i32, %reverse: i1) -> {tensor} {{"]
    head += ["%zero = arith.constant 0 : index", "%one = arith.constant 1 : index"]
    head += [f"%n{k} = arith.constant {size} : index" for k, size in enumerate(shape)]
    opening, closing = [], []
    carried = "%x"
    for k in range(rank):
        start = "%one" if k == axis else "%zero"
        opening.append(
            f"%r{k} = scf.for %i{k} = {start} to %n{k} step %one iter_args(%t{k} = {carried}) -> ({tensor}) {{"
        )
        carried = f"%t{k}"
        closing.append("}" if k == 0 else f"}}\nscf.yield %r{k} : {tensor}")
    body = [
        f"%p = arith.subi %i{axis}, %one : index",
        f"%a = tensor.extract {carried}[{before}] : {tensor}",
        f"%b = tensor.extract {carried}[{here}] : {tensor}",
        f"%s = {add} %a, %b : {element}",
        f"%w = tensor.insert %s into {carried}[{here}] : {tensor}",
        f"scf.yield %w : {tensor}",
    ]
    closing = [f"}}\nscf.yield %r{k} : {tensor}" for k in range(rank - 1, 0, -1)] + ["}", f"return %r0 : {tensor}", "}"]
    return "\n".join(head + opening + body + closing)


class CpuObject:
    """The compiled object of one kernel."""

    def __init__(self, linalg: str, folder: Path) -> None:
        """Build it in ``folder``; raises ToolError when the route cannot carry the kernel."""
        signature = re.search(r"func\.func @(\w+)\((.*?)\) attributes", linalg, flags=re.DOTALL)
        if signature is None:
            raise ToolError("the linalg IR has no kernel function")
        self.types = re.findall(r"%arg\d+: ([^,{]+?)\s*(?:\{[^}]*\})?(?:,|$)", signature[2])
        library = ctypes.CDLL(str(_build(supply_library_calls(linalg), folder)))
        self._reset = library.ascend_arena_reset
        self._function: Any = getattr(library, signature[1])
        self._function.restype = None

    def run(self, args: list[Any], grid: tuple[int, int, int], programs: list[int], poison: int) -> None:
        """Compute the given programs (indices into the grid, x fastest) in that order.

        ``args`` are addresses with element counts for pointers, numbers for scalars; ``poison`` is the byte that fresh
        buffers hold.
        """
        for program in programs:
            place = (program % grid[0], program // grid[0] % grid[1], program // grid[0] // grid[1])
            values = [(0, 0), (0, 0), *args, *grid, *place]
            if len(values) != len(self.types):
                raise ToolError(f"the kernel takes {len(self.types)} arguments, {len(values)} were given")
            flat: list[Any] = []
            for kind, value in zip(self.types, values, strict=True):
                if kind.startswith("memref"):
                    address, count = value
                    pointer = ctypes.c_void_p(address)
                    flat += [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(count), ctypes.c_int64(1)]
                else:
                    flat.append(SCALARS[kind](value))
            self._reset(poison)
            self._function(*flat)
        self._reset(poison)


def _build(linalg: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    source, lowered, module, optimised, code, result = (
        folder / name for name in ("cpu.mlir", "cpu.llvm.mlir", "cpu.ll", "cpu.opt.ll", "cpu.o", "cpu.so")
    )
    source.write_text(linalg)
    tool(LLVM / "bin" / "mlir-opt", source, *PASSES, "-o", lowered)
    tool(LLVM / "bin" / "mlir-translate", "--mlir-to-llvmir", lowered, "-o", module)
    module.write_text(re.sub(r"@malloc\b", "@ascend_arena_alloc", module.read_text()))
    tool(LLVM / "bin" / "opt", "-O1", "-S", module, "-o", optimised)
    tool(LLVM / "bin" / "llc", "-O2", "-filetype=obj", "-relocation-model=pic", optimised, "-o", code)
    runtime = Path(__file__).parent / "runtime.c"
    library = LLVM / "lib"
    link = (f"-L{library}", f"-l:{MLIR_RUNTIME}", f"-Wl,-rpath,{library}", "-lm", "-Wl,-z,defs")
    tool("gcc", "-O2", "-shared", "-fPIC", "-o", result, code, runtime, *link)
    return result


def element_count(tensor: torch.Tensor) -> int:
    """How many elements lie between a tensor's first and the end of its storage."""
    return tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
