"""The targets as the text of an SGLang release defines them, read without importing it.

Serves releases that are not installed (a wheel) and tells which inner interfaces changed between two releases.
"""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dsv4_npu.sglang.names import split

#: The text of a file of the release, by its path below the folder that holds ``sglang/``; None without that file.
Reader = Callable[[str], str | None]


def reader(release: Path) -> Reader:
    """Reads a wheel, or a folder that holds ``sglang/``."""
    if release.is_dir():
        return lambda path: (release / path).read_text(encoding="utf-8") if (release / path).is_file() else None
    wheel = zipfile.ZipFile(release)
    names = frozenset(wheel.namelist())
    return lambda path: wheel.read(path).decode() if path in names else None


def definition(read: Reader, name: str) -> dict[str, Any] | None:
    """What ``"module:attribute"`` is: a function's arguments, a class's methods and theirs, or a value's text.

    None if the release has no such module or the module no such name.
    """
    module, attribute = split(name)
    path = module.replace(".", "/")
    text = read(f"{path}.py") or read(f"{path}/__init__.py")
    if text is None:
        return None
    table = re.fullmatch(r"(\w+)\[\w+\]", attribute)
    parts = [table[1]] if table else attribute.split(".")
    body: list[ast.stmt] = ast.parse(text).body
    found: ast.AST | None = None
    for part in parts:
        found = next((node for node in _statements(body) if part in _bound(node)), None)
        if found is None:
            return None
        body = found.body if isinstance(found, ast.ClassDef) else []
    assert found is not None
    return _describe(found)


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What changed from ``one`` definition to ``other``, in words."""
    found = []
    for key in sorted({*one, *other} - {"methods"}):
        if one.get(key) != other.get(key):
            found.append(f"{key}: {one.get(key)} -> {other.get(key)}")
    before, after = one.get("methods", {}), other.get("methods", {})
    found += [f"without {name}" for name in before if name not in after]
    found += [f"new {name}" for name in after if name not in before]
    found += [
        f"{name}({before[name]}) -> ({after[name]})" for name in before if name in after and before[name] != after[name]
    ]
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, those under ``if`` and ``try`` too."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try)):
                yield from _statements(getattr(node, name, []))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _statements(handler.body)


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in node.names}
    places = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {place.id for place in places if isinstance(place, ast.Name)}


def _describe(node: ast.AST) -> dict[str, Any]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return {"is": "function", "arguments": _arguments(node)}
    if isinstance(node, ast.ClassDef):
        functions = [part for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))]
        return {
            "is": "class",
            "bases": ", ".join(ast.unparse(base) for base in node.bases),
            "methods": {function.name: _arguments(function) for function in functions},
        }
    return {"is": "value", "text": ast.unparse(node)}


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Names, defaults and order; no annotations, which change nothing."""
    arguments = ast.parse(ast.unparse(node.args).join(("def f(", "): 0"))).body[0]
    assert isinstance(arguments, ast.FunctionDef)
    for argument in ast.walk(arguments.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(arguments.args)
