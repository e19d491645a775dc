"""What SGLang calls at the start of every one of its processes: register the replacements of :mod:`targets`.

SGLang logs what goes wrong here and goes on with its own code, so nothing is reported from here: what could not be
registered is written down in :data:`FAILURES`, and :func:`dsv4_npu.sglang.verify.verify_applied` stops the process
before it takes any memory.
"""

from __future__ import annotations

import types
from typing import Any

from dsv4_npu.sglang import activation

#: SGLang's name of a target: SGLang's own value, in a tuple, since the hook registry rebinds globals that hold it.
ORIGINALS: dict[str, tuple[Any]] = {}
#: SGLang's name of a target: why it could not be registered.
FAILURES: dict[str, str] = {}


def register_hooks() -> None:
    """Register every replacement for the active platform; nothing at all where another platform is active."""
    platform = activation.active()
    if platform is None:
        return
    from dsv4_npu.sglang import versions
    from dsv4_npu.sglang.targets import EMULATED, targets

    versions.check()
    if platform == EMULATED:
        from dsv4_npu.sglang.emulated import add_missing_modules

        add_missing_modules()
    version = versions.installed()
    for target in targets(platform, version):
        name = target.at(version)
        if name in ORIGINALS:
            continue
        try:
            _register(name, target.ours, target.kind)
        except Exception as error:
            FAILURES[name] = f"{type(error).__name__}: {error}"


def _register(name: str, ours: str, kind: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from dsv4_npu.sglang import names

    place = names.place(name)
    if kind == "check":
        return
    if kind == "data":
        replacement = names.value(ours)
        ORIGINALS[name] = (place.holder.get(place.name) if place.is_entry else place.get(),)
        place.set(replacement)
        return
    original = place.get()
    if original is None:
        raise TypeError("it is None in this process, and a hook on None would rewrite every global that is None")
    if not isinstance(original, (type, types.FunctionType)):
        raise TypeError(f"a {type(original).__name__} cannot be hooked, only a plain function or a class")
    replacement = names.value(ours)
    ORIGINALS[name] = (original,)
    how = HookType.AROUND if kind == "around" else HookType.REPLACE
    HookRegistry.register(names.dotted(name), replacement, how)
