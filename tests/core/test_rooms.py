"""The rooms of the package: imports go downwards only, optional packages are optional, no environment is read."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "dsv4_npu"

#: From the top down: a module may import its own room and the rooms below it. A new room takes its place here.
ROOMS = (
    "__main__",
    "cli",
    "selftest",
    "doctor",
    "sglang",
    "emulation",
    "replay",
    "spec",
    "movement",
    "pools",
    "alloc",
    "sampling",
    "ops",
    "compressor",
    "planning",
    "budget",
    "options",
    "config",
    "addressing",
    "reading",
    "errors",
)
#: Optional packages that one room alone may import.
HOME = {"transformers": "emulation", "sglang": "sglang"}
#: Optional packages that no module may import before one of its functions is called.
LAZY = ("torch_npu", "sgl_kernel_npu", "transformers")


@dataclass(frozen=True)
class Import:
    """One import of module ``target``; ``lazy`` inside a function or under TYPE_CHECKING."""

    target: str
    line: int
    lazy: bool


class Module:
    """The syntax tree of one file and what it imports."""

    def __init__(self, root: Path, path: Path) -> None:
        parts = path.relative_to(root.parent).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.is_package = parts[-1] == "__init__"
        self.room = parts[1] if len(parts) > 2 or not self.is_package else "__init__"
        self.is_kernel = False
        self.tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        self.imports = tuple(self._walk(self.tree, lazy=False))

    def _walk(self, node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = self.name.split(".")
                package = package[: len(package) - node.level + self.is_package]
                base = ".".join([*package, *base.split(".")]).rstrip(".")
            # ``from package import name`` may name a module of the package, so the name is part of the target.
            yield from (Import(f"{base}.{alias.name}", node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"dsv4_npu(\.\w+)+", str(node.value)):
            # Modules that are loaded by name, as the command line does.
            yield Import(str(node.value), node.lineno, True)
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        inside = lazy or guarded or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from self._walk(child, inside)


def _is_eager_triton(one: Import) -> bool:
    return one.target.split(".")[0] == "triton" and not one.lazy


def modules(root: Path) -> dict[str, Module]:
    """Every module by name. Kernel code is what needs Triton: files of ops that import it or kernel code at the top."""
    known = {m.name: m for m in (Module(root, path) for path in sorted(root.rglob("*.py")))}
    more = True
    while more:
        more = False
        for module in known.values():
            may_be = module.room == "ops" and not module.is_package and not module.is_kernel
            if may_be and any(_is_eager_triton(i) or (not i.lazy and _is_kernel(i, known)) for i in module.imports):
                module.is_kernel = more = True
    return known


def _is_kernel(one: Import, known: dict[str, Module]) -> bool:
    target = known.get(one.target) or known.get(one.target.rpartition(".")[0])
    return target is not None and target.is_kernel


def violations(root: Path) -> list[str]:
    """Every import that breaks a rule, as text."""
    known = modules(root)
    top = root.name
    problems = []
    for module in known.values():
        if module.room not in ROOMS and module.room != "__init__":
            problems.append(f"{module.name}: room {module.room} has no place in ROOMS")
            continue
        for one in module.imports:
            where = f"{module.name}:{one.line} imports {one.target}"
            first, *rest = one.target.split(".")
            if first == top:
                problems += [f"{where}: {why}" for why in _inner(module, one, rest, known)]
            else:
                problems += [f"{where}: {why}" for why in _foreign(module, one, first)]
    return problems


def _inner(module: Module, one: Import, rest: list[str], known: dict[str, Module]) -> Iterator[str]:
    room = rest[0] if rest else ""
    if room in ROOMS:
        if module.room == "__init__":
            if room != "errors":
                yield "the package itself may import errors alone"
        elif room != module.room and ROOMS.index(room) < ROOMS.index(module.room):
            yield f"{room} lies above {module.room}"
    elif not (room.startswith("_") or room == "__version__"):
        yield f"{room} has no place in ROOMS"
    if _is_kernel(one, known) and not one.lazy and not module.is_kernel:
        yield "kernels are imported by the calls that launch them"


def _foreign(module: Module, one: Import, package: str) -> Iterator[str]:
    if package in HOME and module.room != HOME[package]:
        yield f"only {HOME[package]} may import {package}"
    elif package in LAZY and not one.lazy:
        yield f"{package} is optional: import it in the function that needs it"
    if _is_eager_triton(one) and not module.is_kernel:
        yield "only files of kernels in ops may import triton at the top"


def environment_reads(root: Path) -> list[str]:
    """Uses of the environment. SGLang's own variables may be read in its room, by name."""
    problems = []
    for module in modules(root).values():
        allowed: set[int] = set()
        if module.room == "sglang":
            for node in ast.walk(module.tree):
                key = node.args[0] if isinstance(node, ast.Call) and node.args else getattr(node, "slice", None)
                if isinstance(key, ast.Constant) and str(key.value).startswith("SGLANG_"):
                    holder = node.func if isinstance(node, ast.Call) else node
                    allowed |= {id(part) for part in ast.walk(holder)}
        for node in ast.walk(module.tree):
            name = getattr(node, "attr", getattr(node, "id", None))
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                name = next((a.name for a in node.names if a.name in ("environ", "getenv", "putenv")), None)
            if name in ("environ", "environb", "getenv", "putenv") and id(node) not in allowed:
                problems.append(f"{module.name}:{node.lineno} uses {name}")
    return problems


