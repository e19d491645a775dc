"""Names of the form ``"module:attribute"`` and what they stand for in this process."""

from __future__ import annotations

import importlib
import re
from typing import Any, NamedTuple

_ENTRY = re.compile(r"(?P<name>\w+)\[(?P<key>\w+)\]")


class Place(NamedTuple):
    """Where a value lies: the attribute ``name`` of ``holder``, or the entry ``name`` of the dict ``holder``."""

    holder: Any
    name: str

    @property
    def is_entry(self) -> bool:
        return isinstance(self.holder, dict)

    def get(self) -> Any:
        """The value, without calling a defaultdict's factory. Raises LookupError or AttributeError without one."""
        return self.holder[self.name] if self._has_entry() else getattr(self.holder, self.name)

    def set(self, value: Any) -> None:
        if self.is_entry:
            self.holder[self.name] = value
        else:
            setattr(self.holder, self.name, value)

    def _has_entry(self) -> bool:
        if self.is_entry and self.name not in self.holder:
            raise KeyError(self.name)
        return self.is_entry


def split(name: str) -> tuple[str, str]:
    """Module and attribute."""
    module, separator, attribute = name.partition(":")
    assert separator, name
    return module, attribute


def dotted(name: str) -> str:
    """The name as SGLang's hook registry writes it."""
    return name.replace(":", ".")


def place(name: str) -> Place:
    """Import the module and find the place of the attribute.

    Raises ImportError if the module cannot be imported and AttributeError if a part of a dotted attribute is not there.
    """
    module, attribute = split(name)
    holder: Any = importlib.import_module(module)
    *path, last = attribute.split(".")
    for part in path:
        holder = getattr(holder, part)
    entry = _ENTRY.fullmatch(last)
    return Place(holder, last) if entry is None else Place(getattr(holder, entry["name"]), entry["key"])


def value(name: str) -> Any:
    """What the name stands for. Raises ImportError, AttributeError or KeyError like :func:`place`."""
    return place(name).get()
