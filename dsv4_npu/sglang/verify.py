"""Whether the replacements took hold in this process: by identity, in the target's module and wherever it was imported.

SGLang's hook registry only logs what it could not do. Here a replacement that is missing, was overwritten by another
plugin, or left SGLang's own object behind in some module stops the process.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from dsv4_npu.errors import UnavailableError
from dsv4_npu.sglang import activation, names, versions
from dsv4_npu.sglang.targets import Target, targets

OURS, THEIRS, WRONG, MISSING = "ours", "theirs", "wrong", "missing"

_verified: list[str] = []


class TargetState(NamedTuple):
    """``state``: "ours"; "theirs", SGLang's own; "wrong", ours in part; "missing", not in this SGLang or not here."""

    target: Target
    state: str
    detail: str


def targets_report() -> list[TargetState]:
    """The state of every target of the active platform, or of all targets where no platform of ours is active.

    Imports the modules of the targets. Needs SGLang; nothing is changed.
    """
    platform = activation.active()
    version = versions.installed()
    wanted = targets(platform, version)
    found = [_state(target, target.at(version)) for target in wanted]
    left = _left_behind([state.target.at(version) for state in found if state.state == OURS])
    return [
        TargetState(state.target, WRONG, f"SGLang's own is still held by {', '.join(places)}")
        if (places := left.get(state.target.at(version)))
        else state
        for state in found
    ]


def verify_applied() -> None:
    """Stop this process unless every replacement is in force. Costs nothing after the first success.

    Raises UnavailableError with the list of what is missing.
    """
    if _verified:
        return
    platform = activation.active()
    if platform is None:
        raise UnavailableError(
            f"memory of dsv4_npu was asked for in a process whose SGLang platform is another one; "
            f"set SGLANG_PLATFORM={activation.NPU} before SGLang is imported"
        )
    versions.check()
    report = targets_report()
    wrong = [state for state in report if state.state != OURS]
    if wrong:
        lines = [f"  {state.target.purpose} ({state.target.theirs}): {state.detail}" for state in wrong]
        raise UnavailableError(
            f"dsv4_npu is not fully applied to SGLang {versions.installed()} in this process; refusing to serve with "
            f"a mixture. {_advice()} {len(wrong)} of {len(report)} replacements are not in force:\n" + "\n".join(lines)
        )
    _verified.append(platform)


def _advice() -> str:
    from dsv4_npu.sglang.plugin import FAILURES, ORIGINALS

    if not ORIGINALS and not FAILURES:
        return (
            "The plugin did not run here: SGLANG_PLUGINS must be unset or contain the platform's name, and programs "
            "that build SGLang's parts themselves must call sglang.srt.plugins.load_plugins() first."
        )
    return "`dsv4-npu doctor` lists every target; unset SGLANG_PLATFORM to run SGLang's own memory."


def _state(target: Target, name: str) -> TargetState:
    from dsv4_npu.sglang.plugin import FAILURES

    if name in FAILURES:
        return TargetState(target, MISSING, FAILURES[name])
    try:
        found = names.value(name)
        ours = names.value(target.ours)
    except KeyError:
        return TargetState(target, THEIRS, "SGLang's default is in force")
    except Exception as error:
        return TargetState(target, MISSING, f"{type(error).__name__}: {error}")
    if target.kind in ("data", "check"):
        held = found == ours if isinstance(ours, bool) else found is ours
        return TargetState(target, OURS, "set") if held else TargetState(target, THEIRS, f"it is {found!r}")
    if target.kind == "class":
        if found is ours:
            return TargetState(target, OURS, "replaced")
        return TargetState(target, THEIRS, f"it is {_say(found)}, not {_say(ours)}")
    if not _calls(found, ours):
        return TargetState(target, THEIRS, f"{_say(found)} does not lead to {_say(ours)}")
    return TargetState(target, OURS, "replaced" if target.kind == "function" else "wrapped")


def _calls(found: Any, ours: Any) -> bool:
    """Whether the chain of the hook registry's wrappers from ``found`` calls ``ours`` before it ends or is replaced."""
    while True:
        if found is ours:
            return True
        if not isinstance(found, types.FunctionType) or not hasattr(found, "__wrapped__"):
            return False
        inner = inspect.getclosurevars(found).nonlocals
        if inner.get("hook") is ours:
            return True
        if "original_fn" not in inner:  # another plugin's REPLACE: what it wraps is never called
            return False
        found = inner["original_fn"]


def _left_behind(applied: list[str]) -> dict[str, list[str]]:
    """By name of a replaced target: where SGLang's own object is still held and would be used."""
    from dsv4_npu.sglang.plugin import ORIGINALS

    originals = {id(ORIGINALS[name][0]): name for name in applied if name in ORIGINALS}
    originals = {key: name for key, name in originals.items() if callable(ORIGINALS[name][0])}
    left: dict[str, list[str]] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name != "__main__" and not module_name.startswith("sglang."):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            for place, held in _values(f"{module_name}.{attribute}", value):
                name = originals.get(id(held))
                if name is not None:
                    left.setdefault(name, []).append(place)
    for name in originals.values():
        original = ORIGINALS[name][0]
        if isinstance(original, type):
            children: list[type] = original.__subclasses__()
            stale = [child for child in children if not child.__module__.startswith("dsv4_npu.")]
            left.setdefault(name, []).extend(f"its subclass {_say(child)}" for child in stale)
    return {name: sorted(places) for name, places in left.items() if places}


def _values(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The value, the entries of a container, the defaults of a function and the attributes of a class."""
    yield place, value
    if isinstance(value, dict):  # by dict's own items: a lazy mapping would load what it maps to
        yield from ((f"{place}[{key!r}]", entry) for key, entry in list(dict.items(value)))
    elif type(value) in (list, tuple, set, frozenset):
        yield from ((f"an entry of {place}", entry) for entry in list(value))
    elif isinstance(value, types.FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        yield from ((f"a default of {place}", entry) for entry in defaults)
    elif isinstance(value, type):
        yield from ((f"{place}.{key}", entry) for key, entry in list(vars(value).items()))


def _say(value: Any) -> str:
    return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', repr(value))}"
