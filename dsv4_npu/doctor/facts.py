"""What is there, gathered without importing anything heavy in this process: metadata, files, and child processes.

A child process that a broken package kills or stops is a fact like any other.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

#: Seconds that a child process may take.
PATIENCE = 180
#: Distributions that are looked for, under the names that they may have.
DISTRIBUTIONS = {
    "torch": ("torch",),
    "torch_npu": ("torch-npu", "torch_npu"),
    "triton": ("triton",),
    "triton-ascend": ("triton-ascend", "triton_ascend"),
    "transformers": ("transformers",),
    "sglang": ("sglang",),
    "sgl-kernel-npu": ("sgl-kernel-npu", "sgl_kernel_npu"),
    "dsv4-npu": ("dsv4-npu",),
}
TOOLKITS = (
    "/usr/local/Ascend/ascend-toolkit/latest",
    "/usr/local/Ascend/cann",
    "~/Ascend/ascend-toolkit/latest",
    "~/Ascend/cann",
)
PLATFORM_GROUP = "sglang.srt.platforms"

_TORCH = """
import torch
answer = {"version": torch.__version__, "hook": hasattr(torch.utils.backend_registration, HOOK)}
"""
_PARTS = """
import warnings
warnings.simplefilter("ignore")
from dsv4_npu.ops import availability
answer = {part.name: [part.usable, part.detail] for part in (availability.extension(), availability.ledger())}
"""
_TRITON = """
import triton
answer = {"version": triton.__version__}
"""
_NPU = """
import torch, torch_npu
count = torch.npu.device_count() if torch.npu.is_available() else 0
answer = {"devices": [torch.npu.get_device_name(i) for i in range(count)]}
"""
_SAMPLING = """
import torch
from dsv4_npu.sampling import self_check, installed
device = torch.device("npu" if hasattr(torch, "npu") and torch.npu.is_available() else "cpu")
answer = {"device": device.type, "failures": {}}
for op in self_check.CASES:
    function = installed.find(op)
    failure = self_check.first_failure(op, function, device) if device.type == "npu" else None
    if failure:
        answer["failures"][op] = failure
