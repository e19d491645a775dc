"""Where the compilers are, which versions, and which chips they are asked for."""

from __future__ import annotations

import functools
import importlib.metadata
import subprocess
from dataclasses import dataclass
from pathlib import Path

LLVM = Path("/usr/lib/llvm-19")
MLIR_RUNTIME = "libmlir_c_runner_utils.so.19.1"


class ToolError(RuntimeError):
    """A tool is missing or refused its input; the message holds the tool's own words."""


@dataclass(frozen=True)
class Target:
    """One chip: ``a5`` says that it has register-based vector cores and so its own front end and compiler."""

    platform: str
    arch: str
    a5: bool
    unified_buffer: int

    @property
    def compiler(self) -> str:
        return "bishengir-compile-a5" if self.a5 else "bishengir-compile"


TARGETS = (
    Target("A2", "Ascend910B3", False, 192 * 1024),
    Target("A3", "Ascend910_9382", False, 192 * 1024),
    Target("A5", "Ascend950PR_9589", True, 248 * 1024),
)


def missing() -> list[str]:
    """What has to be installed before the proofs can run, in words; empty when everything is there."""
    gaps = []
    for package in ("triton-ascend", "ascendnpu-ir", "torch"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            gaps.append(f"Python package {package} (make ascend creates .venv-ascend with it)")
    for tool in ("mlir-opt", "mlir-translate", "opt", "llc"):
        if not (LLVM / "bin" / tool).is_file():
            gaps.append(f"{LLVM}/bin/{tool} (apt-get install llvm-19 mlir-19-tools)")
    if not (LLVM / "lib" / MLIR_RUNTIME).is_file():
        gaps.append(f"{LLVM}/lib/{MLIR_RUNTIME} (apt-get install libmlir-19)")
    return gaps


@functools.cache
def versions() -> dict[str, str]:
    """The tools' versions, as recorded beside the results."""
    found = {name: importlib.metadata.version(name) for name in ("triton-ascend", "ascendnpu-ir", "torch")}
    found["torch"] = found["torch"].partition("+")[0]
    text = tool(LLVM / "bin" / "mlir-opt", "--version")
    found["mlir"] = next(line.split()[-1] for line in text.splitlines() if "LLVM version" in line)
    return found


def bisheng_bin() -> Path:
    import ascendnpuir

    return Path(ascendnpuir.__file__).parent / "bin"


def tool(*command: str | Path) -> str:
    """Run a tool and return what it printed; raises ToolError with its complaint."""
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if run.returncode:
        raise ToolError(f"{Path(command[0]).name}: {complaint(run.stderr)}")
    return run.stdout


def complaint(text: str) -> str:
    """The lines of a compiler's output that say what is wrong."""
    lines = [line for line in text.splitlines() if "hivmc" not in line]
    telling = [line for line in lines if "error:" in line or "undefined reference" in line or "Assertion" in line]
    return " | ".join(dict.fromkeys(line.strip() for line in (telling or lines)[:6]))[:1500]
