"""The ways in which a plugin of SGLang goes wrong without a word: each with its guard, and with the guard off."""

from __future__ import annotations

import ast
import gc
import json
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt import platforms
from sglang.srt.arg_groups.platform_hook import handle_platform_defaults
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_context

from dsv4_npu.errors import ConfigError, UnavailableError
from dsv4_npu.sglang import names, plugin, sampling_module, verify
from dsv4_npu.sglang.limits import check_swa_tokens
from dsv4_npu.sglang.start import before_pools
from dsv4_npu.sglang.targets import EMULATED, TARGETS, Target, targets
from tests.sglang.processes import ROOT, answer, run

HERE = targets(EMULATED, "0.5.23")
HOOKED = [target for target in HERE if target.kind in ("class", "function", "around")]


def by_name(target: Target) -> str:
    return target.theirs.rpartition(":")[2]


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process as before its first look; what the test changes is undone."""
    monkeypatch.setattr(verify, "_verified", [])
    return monkeypatch


@pytest.fixture
def arguments() -> Iterator[None]:
    """SGLang's server arguments for as long as the test runs."""
    with get_context().override_server_args(
        page_size=128, c128_page_size=16, device="cpu", attention_backend="torch_native"
    ):
        yield


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """A module of SGLang that is gone after the test."""
    made = types.ModuleType("sglang.module_of_a_test")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def revert(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    """Put SGLang's own object back, in the target's module alone, as if the hook had never been applied there."""
    place = names.place(target.theirs)
    original = plugin.ORIGINALS[target.theirs][0]
    if place.is_entry:
        monkeypatch.setitem(place.holder, place.name, original)
    else:
        monkeypatch.setattr(place.holder, place.name, original)


def test_everything_is_applied_in_this_process(unverified: pytest.MonkeyPatch) -> None:
    assert [state.state for state in verify.targets_report()] == [verify.OURS] * len(HERE)
    verify.verify_applied()
    assert {names.dotted(target.theirs) for target in HOOKED} <= HookRegistry._patched


# -- T1: a hook on None -----------------------------------------------------------------------------------------------


def test_a_target_that_is_none_is_not_hooked(module: types.ModuleType) -> None:
    module.kernel = None
    hooks = dict(HookRegistry._hooks)
    with pytest.raises(TypeError, match="it is None in this process"):
        plugin._register(f"{module.__name__}:kernel", "dsv4_npu.sampling:top_k_renorm_prob", "function")
    assert hooks == HookRegistry._hooks


NPU_PROCESS = """
import json, os, sys, types
import torch

class Npu(types.SimpleNamespace):
    def __getattr__(self, name):
        return lambda *a, **k: 0

torch.npu = Npu(is_available=lambda: True)
from sglang.srt.platforms import current_platform
from sglang.srt.utils import is_npu
import sglang.kernels.ops.speculative.verify_sampling as sampling, sglang.kernels.ops.sampling.renorm as renorm
import dsv4_npu.sampling as ours
from dsv4_npu.sglang.sampling_module import FUNCTIONS

def found():
    return {name: getattr(renorm if "renorm" in name else sampling, name) for name in FUNCTIONS}

answer = {
    "class": [kind.__name__ for kind in type(current_platform).__mro__[:2]],
    "is npu": [current_platform.is_npu(), is_npu(), current_platform.is_out_of_tree()],
    "ours": [name for name, value in found().items() if value is getattr(ours, name)],
}
from sgl_kernel_npu.sample.verify_tree_greedy import verify_tree_greedy
answer["greedy"] = verify_tree_greedy is ours.verify_tree_greedy
try:
    import sgl_kernel_npu
except ImportError as error:
    answer["library"] = str(error)

# The guard off: nothing is injected before SGLang's module is imported.
import importlib
for name in [name for name in sys.modules if name.startswith("sgl_kernel_npu")]:
    del sys.modules[name]
importlib.reload(sampling), importlib.reload(renorm)
answer["none without the injection"] = [name for name, value in found().items() if value is None]

# The guard of the registration off: a hook on None rewrites every global that is None.
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
def nones():
    return sum(value is None for m in list(sys.modules.values()) for value in list(vars(m).values()))
before = nones()
HookRegistry._apply_target(
    "sglang.kernels.ops.speculative.verify_sampling.tree_speculative_sampling_target_only",
    [(HookType.REPLACE, lambda: 1, None)])
answer["rewritten"] = before - nones()
os.write(1, json.dumps(answer).encode())
os._exit(0)
"""


def test_the_npu_platform_and_its_sampling_functions() -> None:
    found = answer(NPU_PROCESS, "dsv4_npu")
    assert found["class"] == ["NpuPlatform", "NPUSRTPlatform"]
    assert found["is npu"] == [True, True, False]  # T8: the in-tree identity, which DeepSeek-V4 asks for
    assert found["ours"] == list(sampling_module.FUNCTIONS)
    assert found["greedy"]
    assert found["library"] == "No module named 'sgl_kernel_npu'"  # nobody pretends that its operators are there
    assert found["none without the injection"] == list(sampling_module.FUNCTIONS)
    assert found["rewritten"] > 1000


# -- T2: our own name for SGLang's class is rebound to our class ------------------------------------------------------


def rebound_names_in_use(path: Path) -> list[str]:
    """Uses, inside functions, of names that were imported from SGLang and are targets."""
    theirs = {target.theirs.rpartition(":")[2] for target in TARGETS if target.kind == "class"}
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.")
        for alias in node.names
        if alias.name in theirs
    }
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [
        f"{path.name}:{node.lineno} {node.id}"
        for function in functions
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and node.id in imported
    ]


