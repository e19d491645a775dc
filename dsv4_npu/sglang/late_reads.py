"""What the host must know of a device tensor, but not now.

SGLang names the pages that it frees by slots on the device. Reading them at once would stop the device's queue, so the
copy to the host is only started, and what depends on it is done when the host looks next: in the order of the calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

I64 = npt.NDArray[np.int64]


class LateReads:
    """Calls that wait for values from ``device``; on a CPU nothing waits."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self._waiting: deque[tuple[torch.Tensor, Any, Callable[[I64], None]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, values: torch.Tensor, then: Callable[[I64], None]) -> None:
        """Call ``then`` with ``values`` as a host array, now or at the next :meth:`settle`."""
        if values.device.type == "cpu" and not self._waiting:
            then(values.numpy().astype(np.int64, copy=False))
            return
        event = None
        if values.device.type == "cpu":
            host = values.clone()
        else:
            host = _pinned(torch.empty(values.shape, dtype=values.dtype))
            host.copy_(values, non_blocking=True)
            event = torch.get_device_module(values.device).Event()
            event.record()
        self._waiting.append((host, event, then))

    def settle(self) -> None:
        """Do everything that waits; the only call here that may wait for the device."""
        while self._waiting:
            host, event, then = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            then(host.numpy().astype(np.int64, copy=False))


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A host array on the device, without waiting for the copy."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return _pinned(tensor).to(device, non_blocking=True)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """In pinned memory where the device has it; a copy from or to other memory is done when it returns."""
    try:
        return tensor.pin_memory()
    except (RuntimeError, NotImplementedError):
        return tensor


def host_ids(page_ids: Any) -> npt.NDArray[Any]:
    """Page ids as a flat host array; those that lie on a device are read."""
    if isinstance(page_ids, np.ndarray):
        return page_ids.reshape(-1)
    found: npt.NDArray[Any] = page_ids.cpu().numpy()
    return found.reshape(-1)