# -- the package ------------------------------------------------------------------------------------------------------


def test_imports_go_downwards_and_optional_packages_stay_optional() -> None:
    assert violations(PACKAGE) == []


def test_nothing_is_configured_by_the_environment() -> None:
    assert environment_reads(PACKAGE) == []


def test_compiled_parts_read_no_environment() -> None:
    sources = [*PACKAGE.parent.glob("csrc/**/*.cpp"), *PACKAGE.parent.glob("csrc/**/*.h")]
    assert sources
    assert [str(path) for path in sources if "getenv" in path.read_text(encoding="utf-8")] == []


def test_the_scan_sees_the_package() -> None:
    found = modules(PACKAGE)
    assert {m.room for m in found.values()} >= {"__init__", *ROOMS} - {"doctor", "sglang", "replay"}
    assert sum(module.is_kernel for module in found.values()) >= 5
    assert {i.target for i in found["dsv4_npu.cli"].imports} >= {"dsv4_npu.emulation.command", "dsv4_npu.__version__"}
    assert all(i.lazy for i in found["dsv4_npu.alloc.spec"].imports if "config" in i.target)


def loaded_after(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint(*(n for n in sys.modules if sys.modules[n] is not None))"
    done = subprocess.run([sys.executable, "-c", script], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_or_any_of_its_modules_needs_no_optional_package() -> None:
    optional = {"torch_npu", "triton", "transformers", "sglang", "sgl_kernel_npu"}
    assert not loaded_after("import dsv4_npu") & optional
    names = [m.name for m in modules(PACKAGE).values() if not m.is_kernel and m.room not in ("__main__", "sglang")]
    loaded = loaded_after("\n".join(f"import {name}" for name in names))
    assert loaded >= set(names)
    assert not loaded & optional


# -- mutations: a package that breaks one rule each -------------------------------------------------------------------


def package(folder: Path, files: dict[str, str]) -> Path:
    """A package ``dsv4_npu`` with the given files, named by their paths without the suffix."""
    root = folder / "dsv4_npu"
    root.mkdir()
    (root / "__init__.py").touch()
    for name, text in files.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config": "from dsv4_npu.pools import RowSlab", "pools": ""}, "pools lies above config"),
        ({"addressing": "from dsv4_npu import config", "config": ""}, "config lies above addressing"),
        ({"pools/slab": "import dsv4_npu.spec.verify", "spec/verify": ""}, "spec lies above pools"),
        ({"pools/slab": "from ..spec import verify", "spec/verify": ""}, "spec lies above pools"),
        ({"ops/move": "def f():\n    from dsv4_npu.emulation import engine", "emulation": ""}, "emulation lies above"),
        ({"alloc": "import importlib\nM = 'dsv4_npu.spec.commit'", "spec/commit": ""}, "spec lies above alloc"),
        ({"sidecar": "import dsv4_npu.errors", "errors": ""}, "room sidecar has no place"),
        ({"spec": "from dsv4_npu import sidecar"}, "sidecar has no place"),
        ({"spec": "import transformers"}, "only emulation may import transformers"),
        ({"spec": "def f():\n    from transformers import PreTrainedModel"}, "only emulation may import transformers"),
        ({"emulation/engine": "from sglang.srt import utils"}, "only sglang may import sglang"),
        ({"emulation/model": "import transformers"}, "transformers is optional"),
        ({"ops/move": "try:\n    import torch_npu\nexcept ImportError:\n    pass"}, "torch_npu is optional"),
        ({"ops/move/__init__": "import triton.language as tl"}, "only files of kernels in ops may import triton"),
        ({"pools/triton": "import triton"}, "only files of kernels in ops may import triton"),
        ({"ops/__init__": "from dsv4_npu.ops import run", "ops/run": "import triton"}, "imported by the calls"),
        (
            {"ops/__init__": "from dsv4_npu.ops.a import f", "ops/a": "from .b import f", "ops/b": "import triton"},
            "imported by the calls",
        ),
        ({"sampling": "import dsv4_npu.ops.a", "ops/a": "import triton"}, "imported by the calls"),
    ],
)
def test_a_forbidden_import_shows(tmp_path: Path, files: dict[str, str], says: str) -> None:
    (problem,) = violations(package(tmp_path, files))
    assert says in problem