"""
_PROBE = """
import torch, torch_npu
from dsv4_npu.sglang.probe import probe_before_serving
answer = {"results": [str(one) for one in probe_before_serving("npu", WIDTH, HIDDEN, BY_REQUEST)]}
"""
_SELECTED = """
import os
answer = {"selected": os.environ.get("SGLANG_PLATFORM", "")}
"""
_END = '\nimport json\nprint("\\nanswer " + json.dumps(answer))\n'


@dataclass(frozen=True)
class Answer:
    """What a child process said: ``data``, or in ``error`` why it could not."""

    data: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Facts:
    """What was found. ``None`` for an answer: nobody asked, because something it needs is not there.

    Attributes:
        versions: version by distribution (the keys of DISTRIBUTIONS).
        requires: what a distribution declares about torch.
        platforms: names of entry points in SGLang's platform group.
        cann: path and version of the CANN toolkit, empty without one; compiler: whether its compiler is on the path.
        replaced: by platform name, what its plugin did in a process of its own.
    """

    python: tuple[int, int]
    machine: str
    versions: dict[str, str]
    requires: dict[str, str] = field(default_factory=dict)
    platforms: tuple[str, ...] = ()
    cann: tuple[str, str] = ("", "")
    compiler: bool = False
    torch: Answer | None = None
    parts: Answer | None = None
    triton: Answer | None = None
    npu: Answer | None = None
    sampling: Answer | None = None
    probe: Answer | None = None
    release: Answer | None = None
    selected: Answer | None = None
    replaced: dict[str, Answer] = field(default_factory=dict)


def ask(script: str, *, module: str = "", arguments: tuple[str, ...] = (), **names: object) -> Answer:
    """Run ``script``, which sets ``answer`` (or ``module`` with arguments, which prints one), in a child process."""
    if module:
        command = [sys.executable, "-m", module, *arguments]
    else:
        begin = "".join(f"{name} = {value!r}\n" for name, value in names.items())
        command = [sys.executable, "-c", begin + script + _END]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, errors="replace")
    except subprocess.TimeoutExpired:
        return Answer(error=f"no answer within {PATIENCE} s")
    found = [line for line in done.stdout.splitlines() if line.startswith("answer ")]
    if done.returncode == 0 and found:
        data: dict[str, Any] = json.loads(found[-1].removeprefix("answer "))
        return Answer(data)
    if done.returncode < 0:
        return Answer(error=f"the process was killed by signal {-done.returncode}")
    said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith(" ")]
    return Answer(error=_summary(said) or f"exit status {done.returncode}")


def _summary(lines: list[str]) -> str:
    """The last error of a traceback, with its cause where a chain has one."""
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
    chain = [errors[0], errors[-1]] if len(errors) > 1 and errors[0] != errors[-1] else errors[-1:] or lines[-1:]
    return " → ".join(line[:400] for line in chain)


def toolkit(candidates: tuple[str, ...] = TOOLKITS) -> tuple[str, str]:
    """Path and version of CANN; ("", "") without one."""
    for text in candidates:
        path = Path(text).expanduser()
        if not path.is_dir():
            continue
        for pattern in ("version.cfg", "*/ascend_toolkit_install.info", "compiler/version.info", "*/version.info"):
            for file in sorted(path.glob(pattern)):
                version = re.search(r"(?:[Vv]ersion\w*=\[?)(?:[\d.]+:)?(\d[\w.]*)", file.read_text(errors="replace"))
                if version is not None:
                    return str(path), version[1]
        return str(path), "unknown"
    return "", ""


def installed() -> dict[str, str]:
    """Versions of the distributions that are there."""
    found = {}
    for name, spellings in DISTRIBUTIONS.items():
        for spelling in spellings:
            try:
                found[name] = metadata.version(spelling)
            except metadata.PackageNotFoundError:
                continue
            break
    return found


def _about_torch(name: str) -> str:
    for spelling in DISTRIBUTIONS[name]:
        try:
            lines = metadata.requires(spelling) or []
        except metadata.PackageNotFoundError:
            continue
        for line in lines:
            if re.match(r"torch\s*([=<>!~(]|$)", line):
                return line.split(";")[0].strip()
    return ""


def gather(quick: bool, hook: str) -> Facts:
    """Everything; with ``quick`` metadata and files only. ``hook``: the function of torch that the emulation needs."""
    versions = installed()
    facts: dict[str, Any] = {
        "python": sys.version_info[:2],
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "requires": {name: text for name in ("sglang", "torch_npu") if (text := _about_torch(name))},
        "platforms": tuple(sorted({one.name for one in metadata.entry_points(group=PLATFORM_GROUP)})),
        "cann": toolkit(),
        "compiler": any(shutil.which(name) for name in ("bisheng", "ccec")),
    }
    if "sglang" in versions:
        facts["release"] = _release()
    if not quick:
        facts |= _asked(versions, facts["platforms"], hook)
    return Facts(**facts)


def _release() -> Answer:
    from dsv4_npu.errors import Dsv4NpuError
    from dsv4_npu.sglang import versions

    try:
        return Answer({"known": versions.check()})
    except Dsv4NpuError as error:
        return Answer(error=str(error))


def _asked(versions: dict[str, str], platforms: tuple[str, ...], hook: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "torch" not in versions:
        return found
    found["torch"] = ask(_TORCH, HOOK=hook)
    found["parts"] = ask(_PARTS)
    if versions.keys() & {"triton", "triton-ascend"}:
        found["triton"] = ask(_TRITON)
    devices: list[str] = []
    if "torch_npu" in versions:
        found["npu"] = ask(_NPU)
        devices = found["npu"].data.get("devices", [])
    if "sgl-kernel-npu" in versions:
        found["sampling"] = ask(_SAMPLING)
    if devices:
        by_request = "Ascend950" in devices[0]
        found["probe"] = ask(_PROBE, WIDTH=4, HIDDEN=4096, BY_REQUEST=by_request)
    if "sglang" in versions:
        found["selected"] = ask(_SELECTED)
        names = [name for name in platforms if name == "dsv4_npu_emulated" or (name == "dsv4_npu" and devices)]
        found["replaced"] = {name: ask("", module="dsv4_npu.sglang.applied", arguments=(name,)) for name in names}
    return found
