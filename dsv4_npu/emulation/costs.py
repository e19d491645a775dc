"""What decode steps cost on the emulated device, summed up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4_npu.emulation.stream import Events


@dataclass(frozen=True)
class CostLine:
    """One kind of event: its total over all steps, the most in one step, and its mean over steady steps (None: none).

    A step is steady when no page changed hands and the batch was the one of the step before: nothing was sent to the
    device.
    """

    event: str
    total: int
    most: int
    steady: float | None


@dataclass(frozen=True)
class StepCosts:
    """Costs of ``steps`` decode steps, line by line."""

    steps: int
    lines: list[CostLine]

    @classmethod
    def of(cls, steps: Sequence[Events]) -> StepCosts:
        """Sum up what each step cost."""
        quiet = [not one.copies_in for one in steps]

        def line(event: str, counts: list[int]) -> CostLine:
            steady = [n for n, still in zip(counts, quiet, strict=True) if still]
            return CostLine(event, sum(counts), max(counts, default=0), sum(steady) / len(steady) if steady else None)

        kernels = sorted({kernel for one in steps for kernel in one.launches})
        return cls(
            len(steps),
            [
                line("launches of our kernels", [one.launches.total() for one in steps]),
                *(
                    line(f"  {kernel.removesuffix('_kernel')}", [one.launches[kernel] for one in steps])
                    for kernel in kernels
                ),
                line("torch operators", [one.operators.total() for one in steps]),
                line("copies to the device", [one.copies_in for one in steps]),
                line("async copies to the host", [one.copies_out for one in steps]),
                line("blocking reads", [one.reads.total() for one in steps]),
                line("waits for an event", [one.waits for one in steps]),
                line("  with nothing enqueued behind", [one.stalls for one in steps]),
            ],
        )
