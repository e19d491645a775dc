"""Outcomes on their way to the host: one asynchronous copy, looked at when the host needs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostCopy:
    """An asynchronous copy of integer tensors to the host, all in one transfer.

    Args:
        parts: integer tensors of one device; the host gets them as int64 in their shapes.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._shapes = [part.shape for part in parts]
        joined = torch.cat([part.flatten().to(torch.int64) for part in parts])
        self._host = joined.to("cpu", non_blocking=True)
        self._event = None
        if joined.device.type != "cpu":
            self._event = torch.get_device_module(joined.device).Event()
            self._event.record()

    def wait(self) -> list[torch.Tensor]:
        """The parts, once the copy has run; this waits for it and for nothing enqueued behind it."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        parts = torch.split(self._host, [shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
