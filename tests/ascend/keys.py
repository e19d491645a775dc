"""Keys of the kernels' sources: what a committed proof was made for. Needs no Triton.

An op's key covers its triton.py, its oracle ref.py and its cases, whatever these import from dsv4_npu.ops or from
beside them, the tools that make the proofs and their versions. The op's ``__init__.py`` (checks and registration) is
not part of a proof, which calls the launcher itself. Comments, docstrings and layout do not change a key.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPS = ROOT / "dsv4_npu" / "ops"
HERE = Path(__file__).resolve().parent
RESULTS = ROOT / "docs" / "ascend.json"
PROVING = ("case", "cpu_object", "lowering", "machine", "prove", "schedule", "toolchain")


def kernel_ops() -> list[str]:
    """The ops that have a Triton kernel."""
    return sorted(path.parent.name for path in OPS.glob("*/triton.py"))


def kernels(op: str) -> list[str]:
    """The kernels that an op can launch: the functions under ``triton.jit`` in its triton.py, and in what that imports
    from dsv4_npu.ops, that no function under ``triton.jit`` of dsv4_npu.ops calls."""
    own = [node.name for path in _closure(OPS / op / "triton.py") for node in _jitted(path)]
    every = [node for path in OPS.rglob("*.py") for node in _jitted(path)]
    called = {name.id for node in every for name in ast.walk(node) if isinstance(name, ast.Name)}
    return sorted(name for name in own if name not in called)


def stale() -> list[str]:
    """What is wrong between the sources and docs/ascend.json, in words; empty when every kernel has its proof."""
    proven = json.loads(RESULTS.read_text())["ops"] if RESULTS.is_file() else {}
    problems = []
    for op in kernel_ops():
        if op not in proven:
            problems.append(f"{op}: no proof in {RESULTS.name}")
        elif proven[op]["key"] != op_key(op):
            problems.append(f"{op}: its source changed since its proof was made")
        else:
            named = {row["kernel"] for row in proven[op]["kernels"]}
            problems += [f"{op}: no proof of {name}" for name in kernels(op) if name not in named]
    problems += [f"{op}: a proof of an op that is gone" for op in proven if op not in kernel_ops()]
    return problems


def op_key(op: str) -> str:
    digest = hashlib.sha256()
    proven = _closure(OPS / op / "triton.py", OPS / op / "ref.py", HERE / "cases" / f"{op}.py")
    tools = {HERE / f"{name}.py" for name in PROVING} | {HERE / "cases" / "__init__.py"}
    for path in sorted(proven | tools):
        digest.update(canonical(path.read_text()).encode() if path.is_file() else b"absent")
    digest.update((HERE / "runtime.c").read_bytes())
    digest.update((HERE / "requirements.txt").read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def canonical(source: str) -> str:
    """The syntax tree as text, the same for any Python version, comment, docstring or layout."""
    return _dump(_tree(source))


@functools.cache
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


def _dump(node: object) -> str:
    if isinstance(node, list):
        return "[" + ",".join(_dump(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if value not in (None, []) and name != "kind"}
    if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
        fields["body"] = fields["body"][1:]
    return type(node).__name__ + "(" + ",".join(f"{name}={_dump(value)}" for name, value in fields.items()) + ")"


def _jitted(path: Path) -> list[ast.FunctionDef]:
    functions = [node for node in _tree(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [node for node in functions if any("jit" in ast.dump(mark) for mark in node.decorator_list)]


def _closure(*paths: Path) -> set[Path]:
    """Files and what they import, directly or not, from dsv4_npu.ops or with a leading dot."""
    seen: set[Path] = set()
    queue = list(paths)
    while queue:
        current = queue.pop()
        if current not in seen and current.is_file():
            seen.add(current)
            queue += _imports(current)
    return seen


def _imports(path: Path) -> list[Path]:
    found: list[Path] = []
    for node in ast.walk(_tree(path.read_text())):
        if isinstance(node, ast.Import):
            found += [_file(ROOT, alias.name) for alias in node.names if alias.name.startswith("dsv4_npu.ops.")]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if not node.level and not f"{module}.".startswith("dsv4_npu.ops."):
                continue
            base = path.parents[node.level - 1] if node.level else ROOT
            parts = [_file(base, f"{module}.{alias.name}".strip(".")) for alias in node.names]
            found += [part for part in parts if part.is_file()]
            if not all(part.is_file() for part in parts):  # a name that the module itself holds
                found.append(_file(base, module))
    return found


def _file(base: Path, module: str) -> Path:
    """The file of a module; of a package its ``__init__.py``."""
    folder = base.joinpath(*module.split("."))
    return folder.with_name(f"{folder.name}.py") if not folder.is_dir() else folder / "__init__.py"
