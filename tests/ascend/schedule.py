"""What a scheduled module says: unified buffer, barriers, stores, core type."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from .lowering import Scheduled
from .toolchain import Target, ToolError

BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64}
BARRIER = re.compile(r"hivm\.hir\.pipe_barrier\b")
WAIT = re.compile(r"hivm\.hir\.wait_flag\b")
FULL_BARRIER = re.compile(r"hivm\.hir\.pipe_barrier\[<PIPE_ALL>\]")
STORE = re.compile(r"call @store_ubuf_to_gm|memref\.store .*address_space<gm>|hivm\.hir\.store\b")


@dataclass(frozen=True)
class Facts:
    """Counts of instructions in the scheduled text; ``_row``: of those inside loops, run once per row or block."""

    unified_buffer: int
    budget: int
    core_type: str
    barriers: int
    barriers_row: int
    waits: int
    waits_row: int
    stores: int
    stores_row: int


def read(module: Scheduled, target: Target) -> Facts:
    """The facts of a scheduled module; raises ToolError when it is over the unified buffer or not as expected."""
    text = module.text
    core = re.search(r"hivm\.module_core_type<(\w+)>", text)
    budget = re.search(r'"UB_SIZE", (\d+)', text)
    if core is None or budget is None:
        raise ToolError(f"{target.arch}: the scheduled module names no core type or no unified-buffer size")
    if int(budget[1]) != target.unified_buffer * 8:
        raise ToolError(
            f"{target.arch}: the compiler's unified buffer is {budget[1]} bits, not {target.unified_buffer} bytes"
        )
    used = max(_allocated(text), (module.printed_bits or 0) // 8)
    if used > target.unified_buffer:
        raise ToolError(f"{target.arch}: {used} bytes of unified buffer, over the budget of {target.unified_buffer}")
    counts = (count for pattern in (BARRIER, WAIT, STORE) for count in _per_loop(text, pattern))
    return Facts(used, target.unified_buffer, core[1], *counts)


def orders_aliases(module: Scheduled) -> bool:
    """Whether a barrier of all pipes stands inside a loop, as ``tl.debug_barrier`` puts it between loads and stores.

    The compiler takes pointer arguments as distinct, so without one a store may overtake a load of the same bytes.
    """
    return _per_loop(module.text, FULL_BARRIER)[1] > 0


def _allocated(text: str) -> int:
    """The highest byte that any buffer of the unified buffer reaches; offsets are constants of the module."""
    constants: dict[str, int] = {}
    highest = 0
    for line in text.splitlines():
        if match := re.match(r"\s*(%[\w]+) = (?:arith\.constant|llvm\.mlir\.constant\()\s*(-?\d+)", line):
            constants[match[1]] = int(match[2])
        if "func.func" in line:
            constants = {}
        match = re.search(r"hivm\.hir\.pointer_cast\(([^)]*)\).*: memref<([^,>]*)[^>]*address_space<ub>", line)
        if match is None:
            continue
        *shape, element = match[2].split("x")
        if "?" in shape or element not in BITS:
            raise ToolError(f"cannot size the buffer in: {line.strip()}")
        size = -(-prod(map(int, shape)) * BITS[element] // 8)
        for offset in match[1].split(","):
            highest = max(highest, constants[offset.strip()] + size)
    return highest


def _per_loop(text: str, pattern: re.Pattern[str]) -> tuple[int, int]:
    """(all, inside a loop) occurrences of ``pattern`` in the functions of the module."""
    total = looped = 0
    for function in re.split(r"^  func\.func", text, flags=re.MULTILINE)[1:]:
        lines = function.splitlines()
        inside = _in_region_loop(lines) | _in_block_loop(lines)
        hits = [number for number, line in enumerate(lines) if pattern.search(line)]
        total += len(hits)
        looped += sum(number in inside for number in hits)
    return total, looped


def _in_region_loop(lines: list[str]) -> set[int]:
    """Lines inside scf.for or scf.while (A2 and A3 keep structured loops)."""
    inside, closes = set(), []
    depth = 0
    for number, line in enumerate(lines):
        starts_loop = re.search(r"scf\.(?:for|while|parallel)\b", line) is not None
        if closes:
            inside.add(number)
        before = depth
        depth += line.count("{") - line.count("}")
        if starts_loop:
            closes.append(before)
        while closes and depth <= closes[-1] and not starts_loop and "} do {" not in line:
            closes.pop()
    return inside


def _in_block_loop(lines: list[str]) -> set[int]:
    """Lines in basic blocks that can reach themselves (A5 lowers loops to branches)."""
    block_of, edges = [], {"entry": set()}
    current = "entry"
    for line in lines:
        if match := re.match(r"\s*\^(\w+)[(:]", line):
            current = match[1]
            edges[current] = set()
        block_of.append(current)
        if "cf.br" in line or "cf.cond_br" in line or "cf.switch" in line:
            edges[current].update(re.findall(r"\^(\w+)", line))

    def reaches_itself(start: str) -> bool:
        seen: set[str] = set()
        queue = list(edges[start])
        while queue:
            block = queue.pop()
            if block == start:
                return True
            if block not in seen:
                seen.add(block)
                queue.extend(edges.get(block, ()))
        return False

    loops = {block for block in edges if reaches_itself(block)}
    return {number for number, block in enumerate(block_of) if block in loops}
