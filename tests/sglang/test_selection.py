"""Who is selected, and that nothing at all happens where somebody else is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from sglang.srt import platforms

from dsv4_npu.errors import UnavailableError
from dsv4_npu.sglang import activation, versions
from dsv4_npu.sglang.targets import EMULATED, targets
from tests.sglang.processes import ROOT, answer, run

#: Before and after SGLang loaded its plugins: every global of every module, by identity. Then again with the guard of
#: register_hooks() switched off, as if it had not looked at the platform.
GLOBALS = """
import json, sys
from sglang.srt.platforms import current_platform
import sglang.srt.mem_cache.allocation, sglang.srt.mem_cache.kv_cache_configurator
import sglang.kernels.ops.speculative.verify_sampling, sglang.srt.plugins as plugins
from sglang.srt.plugins.hook_registry import HookRegistry

def globals_now():
    return {(m, k): id(v) for m in list(sys.modules) for k, v in list(vars(sys.modules[m]).items())
            if not m.startswith("dsv4_npu") and k != "_plugins_loaded"}

def load():
    before, modules = globals_now(), set(sys.modules)
    plugins.load_plugins()
    after = globals_now()
    return {
        "changed": sorted(map(".".join, (key for key in before if after.get(key) != before[key]))),
        "new modules": sorted(set(sys.modules) - modules),
        "ours": sorted(m for m in sys.modules if m.split(".")[0] in ("dsv4_npu", "sgl_kernel_npu", "torch_npu")),
        "hooks": sorted(HookRegistry._hooks),
    }

found = {"platform": type(current_platform).__module__, "guarded": load()}
from dsv4_npu.sglang import activation
activation.active = lambda: "dsv4_npu_emulated"
plugins._plugins_loaded = False
found["unguarded"] = load()
print(json.dumps(found))
"""
LIGHT = ["dsv4_npu", "dsv4_npu.errors", "dsv4_npu.sglang", "dsv4_npu.sglang.activation", "dsv4_npu.sglang.plugin"]


def test_installed_and_not_selected_changes_nothing() -> None:
    found = answer(GLOBALS, None)
    assert found["platform"].startswith("sglang.")
    guarded = found["guarded"]
    assert guarded["changed"] == []
    assert guarded["hooks"] == []
    assert guarded["ours"] == LIGHT
    assert set(guarded["new modules"]) <= set(LIGHT)
    unguarded = found["unguarded"]
    assert "sglang.srt.mem_cache.allocation._is_npu" in unguarded["changed"]
    assert "sglang.srt.mem_cache.kv_cache_configurator.reject_out_of_tree_path" in unguarded["changed"]
    assert set(unguarded["ours"]) > set(LIGHT)
    hooked = [target for target in targets(EMULATED, "0.5.23") if target.kind in ("class", "function", "around")]
    assert len(unguarded["hooks"]) == len(hooked)


@pytest.fixture
def select(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Functions that ask torch and the environment, both answering what the test says."""
    monkeypatch.setattr(activation, "npu_available", lambda: True)
    return monkeypatch


@pytest.mark.parametrize("selected", [None, "", "dsv4_npu_emulated", "another", "DSV4_NPU"])
def test_the_npu_platform_answers_only_to_its_name(select: pytest.MonkeyPatch, selected: str | None) -> None:
    select.setenv("SGLANG_PLATFORM", selected) if selected is not None else select.delenv("SGLANG_PLATFORM")
    assert activation.activate() is None
    select.setenv("SGLANG_PLATFORM", "dsv4_npu")
    assert activation.activate() == "dsv4_npu.sglang.platform:NpuPlatform"


def test_named_without_an_npu_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "dsv4_npu")
    with pytest.raises(UnavailableError, match="SGLANG_PLATFORM=dsv4_npu: torch sees no Ascend NPU") as error:
        platforms._resolve_platform()
    assert "SGLANG_PLATFORM=dsv4_npu_emulated" in str(error.value)
    assert "unset the variable" in str(error.value)