def test_no_method_of_ours_names_a_class_that_is_rebound(tmp_path: Path) -> None:
    files = sorted((ROOT / "dsv4_npu" / "sglang").glob("*.py"))
    assert [use for path in files for use in rebound_names_in_use(path)] == []
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from sglang.srt.hardware_backend.npu.dsv4.dsv4_memory_pool import DSV4NPUTokenToKVPool as Base\n"
        "class Pool(Base):\n    def size(self):\n        return Base.size(self)\n"
    )
    assert rebound_names_in_use(bad) == ["bad.py:4 Base"]


def test_such_a_method_would_call_itself_for_ever(module: types.ModuleType) -> None:
    class Theirs:
        def size(self) -> int:
            return 1

    module.Pool = module.Base = Theirs

    class Ours(Theirs):
        def size(self) -> int:
            return module.Base.size(self)

    assert Ours().size() == 1
    module_of_target = types.ModuleType("sglang.module_of_the_class")
    module_of_target.Pool = Theirs
    sys.modules[module_of_target.__name__] = module_of_target
    try:
        HookRegistry._apply_target("sglang.module_of_the_class.Pool", [(HookType.REPLACE, Ours, None)])
        with pytest.raises(RecursionError):
            Ours().size()
    finally:
        del sys.modules[module_of_target.__name__]


@pytest.mark.parametrize("target", [target for target in HERE if target.kind == "class"], ids=by_name)
def test_originals_survive_the_rebinding(target: Target) -> None:
    original = plugin.ORIGINALS[target.theirs][0]
    assert original is not names.value(target.theirs)
    assert issubclass(names.value(target.theirs), original)


# -- T3: a Triton kernel object ---------------------------------------------------------------------------------------


def test_a_triton_kernel_is_not_hooked() -> None:
    name = "sglang.kernels.ops.kvcache.dsv4_c128_cleanup:_clear_unaccepted_c128_draft_states_kernel"
    kernel = names.value(name)
    with pytest.raises(TypeError, match="a JITFunction cannot be hooked"):
        plugin._register(name, "dsv4_npu.sampling:top_k_renorm_prob", "function")
    assert names.value(name) is kernel
    HookRegistry._apply_target(names.dotted(name), [(HookType.REPLACE, lambda: None, None)])
    try:
        with pytest.raises(TypeError, match="not subscriptable"):  # what SGLang would meet at the first launch
            names.value(name)[(1,)]()
    finally:
        names.place(name).set(kernel)


# -- T4: a hook that failed is only logged ----------------------------------------------------------------------------


