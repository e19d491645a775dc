"""The doctor: what each gap does to each purpose, how broken packages are told, and that nothing heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4_npu.cli import main
from dsv4_npu.doctor import command, facts, rules
from dsv4_npu.doctor.facts import Answer, Facts
from dsv4_npu.doctor.rules import MISSING, NOT_RUN, OK, PURPOSES, WRONG, blockers, judge
from dsv4_npu.emulation import device

OURS = Answer({"targets": [["KV pool", "a:b", "ours", "replaced"], ["allocator", "c:d", "ours", "replaced"]]})


def ascend_host() -> Facts:
    """A host on which everything fits."""
    return Facts(
        python=(3, 11),
        machine="Linux aarch64",
        versions={
            "torch": "2.13.0",
            "torch_npu": "2.13.0",
            "triton-ascend": "3.2.0",
            "transformers": "5.19.0",
            "sglang": "0.5.23",
            "sgl-kernel-npu": "2026.5",
        },
        requires={"sglang": "torch==2.14.1", "torch_npu": "torch==2.13.0"},
        platforms=("dsv4_npu", "dsv4_npu_emulated"),
        cann=("/usr/local/Ascend/ascend-toolkit/latest", "8.5.0"),
        compiler=True,
        torch=Answer({"version": "2.13.0", "hook": True}),
        parts=Answer({"_C": [True, "12 kernels"], "_ledger": [True, "0.1.0"]}),
        triton=Answer({"version": "3.2.0"}),
        npu=Answer({"devices": ["Ascend910_9382"] * 8}),
        sampling=Answer({"device": "npu", "failures": {}}),
        probe=Answer({"results": ["C4 compressor, ring 16: pad rule"]}),
        release=Answer({"known": "proved by running its engine on a CPU"}),
        selected=Answer({"selected": "dsv4_npu"}),
        replaced={"dsv4_npu": OURS, "dsv4_npu_emulated": OURS},
    )


def without(name: str) -> Facts:
    host = ascend_host()
    return replace(host, versions={key: value for key, value in host.versions.items() if key != name})


def versions(**changes: str) -> Facts:
    host = ascend_host()
    return replace(host, versions={**host.versions, **{key.replace("__", "-"): v for key, v in changes.items()}})


def test_a_host_on_which_everything_fits_is_usable_for_everything() -> None:
    lines = judge(ascend_host())
    assert {one.state for one in lines} == {OK}
    assert all(not blockers(lines, purpose) for purpose in PURPOSES)
    assert any(one.found == "8 × Ascend910_9382: --platform a3" for one in lines)
    assert {purpose for one in lines for purpose in one.needed} == set(PURPOSES)


SERVING = {"serving"}
GAPS: list[tuple[Facts, str, str, set[str], str]] = [
    (replace(ascend_host(), python=(3, 9)), "python", WRONG, set(PURPOSES), "3.10"),
    (without("torch"), "torch", MISSING, set(PURPOSES), "pip install torch"),
    (versions(torch="2.9.1"), "torch", WRONG, set(PURPOSES), "pip install torch"),
    (
        replace(ascend_host(), torch=Answer(error="RuntimeError: Failed to load the backend extension: torch_npu")),
        "torch",
        WRONG,
        set(PURPOSES),
        "mend torch_npu",
    ),
    (
        replace(ascend_host(), torch=Answer({"version": "2.12.0", "hook": False})),
        "emulated npu device",
        WRONG,
        {"emulated-npu"},
        "2.13.0",
    ),
    (
        replace(ascend_host(), parts=Answer({"_C": [False, "_C.so is not built"], "_ledger": [True, ""]})),
        "C++ kernels (_C)",
        MISSING,
        set(),
        "pip install --no-build-isolation",
    ),
    (
        replace(ascend_host(), parts=Answer({"_C": [False, "_C.so does not load"], "_ledger": [True, ""]})),
        "C++ kernels (_C)",
        WRONG,
        set(),
        "pip install --no-build-isolation",
    ),
    (without("transformers"), "transformers", MISSING, set(PURPOSES), "transformers==5.19.0"),
    (versions(transformers="5.25.0"), "transformers", WRONG, set(PURPOSES), "transformers==5.19.0"),
    (replace(ascend_host(), cann=("", "")), "CANN", MISSING, SERVING, "install the CANN toolkit"),
    (replace(ascend_host(), compiler=False), "CANN", WRONG, SERVING, "set_env.sh"),
    (without("torch_npu"), "torch_npu", MISSING, SERVING, "'torch_npu==2.13.*'"),
    (versions(torch_npu="2.14.0"), "torch_npu", WRONG, SERVING, "'torch_npu==2.13.*'"),
    (
        replace(ascend_host(), npu=Answer(error="OSError: libascendcl.so: cannot open shared object file")),
        "torch_npu",
        WRONG,
        SERVING,
        "set_env.sh",
    ),
    (replace(ascend_host(), npu=Answer({"devices": []})), "NPU", MISSING, SERVING, "npu-smi info"),
    (replace(ascend_host(), npu=Answer({"devices": ["Ascend310P3"]})), "NPU", WRONG, SERVING, "by hand"),
    (without("triton-ascend"), "triton", MISSING, {"emulated-npu", "sglang-emulated", "serving"}, "triton-ascend"),
    (versions(triton="3.7.1"), "triton", WRONG, {"emulated-npu", "sglang-emulated", "serving"}, "pip uninstall"),
    (without("sgl-kernel-npu"), "sgl-kernel-npu", MISSING, SERVING, "build it from"),
    (
        replace(ascend_host(), sampling=Answer(error="OSError: undefined symbol")),
        "sgl-kernel-npu",
        WRONG,
        SERVING,
        "build it from",
    ),
    (without("sglang"), "SGLang", MISSING, {"sglang-emulated", "serving"}, "sglang==0.5.23"),
    (
        replace(ascend_host(), release=Answer(error="SGLang 0.6.0 is unknown")),
        "SGLang",
        WRONG,
        {"sglang-emulated", "serving"},
        "sglang==0.5.23",
    ),
    (versions(torch="2.12.0", torch_npu="2.12.0"), "SGLang and torch", WRONG, {"sglang-emulated", "serving"}, "2.13.0"),
    (
        replace(ascend_host(), platforms=("dsv4_npu",)),
        "platform dsv4_npu_emulated",
        MISSING,
        {"sglang-emulated"},
        "packaging/emulated",
    ),
    (replace(ascend_host(), platforms=("dsv4_npu_emulated",)), "platform dsv4_npu", MISSING, SERVING, "entry points"),
    (
        replace(ascend_host(), selected=Answer({"selected": ""})),
        "selected",
        MISSING,
        set(),
        "SGLANG_PLATFORM=dsv4_npu before the launch command",
    ),
    (replace(ascend_host(), selected=Answer({"selected": "cuda"})), "selected", WRONG, set(), "SGLANG_PLATFORM"),
    (
        replace(
            ascend_host(),
            replaced={
                "dsv4_npu": Answer({"targets": [["allocator", "c:d", "theirs", "it is X"]]}),
                "dsv4_npu_emulated": OURS,
            },
        ),
        "replacements by dsv4_npu",
        WRONG,
        SERVING,
        "reinstall SGLang",
    ),
    (
        replace(ascend_host(), replaced={"dsv4_npu": OURS, "dsv4_npu_emulated": Answer(error="ImportError: x")}),
        "replacements by dsv4_npu_emulated",
        WRONG,
        {"sglang-emulated"},
        "docs/sglang.md",
    ),
    (
        replace(ascend_host(), replaced={"dsv4_npu_emulated": OURS}),
        "replacements by dsv4_npu",
        NOT_RUN,
        SERVING,
        "mend",
    ),
    (
        replace(ascend_host(), probe=Answer(error="ConfigError: speculation with D = 4 would lose accepted rows")),
        "compressor's save rule",
        WRONG,
        SERVING,
        "without --speculative-algorithm",
    ),
    (replace(ascend_host(), probe=None), "compressor's save rule", NOT_RUN, SERVING, "mend"),
]


@pytest.mark.parametrize(("host", "name", "state", "stopped", "mend"), GAPS, ids=[f"{g[1]} {g[2]}" for g in GAPS])
def test_each_gap_is_one_line_with_what_mends_it(
    host: Facts, name: str, state: str, stopped: set[str], mend: str
) -> None:
    lines = judge(host)
    (line,) = (one for one in lines if one.name == name)
    assert line.state == state
    assert mend in line.mend
    assert {purpose for purpose in PURPOSES if line in blockers(lines, purpose)} == stopped


def test_which_torch_fits_is_said() -> None:
    for torch, npu, words in (
        ("2.13.0+cpu", "2.13.0", "0.5.23 ran on 2.13.0"),
        ("2.14.0", "2.14.0", "no torch_npu asks for the same torch as SGLang"),
    ):
        lines = judge(versions(torch=torch, torch_npu=npu))
        (line,) = (one for one in lines if one.name == "SGLang and torch")
        assert (line.state, words in line.found, "--no-deps" in line.found) == (OK, True, True)
        assert not blockers(lines, "serving")


def test_sampling_functions_that_fail_are_named() -> None:
    host = replace(ascend_host(), sampling=Answer({"device": "npu", "failures": {"top_k_renorm_prob": "top 2 of 4"}}))
    (line,) = (one for one in judge(host) if one.name == "sgl-kernel-npu")
    assert (line.state, "ours run instead of top_k_renorm_prob" in line.found) == (OK, True)


@pytest.mark.parametrize("purpose", list(PURPOSES))
def test_the_exit_status_is_about_the_purpose(
    purpose: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "gather", lambda quick, hook: ascend_host())
    assert main(["doctor", "--for", purpose]) == 0
    assert f"for {purpose:<16} usable" in capsys.readouterr().out
    monkeypatch.setattr(command, "gather", lambda quick, hook: replace(ascend_host(), cann=("", "")))
    assert main(["doctor", "--for", purpose, "--json"]) == int(purpose == "serving")
    data = json.loads(capsys.readouterr().out)
    assert data["usable"] == {one: one != "serving" for one in PURPOSES}
    assert {"name": "CANN", "state": "missing"}.items() <= next(x for x in data["lines"] if x["name"] == "CANN").items()


def test_without_a_purpose_an_ascend_host_is_meant_for_serving(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = replace(without("torch_npu"), cann=("", ""), npu=None)
    for host, status in ((ascend_host(), 0), (without("torch_npu"), 1), (plain, 0)):
        monkeypatch.setattr(command, "gather", lambda quick, hook, host=host: host)
        assert main(["doctor", "--json"]) == status
        meant = "emulation" if host is plain else "serving"
        assert json.loads(capsys.readouterr().out)["for"] == meant


def test_lines_fit_and_each_gap_shows_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    command._show(judge(without("torch_npu")), {"serving": judge(without("torch_npu"))[:1]})
    text = capsys.readouterr().out
    assert "→ pip install 'torch_npu==2.13.*'" in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_hook_is_the_one_that_the_emulation_uses() -> None:
    assert command.HOOK == device._HOOK


def package(folder: Path, name: str, body: str, entry_points: str = "") -> None:
    """A distribution with one module, as pip would leave it."""
    (folder / f"{name}.py").write_text(body)
    info = folder / f"{name}-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.13.0\nRequires-Dist: torch (==2.13.0)\n"
    )
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)


@pytest.mark.parametrize("autoload", [False, True])
def test_a_broken_torch_npu_is_told_not_raised(autoload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n" if autoload else ""
    package(tmp_path, "torch_npu", "raise OSError('libhccl.so: cannot open shared object file')", entry)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = facts.installed()
    assert found["torch_npu"] == "2.13.0"
    assert facts._about_torch("torch_npu") == "torch (==2.13.0)"
    answer = facts.ask(facts._TORCH if autoload else facts._NPU, HOOK=command.HOOK)
    assert "libhccl.so" in answer.error
    assert ("backend extension" in answer.error) == autoload


def test_child_processes_that_die_or_hang_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts.ask("answer = {'a': NUMBER}", NUMBER=7) == Answer({"a": 7})
    killed = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    assert facts.ask(killed).error == "the process was killed by signal 9"
    assert facts.ask("raise SystemExit(3)").error == "exit status 3"
    chain = "try:\n    raise OSError('the cause')\nexcept OSError as e:\n    raise RuntimeError('the end') from e"
    assert facts.ask(chain).error == "OSError: the cause → RuntimeError: the end"
    monkeypatch.setattr(facts, "PATIENCE", 0.2)
    assert facts.ask("import time\ntime.sleep(60)").error == "no answer within 0.2 s"


def test_the_toolkit_is_found_by_its_files(tmp_path: Path) -> None:
    assert facts.toolkit((str(tmp_path / "none"),)) == ("", "")
    (tmp_path / "compiler").mkdir()
    assert facts.toolkit((str(tmp_path),)) == (str(tmp_path), "unknown")
    (tmp_path / "compiler" / "version.info").write_text("Version=8.2.RC1\nversion_dir=8.2\n")
    assert facts.toolkit((str(tmp_path / "none"), str(tmp_path))) == (str(tmp_path), "8.2.RC1")
    (tmp_path / "version.cfg").write_text("# version: 1.0\nruntime_running_version=[8.5.0:8.5.0]\n")
    assert facts.toolkit((str(tmp_path),)) == (str(tmp_path), "8.5.0")


def test_nothing_heavy_is_imported_in_the_doctors_process() -> None:
    script = (
        "import sys\nfrom dsv4_npu.cli import main\nmain(['doctor', '--quick', '--json'])\n"
        "heavy = {'torch', 'numpy', 'triton', 'torch_npu', 'transformers', 'sglang'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines: list[dict[str, Any]] = json.loads(done.stdout)["lines"]
    assert next(one for one in lines if one["name"] == "torch")["state"] == OK
    assert tuple(PURPOSES) == rules.ALL