@pytest.mark.parametrize("selected", [None, "", "dsv4_npu", "another"])
def test_the_emulated_platform_answers_only_to_its_name(select: pytest.MonkeyPatch, selected: str | None) -> None:
    select.setenv("SGLANG_PLATFORM", selected) if selected is not None else select.delenv("SGLANG_PLATFORM")
    assert activation.activate_emulated() is None
    select.setenv("SGLANG_PLATFORM", "dsv4_npu_emulated")
    assert activation.activate_emulated() == "dsv4_npu.sglang.emulated_platform:EmulatedPlatform"


def test_a_lone_plugin_that_answered_always_would_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: with the name no longer asked for, SGLang takes our platform although nobody selected it."""
    monkeypatch.delenv("SGLANG_PLATFORM")
    assert type(platforms._resolve_platform()).__module__.startswith("sglang.")
    monkeypatch.setattr(activation, "_selected", lambda: EMULATED)
    assert type(platforms._resolve_platform()).__module__ == "dsv4_npu.sglang.emulated_platform"


def test_activation_refuses_an_unknown_release(select: pytest.MonkeyPatch) -> None:
    select.setattr(versions, "installed", lambda: "0.6.0")
    for name, activate in (("dsv4_npu", activation.activate), ("dsv4_npu_emulated", activation.activate_emulated)):
        select.setenv("SGLANG_PLATFORM", name)
        with pytest.raises(UnavailableError, match=r"SGLang 0\.6\.0 is unknown"):
            activate()
    select.delenv("SGLANG_PLATFORM")
    assert activation.activate() is None  # unselected it has no opinion on releases either


def test_each_platform_is_a_distribution_of_its_own() -> None:
    """SGLang skips the plugins of every distribution that offers a platform other than the selected one."""
    for folder, name in ((ROOT, "dsv4_npu"), (ROOT / "packaging" / "emulated", "dsv4_npu_emulated")):
        text = (folder / "pyproject.toml").read_text()
        for group in ("platforms", "plugins"):
            (entries,) = re.findall(rf'entry-points\."sglang\.srt\.{group}"\]\n((?:\w.*\n)+)', text)
            assert [line.split(" = ")[0] for line in entries.splitlines()] == [name]


# -- what the platform modules may import while SGLang is half imported -----------------------------------------------

ALLOWED = ("sglang.srt.platforms", "sglang.srt.environ", "sglang.srt.plugins.hook_registry")


def early_imports(path: Path, seen: set[Path] | None = None) -> list[str]:
    """SGLang's modules that importing ``path`` imports, through our own modules too."""
    seen = set() if seen is None else seen
    if path in seen:
        return []
    seen.add(path)
    found: list[str] = []
    for node in ast.parse(path.read_text()).body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            file = ROOT / (name.replace(".", "/") + ".py")
            if name.startswith("sglang."):
                found.append(name)
            elif name.startswith("dsv4_npu.sglang") and file.is_file():
                found += early_imports(file, seen)
    return [name for name in found if not name.startswith(ALLOWED)]


@pytest.mark.parametrize("module", ["platform", "emulated_platform", "activation", "plugin"])
def test_early_modules_import_nothing_heavy(module: str, tmp_path: Path) -> None:
    path = ROOT / "dsv4_npu" / "sglang" / f"{module}.py"
    assert early_imports(path) == []
    heavy = tmp_path / "heavy.py"
    heavy.write_text(path.read_text() + "\nfrom sglang.srt.utils import get_bool_env_var\n")
    assert early_imports(heavy)


def test_a_heavy_import_in_the_platform_module_would_fail() -> None:
    """Mutation: SGLang asks for its platform in the middle of importing its utils."""
    script = """
    import sys, types
    from dsv4_npu.sglang import activation
    bad = types.ModuleType("bad_platform")
    def missing(name):
        from sglang.srt.utils import get_bool_env_var
    bad.__getattr__ = missing
    sys.modules["bad_platform"] = bad
    activation.activate_emulated.__code__ = (lambda: "bad_platform:Platform").__code__
    import sglang.srt.utils
    """
    done = run(script, "dsv4_npu_emulated")
    assert done.returncode != 0
    assert "partially initialized module" in done.stderr