def test_the_package_itself_stays_light(tmp_path: Path) -> None:
    root = package(tmp_path, {"config": ""})
    (root / "__init__.py").write_text("from dsv4_npu.config import X")
    assert violations(root) == ["dsv4_npu:1 imports dsv4_npu.config.X: the package itself may import errors alone"]


def test_what_is_allowed_is_not_reported(tmp_path: Path) -> None:
    root = package(
        tmp_path,
        {
            "errors": "",
            "spec": "from dsv4_npu.errors import E\nfrom dsv4_npu import __version__\nfrom .pools import RowSlab",
            "pools": "",
            "alloc": "",
            "ops/move/triton": "import triton\nfrom dsv4_npu.ops._draw import draw",
            "ops/_draw": "import triton.language as tl",
            "ops/move/ref": "def run():\n    import triton\n    from dsv4_npu.ops.move.triton import kernel",
            "emulation/model": "def f():\n    import transformers",
            "sglang/plugin": "import sglang",
        },
    )
    assert violations(root) == []


@pytest.mark.parametrize(
    "text",
    [
        "import os\nX = os.environ['A']",
        "import os\nX = os.environ.get('A')",
        "import os\nX = os.getenv('A')",
        "from os import environ",
        "import os as system\nX = system.environ",
        "from os import getenv as g",
    ],
)
def test_a_read_of_the_environment_shows(tmp_path: Path, text: str) -> None:
    assert environment_reads(package(tmp_path, {"ops/move": text}))


def test_sglangs_own_variables_may_be_read_in_its_room_alone(tmp_path: Path) -> None:
    text = "import os\nA = os.environ.get('SGLANG_X')\nB = os.environ['SGLANG_Y']\nC = os.getenv('SGLANG_Z', '1')"
    root = package(tmp_path, {"sglang/flags": text})
    assert environment_reads(root) == []
    (root / "sglang" / "flags.py").write_text(text + "\nD = os.environ.get('DSV4_MODE')")
    assert environment_reads(root) == ["dsv4_npu.sglang.flags:5 uses environ"]
    (root / "sglang" / "flags.py").unlink()
    (root / "spec.py").write_text(text)
    assert len(environment_reads(root)) == 3
