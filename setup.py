"""Builds the optional compiled parts with CMake; everything else about the package is in pyproject.toml.

Two shared objects, each optional (CMakeLists.txt): ``_C`` with the CPU kernels, on the stable ABI of an installed
torch, and ``_ledger``, a pybind11 module. The package works without them through plain torch and plain Python, so
whatever is missing here ends in one notice and never in a failed installation.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
MODULES = ("_C", "_ledger")


class BuildError(Exception):
    """Why the compiled parts, or one of them, cannot be built here."""


def find_torch() -> Path | None:
    """The folder of the torch that the package will run with, found without importing it.

    pip's isolated build hides site-packages from the import system but runs the same interpreter, so the interpreter's
    own site-packages are looked into as well.
    """
    places = [*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    for place in dict.fromkeys(places):
        folder = Path(place) / "torch"
        if (folder / "include" / "torch" / "csrc" / "stable" / "library.h").is_file():
            return folder
    return None


def find_cmake() -> str:
    """The path of a usable cmake: from PATH, else from the ``cmake`` wheel."""
    beside = Path(sys.executable).parent / "cmake"
    found = shutil.which("cmake") or (str(beside) if beside.is_file() else None)
    if found is None:
        raise BuildError("no cmake was found (install it with `apt install cmake` or `pip install cmake`)")
    return found


def cmake_arguments(output: Path) -> tuple[list[str], list[str]]:
    """The definitions for the configuration step, and a line for each part that has to be left out."""
    arguments = [f"-DDSV4_OUTPUT_DIR={output}", f"-DPython_EXECUTABLE={sys.executable}", "-DPYBIND11_FINDPYTHON=ON"]
    left_out = []
    torch = find_torch()
    if torch is None:
        left_out.append("_C: no installed torch >= 2.10 was found (install torch first)")
    else:
        arguments += [f"-DTORCH_INCLUDE_DIR={torch / 'include'}", f"-DTORCH_LIBRARY_DIR={torch / 'lib'}"]
    try:
        import pybind11
    except ImportError:
        left_out.append("_ledger: no pybind11 was found (pip install pybind11)")
    else:
        arguments.append(f"-Dpybind11_DIR={pybind11.get_cmake_dir()}")
    if shutil.which("ninja"):
        arguments.append("-GNinja")
    return arguments, left_out


def run_step(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"failed: {' '.join(command)}\n{(done.stdout + done.stderr).strip()[-4000:]}")


def configure(cmake: str, definitions: list[str], build: Path) -> None:
    """Configure; once more from nothing when a cache of another compiler or generator is in the way."""
    command = [cmake, "-S", str(ROOT), "-B", str(build), *definitions]
    build.mkdir(parents=True, exist_ok=True)
    try:
        run_step(command)
    except BuildError:
        if not (build / "CMakeCache.txt").exists():
            raise
        shutil.rmtree(build)
        build.mkdir(parents=True)
        run_step(command)


class BuildWithCMake(build_ext):
    """Replaces the compiler driver of setuptools by one CMake build of every module."""

    def run(self) -> None:
        in_place = self.inplace or self.editable_mode
        output = ROOT / "dsv4_npu" if in_place else Path(self.build_lib).resolve() / "dsv4_npu"
        build = (
            ROOT / "build" / f"cmake-{sys.implementation.cache_tag}" if in_place else Path(self.build_temp).resolve()
        )
        definitions, left_out = cmake_arguments(output)
        wanted = [name for name in MODULES if not any(line.startswith(f"{name}:") for line in left_out)]
        try:
            cmake = find_cmake()
            configure(cmake, definitions, build)
        except BuildError as error:
            left_out += [f"{name}: {error}" for name in wanted]
            wanted = []
        for name in wanted:
            try:
                run_step([cmake, "--build", str(build), "--target", name, "--parallel"])
            except BuildError as error:
                left_out.append(f"{name}: {error}")
        self.output_folder = output
        for line in left_out:  # an older build's module must not pass for this one's
            for stale in output.glob(f"{line.split(':')[0]}*.so"):
                stale.unlink()
        if left_out:
            print(
                "dsv4_npu: installed without some compiled parts; their plain-torch or plain-Python twins run "
                "instead, slower.\n  " + "\n  ".join(left_out),
                file=sys.stderr,
            )

    def get_outputs(self) -> list[str]:
        folder = getattr(self, "output_folder", ROOT / "dsv4_npu")
        return [str(path) for name in MODULES for path in sorted(folder.glob(f"{name}*.so"))]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildWithConfigs(build_py):
    """Puts the model and platform configurations, which a checkout keeps beside the package, into the wheel."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self.config_files():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)

    def config_files(self) -> list[tuple[Path, Path]]:
        inside = Path(self.build_lib) / "dsv4_npu" / "configs"
        folder = ROOT / "configs"
        return [(path, inside / path.relative_to(folder)) for path in sorted(folder.glob("*/*.json"))]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(str(target) for _, target in self.config_files())]


setup(
    ext_modules=[Extension(f"dsv4_npu.{name}", []) for name in MODULES],
    cmdclass={"build_ext": BuildWithCMake, "build_py": BuildWithConfigs},
)
