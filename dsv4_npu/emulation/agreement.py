"""Runs on several tensor-parallel ranks: each rank's seat, what it saw, and whether all wrote one history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dsv4_npu.emulation.ranks import on_ranks
from dsv4_npu.emulation.replica import Replica
from dsv4_npu.emulation.requests import RoundRecord
from dsv4_npu.errors import ConfigError
from dsv4_npu.spec.ranks import RankSync

if TYPE_CHECKING:
    from dsv4_npu.emulation.result import RunResult

#: More whole replicas than a CPU is meant for.
MAX_RANKS = 8


@dataclass(frozen=True)
class RankReport:
    """One rank of a run.

    Attributes:
        agreements: broadcasts it took part in; overruled: those in which it would have accepted something else.
        noise: largest difference between its logits and the model's.
        same_history: its outputs and every round of it are those of rank 0.
        ok: its own comparison with the oracle, its audit and its leaks.
    """

    rank: int
    agreements: int
    overruled: int
    noise: float
    same_history: bool
    ok: bool


@dataclass(frozen=True)
class RankOutcome:
    """What a rank found, and the rounds it saw."""

    result: RunResult
    history: list[RoundRecord]
    report: RankReport


class Seat:
    """A rank's place in a run: its random numbers, its replica, the rounds that it sees."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.history: list[RoundRecord] = []
        self._replica: Replica | None = None

    def seed(self, seed: int) -> int:
        """A seed of its own for what a rank draws."""
        return (seed + 1_000_003 * self.rank) % 2**63

    def replica(self, batch: int, width: int, depth: int, seed: int) -> Replica:
        """Its end of the agreement for rounds of up to ``batch`` requests."""
        self._replica = Replica(RankSync(batch, width, depth), self.seed(seed))
        return self._replica

    def outcome(self, result: RunResult) -> RankOutcome:
        """What is handed to whoever started the ranks."""
        assert self._replica is not None
        sync = self._replica.sync
        report = RankReport(self.rank, sync.rounds, sync.overruled, self._replica.largest_noise, True, result.ok)
        return RankOutcome(result, self.history, report)


def run_on_ranks(world: int, work: Callable[..., list[RankOutcome]], *args: Any) -> list[RunResult]:
    """``work(rank, *args)`` on ``world`` ranks: rank 0's results, each with the reports of all ranks."""
    outcomes = on_ranks(world, work, *args)
    return [_merged([one[index] for one in outcomes]) for index in range(len(outcomes[0]))]


def _merged(outcomes: Sequence[RankOutcome]) -> RunResult:
    first = outcomes[0]

    def story(outcome: RankOutcome) -> tuple[list[list[int]], list[RoundRecord]]:
        return [request.outputs for request in outcome.result.requests], outcome.history

    reports = [replace(one.report, same_history=story(one) == story(first)) for one in outcomes]
    return replace(first.result, label=f"{first.result.label}, {len(outcomes)} ranks", ranks=reports)


def check_ranks(world: int, device: str) -> None:
    """Raise ConfigError for a number of ranks that cannot be had."""
    if not 1 <= world <= MAX_RANKS:
        raise ConfigError(f"--tp {world}; 1 to {MAX_RANKS} is needed: each rank is a process with the whole model")
    if world > 1 and device != "cpu":
        raise ConfigError(
            f"--tp {world} with --device {device}: the emulated device has no collectives; use --device cpu"
        )


def print_ranks(console: Console, results: Sequence[RunResult]) -> None:
    """A line per run on several ranks."""
    for result in results:
        if not result.ranks:
            continue
        one = all(rank.same_history for rank in result.ranks)
        told = ", ".join(f"rank {r.rank} overruled in {r.overruled} of them" for r in result.ranks[1:])
        noise = max(rank.noise for rank in result.ranks)
        wrong = "".join(f"; rank {r.rank} differs from the oracle or leaks" for r in result.ranks if not r.ok)
        console.print(
            f"{len(result.ranks)} ranks: histories {'identical' if one else 'DIFFER'} after "
            f"{result.ranks[0].agreements} broadcasts, {told}; noise on logits up to {noise:.1e}{wrong}",
            soft_wrap=True,
        )
