"""The stream of the emulated ``npu`` device: what happens on it is counted, and host memory is touched late.

Work runs when it is enqueued, so device memory is always as a device's own order of work leaves it. Asynchronous copies
take effect in host memory only when the host waits for them: a host buffer that is read too early holds poison, and one
that is written too early is found out.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable

import torch

from dsv4_npu.errors import AuditError, InputError

#: What a host buffer of integers holds until its asynchronous copy has run: no token, slot or length.
POISON = -(2**30)


@dataclasses.dataclass
class Events:
    """What happened on the device so far.

    Attributes:
        launches: launches of our own Triton kernels, by kernel.
        operators: other operators on device memory, by name (views, which run nothing, are left out).
        copies_in: host-to-device copies.
        copies_out: asynchronous device-to-host copies.
        reads: device-to-host reads that stop the host until the device has caught up, by operator.
        waits: times the host waited for an event behind an asynchronous copy.
        stalls: those of them with no work enqueued behind the event: the device runs dry.
    """

    launches: Counter[str] = dataclasses.field(default_factory=Counter)
    operators: Counter[str] = dataclasses.field(default_factory=Counter)
    copies_in: int = 0
    copies_out: int = 0
    reads: Counter[str] = dataclasses.field(default_factory=Counter)
    waits: int = 0
    stalls: int = 0

    def copy(self) -> Events:
        """The counts of this moment."""
        return dataclasses.replace(
            self, launches=self.launches.copy(), operators=self.operators.copy(), reads=self.reads.copy()
        )

    def since(self, earlier: Events) -> Events:
        """What happened after ``earlier``."""
        return Events(
            self.launches - earlier.launches,
            self.operators - earlier.operators,
            self.copies_in - earlier.copies_in,
            self.copies_out - earlier.copies_out,
            self.reads - earlier.reads,
            self.waits - earlier.waits,
            self.stalls - earlier.stalls,
        )


EVENTS = Events()


class Stream:
    """The device's only stream."""

    def __init__(self) -> None:
        self.clock = 0
        self._pending: deque[tuple[int, Callable[[], None]]] = deque()

    def launch(self, kernel: str) -> None:
        """A kernel of ours was enqueued."""
        self.clock += 1
        EVENTS.launches[kernel] += 1

    def operator(self, name: str) -> None:
        """Another operator was enqueued."""
        self.clock += 1
        EVENTS.operators[name] += 1

    def copy_in(self, source: torch.Tensor, non_blocking: bool) -> None:
        """A copy from host memory was enqueued; an asynchronous one reads ``source`` when the device gets there."""
        self.clock += 1
        EVENTS.copies_in += 1
        if non_blocking:
            before = source.clone()

            def check() -> None:
                if not torch.equal(before.nan_to_num(), source.nan_to_num()):
                    raise AuditError(
                        f"a host buffer of {source.numel()} elements was changed before its asynchronous copy had run"
                    )

            self._pending.append((self.clock, check))

    def copy_out(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """An asynchronous copy of ``values`` to host memory: ``target`` holds poison until the host waits."""
        self.clock += 1
        EVENTS.copies_out += 1
        wide = target.is_floating_point() or target.dtype in (torch.int32, torch.int64)
        target.fill_((float("nan") if target.is_floating_point() else POISON) if wide else 1)

        def arrive() -> None:
            target.copy_(values)

        self._pending.append((self.clock, arrive))

    def read(self, name: str) -> None:
        """The host stops until everything has run."""
        EVENTS.reads[name] += 1
        self.catch_up(self.clock)

    def catch_up(self, clock: int) -> None:
        """Host memory becomes what the transfers enqueued up to ``clock`` make of it."""
        while self._pending and self._pending[0][0] <= clock:
            self._pending.popleft()[1]()


STREAM = Stream()


class Event:
    """``torch.npu.Event``: a place in the stream that the host can wait for."""

    def __init__(self) -> None:
        self._clock: int | None = None

    def record(self) -> None:
        """Mark the end of what is enqueued now."""
        self._clock = STREAM.clock

    def synchronize(self) -> None:
        """Wait until everything before the event has run; asynchronous copies have then arrived."""
        if self._clock is None:
            raise InputError("event: it was not recorded, so there is nothing to wait for")
        EVENTS.waits += 1
        EVENTS.stalls += self._clock == STREAM.clock
        STREAM.catch_up(self._clock)
