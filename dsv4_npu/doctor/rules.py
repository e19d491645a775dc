"""What the facts mean: one line per part, with its state, who needs it, and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsv4_npu.doctor.facts import Answer, Facts

OK, MISSING, WRONG, NOT_RUN = "OK", "missing", "wrong", "not run"

#: What a machine can be meant for.
PURPOSES = {
    "emulation": "dsv4-npu run, plan, replay on a CPU",
    "emulated-npu": "dsv4-npu run and selftest with --device npu and no NPU",
    "sglang-emulated": "SGLang's engine on a CPU with our memory",
    "serving": "SGLang on an Ascend NPU with our memory",
}
ALL = tuple(PURPOSES)
IN_SGLANG = ("sglang-emulated", "serving")

#: Beginnings of device names, longest first, and the platform that --platform takes.
KINDS = {"Ascend910_93": "a3", "Ascend910B": "a2", "Ascend950": "a5"}
EMULATED, NPU = "dsv4_npu_emulated", "dsv4_npu"
GET_SGLANG = "pip install --no-deps sglang==0.5.23, and what it needs besides torch: docs/sglang.md"
OLDEST_TORCH = (2, 10)
TRANSFORMERS = ((5, 19), (5, 25))


@dataclass(frozen=True)
class Line:
    """One part. ``needed`` names the purposes that cannot do without it; ``mend`` is the command, empty if OK."""

    name: str
    state: str
    found: str
    mend: str = ""
    needed: tuple[str, ...] = ()


def judge(facts: Facts) -> list[Line]:
    """Every line, in the order in which gaps are mended best."""
    rules = (
        _python,
        _torch,
        _parts,
        _transformers,
        _cann,
        _torch_npu,
        _npu,
        _triton,
        _kernels,
        _sglang,
        _plugin,
        _replacements,
        _probe,
    )
    return [line for rule in rules for line in rule(facts)]


def blockers(lines: list[Line], purpose: str) -> list[Line]:
    """The lines that keep the machine from ``purpose``."""
    return [line for line in lines if purpose in line.needed and line.state != OK]


def minor(version: str) -> tuple[int, int]:
    """The first two numbers of a version; (0, 0) where there are none."""
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return 0, 0


def _dotted(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


def kind_of(device: str) -> str | None:
    """The platform of an NPU by its name, None where it is not known."""
    return next((kind for begin, kind in KINDS.items() if device.startswith(begin)), None)


def _python(facts: Facts) -> Iterator[Line]:
    found = f"{_dotted(facts.python)} on {facts.machine}"
    if facts.python < (3, 10):
        yield Line("python", WRONG, found, "use Python 3.10 or newer", ALL)
    else:
        yield Line("python", OK, found, needed=ALL)


def _torch(facts: Facts) -> Iterator[Line]:
    version = facts.versions.get("torch")
    if version is None:
        yield Line("torch", MISSING, "not installed", "pip install torch==2.13.0", ALL)
        return
    if minor(version) < OLDEST_TORCH:
        yield Line("torch", WRONG, version, "pip install torch==2.13.0", ALL)
        return
    if facts.torch is not None and facts.torch.error:
        broken_npu = "torch_npu" in facts.torch.error
        mend = "mend torch_npu (below), or pip uninstall torch_npu" if broken_npu else f"pip install torch=={version}"
        yield Line("torch", WRONG, f"{version}: {facts.torch.error}", mend, ALL)
        return
    yield Line("torch", OK, version, needed=ALL)
    if facts.torch is not None and not facts.torch.data.get("hook"):
        found = f"torch {version} lacks the hook for a device written in Python"
        yield Line("emulated npu device", WRONG, found, "pip install torch==2.13.0", ("emulated-npu",))


def _parts(facts: Facts) -> Iterator[Line]:
    build = "pip install --no-build-isolation --no-deps . (in the checkout, with cmake, pybind11 and a C++ compiler)"
    what = {"_C": "C++ kernels (_C)", "_ledger": "C++ ledger (_ledger)"}
    if facts.parts is None:
        return
    if facts.parts.error:
        if facts.torch is not None and not facts.torch.error:
            yield Line("dsv4_npu.ops", WRONG, facts.parts.error, build, ALL)
        return
    for name, (usable, detail) in facts.parts.data.items():
        if usable:
            yield Line(what[name], OK, detail)
        else:
            state = MISSING if "not built" in detail or "No module" in detail else WRONG
            yield Line(what[name], state, f"{detail}; Python runs instead, slower", build)


def _transformers(facts: Facts) -> Iterator[Line]:
    version = facts.versions.get("transformers")
    needed = ("emulation", "emulated-npu", *IN_SGLANG)
    mend = "pip install transformers==5.19.0 (SGLang's pin; the emulation takes 5.19 to 5.24)"
    if version is None:
        yield Line("transformers", MISSING, "not installed", mend, needed)
    elif not TRANSFORMERS[0] <= minor(version) < TRANSFORMERS[1]:
        yield Line("transformers", WRONG, version, mend, needed)
    else:
        yield Line("transformers", OK, version, needed=needed)


def _cann(facts: Facts) -> Iterator[Line]:
    path, version = facts.cann
    if not path:
        mend = "install the CANN toolkit and the kernels package of the NPU (Huawei's Ascend site)"
        yield Line("CANN", MISSING, "no toolkit below /usr/local/Ascend or ~/Ascend", mend, ("serving",))
    elif not facts.compiler:
        found = f"{version} in {path}, but its compiler is not on the path"
        yield Line("CANN", WRONG, found, f"source {path}/../set_env.sh (or {path}/set_env.sh)", ("serving",))
    else:
        yield Line("CANN", OK, f"{version} in {path}", needed=("serving",))


def _torch_npu(facts: Facts) -> Iterator[Line]:
    torch = facts.versions.get("torch", "")
    version = facts.versions.get("torch_npu")
    fitting = f"pip install 'torch_npu=={_dotted(minor(torch))}.*'" if torch else "install torch first"
    if version is None:
        yield Line("torch_npu", MISSING, "not installed", fitting, ("serving",))
        return
    declared = facts.requires.get("torch_npu", "")
    if minor(version) != minor(torch):
        found = f"{version} beside torch {torch or 'none'}: both must have the same first two numbers"
        yield Line("torch_npu", WRONG, found, fitting, ("serving",))
    elif facts.npu is not None and facts.npu.error:
        mend = f"source CANN's set_env.sh; else {fitting} for this CANN"
        yield Line("torch_npu", WRONG, f"{version}: {facts.npu.error}", mend, ("serving",))
    else:
        found = f"{version} with torch {torch}" + (f" (declares {declared})" if declared else "")
        yield Line("torch_npu", OK, found, needed=("serving",))


def _devices(facts: Facts) -> list[str]:
    return list(facts.npu.data.get("devices", [])) if facts.npu is not None else []


def _npu(facts: Facts) -> Iterator[Line]:
    devices = _devices(facts)
    if not devices:
        asked = facts.npu is not None and not facts.npu.error
        found = "torch_npu sees no device" if asked else "nobody to ask: torch_npu does not run here"
        yield Line("NPU", MISSING, found, "npu-smi info; check the driver and the container's devices", ("serving",))
        return
    kind = kind_of(devices[0])
    if kind is None:
        found = f"{len(devices)} × {devices[0]}, a kind that this package does not know"
        yield Line("NPU", WRONG, found, f"known: {', '.join(KINDS)}; choose --platform by hand", ("serving",))
    else:
        yield Line("NPU", OK, f"{len(devices)} × {devices[0]}: --platform {kind}", needed=("serving",))


def _triton(facts: Facts) -> Iterator[Line]:
    plain, ascend = facts.versions.get("triton"), facts.versions.get("triton-ascend")
    error = facts.triton.error if facts.triton is not None else ""
    on_npu = bool(_devices(facts))
    both = "pip uninstall -y triton triton-ascend && pip install triton-ascend"
    if plain and ascend:
        found = f"triton {plain} and triton-ascend {ascend} install the same module over each other"
        yield Line("triton", WRONG, found, both, ALL[1:])
        return
    here = f"triton-ascend {ascend}" if ascend else f"triton {plain}" if plain else ""
    advice = "pip install triton-ascend" if on_npu else "pip install --no-deps triton==3.7.1"
    if not here:
        yield Line("triton", MISSING, "not installed", advice, ("emulated-npu", *IN_SGLANG))
    elif error:
        yield Line("triton", WRONG, f"{here}: {error}", advice, ("emulated-npu", *IN_SGLANG))
    else:
        yield Line("triton", OK, here, needed=("emulated-npu", "sglang-emulated"))
        if ascend:
            yield Line("triton for the NPU", OK, here, needed=("serving",))
        else:
            yield Line("triton for the NPU", MISSING, f"{here} has no Ascend backend", both, ("serving",))


def _kernels(facts: Facts) -> Iterator[Line]:
    version = facts.versions.get("sgl-kernel-npu")
    name, answer = "sgl-kernel-npu", facts.sampling
    source = "build it from the sgl-kernel-npu sources (it has no wheel on PyPI)"
    if version is None:
        found = "not installed: SGLang's Ascend code imports it (sampling would be ours)"
        yield Line(name, MISSING, found, source, ("serving",))
    elif answer is not None and answer.error:
        yield Line(name, WRONG, f"{version}: {answer.error}", source, ("serving",))
    else:
        failures = dict(answer.data.get("failures", {})) if answer is not None else {}
        ours = f"; ours run instead of {', '.join(sorted(failures))}, which fail their self-check" if failures else ""
        yield Line(name, OK, version + ours, needed=("serving",))


def _sglang(facts: Facts) -> Iterator[Line]:
    version, release = facts.versions.get("sglang"), facts.release
    if version is None:
        yield Line("SGLang", MISSING, "not installed", GET_SGLANG, IN_SGLANG)
        return
    if release is not None and release.error:
        yield Line("SGLang", WRONG, release.error, GET_SGLANG, IN_SGLANG)
    else:
        known = release.data.get("known", "") if release is not None else ""
        yield Line("SGLang", OK, f"{version}: {known}", needed=IN_SGLANG)
    declared, torch = facts.requires.get("sglang", ""), facts.versions.get("torch", "")
    if not torch or not declared:
        return
    said = f"SGLang {version} declares {declared}, installed is {torch}"
    if declared == f"torch=={torch.split('+')[0]}":
        yield Line("SGLang and torch", OK, said)
    elif minor(torch) == (2, 13):
        found = f"{said}: 0.5.23 ran on 2.13.0 (on a CPU); keep torch from being replaced: pip install --no-deps"
        yield Line("SGLang and torch", OK, found, needed=IN_SGLANG)
    elif minor(torch) > (2, 13):
        found = f"{said}: not tried; no torch_npu asks for the same torch as SGLang: pip install --no-deps"
        yield Line("SGLang and torch", OK, found, needed=IN_SGLANG)
    else:
        yield Line("SGLang and torch", WRONG, said, "pip install torch==2.13.0", IN_SGLANG)


def _plugin(facts: Facts) -> Iterator[Line]:
    for name, needed, mend in (
        (NPU, ("serving",), "pip install --no-deps . (in the checkout), which declares the entry points"),
        (EMULATED, ("sglang-emulated",), "pip install --no-deps ./packaging/emulated (in the checkout)"),
    ):
        if name in facts.platforms:
            yield Line(f"platform {name}", OK, "its entry point is installed", needed=needed)
        else:
            yield Line(f"platform {name}", MISSING, "no such entry point", mend, needed)
    if facts.selected is None:
        return
    chosen = facts.selected.data.get("selected", "")
    mend = f"SGLANG_PLATFORM={NPU} before the launch command (dsv4-npu serve-args prints it)"
    if chosen in (NPU, EMULATED):
        yield Line("selected", OK, f"SGLANG_PLATFORM={chosen}")
    elif chosen:
        yield Line("selected", WRONG, f"SGLANG_PLATFORM={chosen} names another platform", mend)
    else:
        yield Line("selected", MISSING, "SGLANG_PLATFORM is not set in this shell", mend)


def _replacements(facts: Facts) -> Iterator[Line]:
    for name, purpose in ((NPU, "serving"), (EMULATED, "sglang-emulated")):
        answer = facts.replaced.get(name)
        if answer is None:
            why = "SGLang is not installed" if "sglang" not in facts.versions else "it needs the parts above"
            yield Line(f"replacements by {name}", NOT_RUN, why, "mend the lines above", (purpose,))
        else:
            yield _replaced(name, purpose, answer)


def _replaced(name: str, purpose: str, answer: Answer) -> Line:
    title = f"replacements by {name}"
    if answer.error:
        return Line(title, WRONG, answer.error, "mend what the message names; docs/sglang.md", (purpose,))
    targets = answer.data["targets"]
    bad = [f"{what}: {detail}" for what, _, state, detail in targets if state != "ours"]
    if bad or not targets:
        found = f"{len(bad)} of {len(targets)} are not in force: {'; '.join(bad[:3])}" + ("; …" if len(bad) > 3 else "")
        return Line(title, WRONG, found, "reinstall SGLang 0.5.23 and dsv4-npu; unset SGLANG_PLUGINS", (purpose,))
    return Line(title, OK, f"all {len(targets)} in force", needed=(purpose,))


def _probe(facts: Facts) -> Iterator[Line]:
    name = "compressor's save rule"
    if facts.probe is None:
        yield Line(name, NOT_RUN, "it needs an NPU", "mend the lines above", ("serving",))
    elif facts.probe.error:
        mend = "serve without --speculative-algorithm, or install another build of the compressor"
        yield Line(name, WRONG, facts.probe.error, mend, ("serving",))
    else:
        yield Line(name, OK, "; ".join(facts.probe.data["results"]), needed=("serving",))