@pytest.mark.parametrize("target", HERE, ids=by_name)
def test_a_target_that_is_not_ours_stops_the_process(unverified: pytest.MonkeyPatch, target: Target) -> None:
    revert(unverified, target)
    with pytest.raises(UnavailableError, match=r"1 of \d+ replacements are not in force") as error:
        verify.verify_applied()
    assert target.theirs in str(error.value)
    assert target.purpose in str(error.value)


def test_a_failed_hook_is_only_logged_by_sglang(
    unverified: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    HookRegistry.register("sglang.srt.mem_cache.gone.Pool", lambda: None, HookType.REPLACE)
    try:
        with caplog.at_level(logging.ERROR):
            HookRegistry.apply_hooks()
        assert "Failed to apply hooks to sglang.srt.mem_cache.gone.Pool" in caplog.text
    finally:
        del HookRegistry._hooks["sglang.srt.mem_cache.gone.Pool"]
    gone = Target("pool", "sglang.srt.mem_cache.gone:Pool", "dsv4_npu.sglang.kv_pool:KVPool", "class")
    unverified.setattr("dsv4_npu.sglang.targets.TARGETS", (*TARGETS, gone))
    unverified.setattr(plugin, "FAILURES", {})
    plugin.register_hooks()
    assert list(plugin.FAILURES) == [gone.theirs]
    with pytest.raises(UnavailableError, match=r"pool \(sglang\.srt\.mem_cache\.gone:Pool\): ModuleNotFoundError"):
        verify.verify_applied()


def test_a_plugin_that_never_ran_stops_the_process(unverified: pytest.MonkeyPatch) -> None:
    for target in HERE:
        revert(unverified, target)
    unverified.setattr(plugin, "ORIGINALS", {})
    with pytest.raises(UnavailableError, match=f"{len(HERE)} of {len(HERE)} replacements are not in force") as error:
        verify.verify_applied()
    assert "The plugin did not run here: SGLANG_PLUGINS must be unset" in str(error.value)


def test_every_process_is_stopped_before_it_takes_memory(unverified: pytest.MonkeyPatch) -> None:
    """In the main process by the arguments, in a scheduler by its model and by its pools, whoever's these are."""
    half = next(target for target in HERE if target.kind == "class")
    revert(unverified, half)
    platform = platforms.current_platform
    kind = type("Pool", (BaseSWAKVPool,), {})
    kind.__abstractmethods__ = frozenset()
    pool = kind.__new__(kind)
    calls = {
        "arguments": lambda: handle_platform_defaults(types.SimpleNamespace()),
        "model": lambda: platform.post_load_model(torch.nn.Identity()),
        "SGLang's allocator": lambda: SWATokenToKVPoolAllocator(
            512, 512, page_size=128, dtype=torch.float32, device="cpu", kvcache=pool, need_sort=False
        ),
        "start": lambda: before_pools("cpu", 4096, 8192, 16),
    }
    for call in calls.values():
        with pytest.raises(UnavailableError, match="not fully applied"):
            call()


SERVER = """
import runpy, sys
sys.argv = ["launch_server", "--model-path", {path!r}, "--device", "cpu", "--load-format", "dummy"]
runpy.run_module("sglang.launch_server", run_name="__main__")
"""


def test_a_server_whose_plugin_was_left_out_stops_with_the_list(tmp_path: Path) -> None:
    """SGLang's own way to leave plugins out, and its own launcher: without the check it would serve."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, **sizes}
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    done = run(SERVER.format(path=str(tmp_path)), EMULATED, SGLANG_PLUGINS="another")
    assert done.returncode != 0
    said = done.stderr[done.stderr.index("UnavailableError: dsv4_npu is not fully applied") :]
    assert "The plugin did not run here" in said
    assert [target for target in HERE if f"({target.theirs})" not in said] == []


CLASSES = [target for target in HERE if target.kind == "class" and "pool sizes" not in target.purpose]


@pytest.mark.parametrize("target", CLASSES, ids=by_name)
def test_our_classes_check_before_they_use_an_argument(
    arguments: None, unverified: pytest.MonkeyPatch, target: Target
) -> None:
    revert(unverified, HOOKED[-1])
    ours = names.value(target.ours)

    class Anything:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was read before the check")

    code = ours.__init__.__code__
    wanted = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    plain = {"size": 4, "max_context_len": 256, "device": "cpu", "enable_memory_saver": False, "pre_alloc_size": 2}
    with pytest.raises(UnavailableError, match="not fully applied"):
        ours(**{name: plain.get(name, Anything()) for name in wanted})


# -- stale copies: what propagation does not reach --------------------------------------------------------------------


@pytest.mark.parametrize("target", [HOOKED[0], HOOKED[5]], ids=by_name)
def test_a_copy_left_in_another_module_is_seen(
    unverified: pytest.MonkeyPatch, module: types.ModuleType, target: Target
) -> None:
    original = plugin.ORIGINALS[target.theirs][0]
    holders = {
        "TABLE['cpu']": {"TABLE": {"cpu": original}},
        "an entry of sglang.module_of_a_test.DEPS": {"DEPS": (1, original)},
        "a default of sglang.module_of_a_test.run": {"run": lambda call=original: call},
        "sglang.module_of_a_test.Holder.call": {"Holder": type("Holder", (), {"call": original})},
        "sglang.module_of_a_test.imported": {"imported": original},
    }
    for contents in holders.values():
        vars(module).update(contents)
    with pytest.raises(UnavailableError, match="SGLang's own is still held by") as error:
        verify.verify_applied()
    assert [place for place in holders if place not in str(error.value)] == []


def test_another_plugin_on_top_is_told_apart(unverified: pytest.MonkeyPatch) -> None:
    """Around ours it keeps ours; in its place it does not."""
    from sglang.srt.plugins.hook_registry import _wrap_fn

    target = next(target for target in HOOKED if target.kind == "function")
    place = names.place(target.theirs)
    around = _wrap_fn(place.get(), lambda original, *a, **k: original(*a, **k), HookType.AROUND)
    unverified.setattr(place.holder, place.name, around)
    assert {state.state for state in verify.targets_report()} == {verify.OURS}
    unverified.setattr(place.holder, place.name, _wrap_fn(around, lambda *a, **k: None, HookType.REPLACE))
    with pytest.raises(UnavailableError, match="does not lead to"):
        verify.verify_applied()


# -- T7: subclasses that exist already keep their old base ------------------------------------------------------------


def test_a_subclass_of_a_replaced_class_is_seen(unverified: pytest.MonkeyPatch) -> None:
    target = CLASSES[0]
    child = type("Child", (plugin.ORIGINALS[target.theirs][0],), {"__module__": "sglang.elsewhere"})
    with pytest.raises(UnavailableError, match=r"its subclass sglang\.elsewhere\.Child"):
        verify.verify_applied()
    assert not issubclass(child, names.value(target.ours))
    del child
    gc.collect()


# -- T8, T9: the emulated platform ------------------------------------------------------------------------------------


def test_only_the_deepseek_pools_pass_on_the_emulated_platform() -> None:
    from sglang.srt.mem_cache.kv_cache_configurator import reject_out_of_tree_path

    platform = platforms.current_platform
    assert platform.is_out_of_tree()
    reject_out_of_tree_path(platform, subsystem="the DeepSeek-V4 KV pool")
    with pytest.raises(NotImplementedError, match="HiSparse"):
        reject_out_of_tree_path(platform, subsystem="the HiSparse DSA KV pool")
    original = plugin.ORIGINALS["sglang.srt.platforms.interface:reject_out_of_tree_path"][0]
    with pytest.raises(NotImplementedError, match="DeepSeek-V4"):
        original(platform, subsystem="the DeepSeek-V4 KV pool")


def test_npu_branches_are_on_where_sglang_decided_otherwise() -> None:
    from sglang.srt.utils import is_npu

    assert not is_npu()
    assert allocation._is_npu
    assert allocation.ALLOC_EXTEND_FUNCS["cpu"] is allocation.ALLOC_EXTEND_FUNCS["npu"]
    assert "xpu" not in allocation.ALLOC_EXTEND_FUNCS  # looking at a table must not fill it


def test_on_an_npu_the_flags_are_looked_at() -> None:
    flags = [target for target in targets("dsv4_npu", "0.5.23") if target.kind == "check"]
    assert {by_name(flag) for flag in flags} == {"_is_npu"}
    assert len(flags) == 2


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_a_window_pool_below_one_c128_group_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"holds 1536 tokens and one C128 group takes 2048 .* least 0\.125 "):
        before_pools("cpu", 1536, 16384, 16)
    with pytest.raises(ConfigError, match="takes 4096"):
        before_pools("cpu", 4095, 16384, 32)
    before_pools("cpu", 2048, 16384, 16)
    check_swa_tokens(4096, 32)


def test_an_npu_server_is_stopped_where_its_compressor_loses_accepted_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe runs on an NPU alone, at the widest verify of the server, on the model's hidden size."""
    from dsv4_npu.sglang import activation, probe, start
    from tests.core.test_probe import Fused, old_rule, pad_rule

    monkeypatch.setattr("sglang.srt.runtime_context.max_speculative_num_draft_tokens", lambda: 5)
    monkeypatch.setattr(
        "sglang.srt.runtime_context.process_model_config", lambda: types.SimpleNamespace(hidden_size=32)
    )
    monkeypatch.setattr(probe, "installed_compressor", lambda by_request: Fused(old_rule, by_request))
    before_pools("cpu", 4096, 16384, 16)
    monkeypatch.setattr(start.activation, "active", lambda: activation.NPU)
    with pytest.raises(ConfigError, match="old rule"):
        before_pools("cpu", 4096, 16384, 16)
    monkeypatch.setattr(probe, "installed_compressor", lambda by_request: Fused(pad_rule, by_request))
    before_pools("cpu", 4096, 16384, 16)
    monkeypatch.setattr("sglang.srt.runtime_context.max_speculative_num_draft_tokens", lambda: None)
    monkeypatch.setattr(probe, "installed_compressor", None)
    before_pools("cpu", 4096, 16384, 16)


# -- the sampling functions of a library that is there ----------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a ``sgl_kernel_npu``; the stand-in of this process is out of sight."""
    for name in [name for name in sys.modules if name.split(".")[0] == "sgl_kernel_npu"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sgl_kernel_npu").mkdir()
    (tmp_path / "sgl_kernel_npu" / "__init__.py").touch()
    yield tmp_path / "sgl_kernel_npu"
    for name in [name for name in sys.modules if name.split(".")[0] == "sgl_kernel_npu"]:
        del sys.modules[name]


def test_a_library_that_is_there_is_left_alone(library: Path) -> None:
    (library / "sample").mkdir()
    (library / "sample" / "__init__.py").write_text("raise ImportError('must not be imported here')")
    assert not sampling_module.inject()
    assert not any(name.startswith("sgl_kernel_npu") for name in sys.modules)


def test_a_library_without_its_sampling_part_gets_ours(library: Path) -> None:
    assert sampling_module.inject()
    import sgl_kernel_npu
    from sgl_kernel_npu.sample import top_k_renorm_prob

    from dsv4_npu import sampling

    assert top_k_renorm_prob is sampling.top_k_renorm_prob
    assert sgl_kernel_npu.__file__ == str(library / "__init__.py")  # the rest of the library is its own


def test_the_self_check_decides_per_function(module: types.ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    from dsv4_npu import sampling

    def right(*args: Any, **kwargs: Any) -> Any:
        return sampling.top_p_renorm_prob(*args, **kwargs)

    def wrong(probs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return probs

    module.top_k_renorm_prob, module.top_p_renorm_prob, module.chain_speculative_sampling_triton = wrong, right, None
    # An engine that ran in this process before has raised the level.
    with caplog.at_level(logging.WARNING):
        result = sampling_module.settle(torch.device("cpu"))
    assert module.top_k_renorm_prob is sampling.top_k_renorm_prob
    assert module.top_p_renorm_prob is right
    assert module.chain_speculative_sampling_triton is sampling.chain_speculative_sampling_triton
    assert result["top_p_renorm_prob"] == "library"
    assert result["top_k_renorm_prob"] == "ours"
    assert "top_k_renorm_prob of SGLang fails the self-check on cpu (top 2 of 4): using ours" in caplog.text
