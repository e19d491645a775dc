"""One call of an op with everything that is known about the right answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4_npu import ops
from dsv4_npu.errors import InputError

#: The ops by name, as they are called.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {name: getattr(ops, name) for name in ops.__all__}
#: What outputs hold before a call.
POISON = -77
#: Differences that float sums in another order may make.
TOLERANCE = 1e-5
_FLOATING = ("top_k_renorm_prob", "top_p_renorm_prob")


@dataclass(frozen=True)
class OpCase:
    """A call whose arguments and results are compared with ``ref.py`` on the CPU, and with ``right`` where it is known.

    Attributes:
        name: begins with the case's number in the project's list where it has one.
        op: a name in :data:`FUNCTIONS`.
        make: fresh keyword arguments on the CPU, outputs poisoned.
        right: values of arguments after the call (by name) or of results ("result 0", ...), written out.
        slow: too long for Triton's interpreter, whose time does not depend on the device.
    """

    name: str
    op: str
    make: Callable[[], dict[str, Any]]
    right: Mapping[str, Any] = field(default_factory=dict)
    slow: bool = False

    def run(self, function: Callable[..., Any], device: torch.device) -> str:
        """Call ``function`` on ``device``; what is wrong, in words, or "". Waits for the device."""
        mine = {name: _to(value, device) for name, value in self.make().items()}
        theirs = self.make()
        named = _values(mine, function(**mine))
        wanted = _values(theirs, FUNCTIONS[self.op](**theirs, backend="ref"))
        for name, value in wanted.items():
            if not self._equal(named[name], value):
                return f"{name} is {_short(named[name])}, ref.py gives {_short(value)}"
        for name, value in self.right.items():
            if not self._equal(named[name], torch.as_tensor(value, dtype=named[name].dtype)):
                return f"{name} is {_short(named[name])}, right is {value}"
        return ""

    def _equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        if one.shape != other.shape:
            return False
        if self.op in _FLOATING:
            return torch.allclose(one, other, atol=TOLERANCE)
        return torch.equal(one, other)


@dataclass(frozen=True)
class Refusal:
    """A call that must raise InputError with these words and change nothing."""

    name: str
    op: str
    make: Callable[[], dict[str, Any]]
    words: str
    slow: bool = False

    def run(self, function: Callable[..., Any], device: torch.device) -> str:
        """Like :meth:`OpCase.run`."""
        mine = {name: _to(value, device) for name, value in self.make().items()}
        try:
            function(**mine)
        except InputError as error:
            if self.words not in str(error):
                return f"refused with other words: {error}"
            untouched = _values(self.make(), None)
            changed = [name for name, value in _values(mine, None).items() if not torch.equal(value, untouched[name])]
            return f"refused, but it changed {', '.join(changed)}" if changed else ""
        return f"was not refused ({self.words!r} was expected)"


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _values(arguments: Mapping[str, Any], result: Any) -> dict[str, torch.Tensor]:
    """Every tensor among the arguments and results, on the CPU."""
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    named = {**arguments, **{f"result {i}": value for i, value in enumerate(results)}}
    return {name: value.cpu() for name, value in named.items() if isinstance(value, torch.Tensor)}


def _short(value: torch.Tensor) -> str:
    text = str(value.flatten()[:12].tolist())
    return f"{text[:100]}…" if value.numel() > 12 or len(text) > 100 else text
