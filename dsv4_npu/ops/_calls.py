"""Calls that come again: their checks are skipped, and on a CUDA GPU their launch is repeated as it was.

A serving loop calls an op with the same few sets of tensors over and over. Checking them and working out the launch
takes the host longer than the kernel takes the device, so what a call's arguments are is written down (:class:`Calls`)
and a call of which nothing has changed is recognised. Values on a device are never part of it: no check reads them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

MOST_REMEMBERED = 4096  # calls per op; a serving loop has a few, at addresses that come again

Facts = tuple[Any, ...]
Repeat = Callable[[], bool]  # launches again, or gives False where the surroundings have changed


def facts_of(args: tuple[Any, ...]) -> Facts | None:
    """All that an op's checks and its launch depend on.

    None where that cannot be told: a tensor whose values the host has (they are checked), a subclass, one that wants a
    gradient, another kind of argument.
    """
    facts: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is torch.Tensor:
            device = arg.get_device()
            if device < 0 or arg.requires_grad:
                return None
            facts += (arg.data_ptr(), arg.shape, arg.dtype, device, arg.is_contiguous())
        elif arg is None or kind is int or kind is float:
            facts.append(arg)
        else:
            return None
    return tuple(facts)


def undisturbed() -> bool:
    """Whether nothing watches operators or works on stand-ins for tensors: modes, tracing, transforms, a profiler."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._autograd._profiler_enabled()
    )


class Recording(threading.local):
    """The launches that this thread makes, while somebody asks for them; None where a launch cannot be repeated."""

    launches: list[Repeat | None] | None = None


recording = Recording()


def recorded(run: Callable[..., None], args: tuple[Any, ...]) -> Repeat | None:
    """Run an op and return its launch, if it made exactly one that can be repeated."""
    launches: list[Repeat | None] = []
    recording.launches = launches
    try:
        run(*args)
    finally:
        recording.launches = None
    return launches[0] if len(launches) == 1 else None


class Calls:
    """The calls of one op that passed its checks, and the launch that each makes."""

    def __init__(self) -> None:
        self._known: dict[Facts, Repeat | None] = {}

    def known(self, facts: Facts) -> bool:
        return facts in self._known

    def repeat(self, facts: Facts) -> bool:
        """Make the call's launch again; False if that is not possible here and now."""
        launch = self._known.get(facts)
        return launch is not None and launch()

    def remember(self, facts: Facts, launch: Repeat | None = None) -> None:
        if len(self._known) >= MOST_REMEMBERED:
            self._known.clear()
        self._known[facts] = launch
