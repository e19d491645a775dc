"""Runs a replay to its end: build the deployment, serve the trace, audit, look for leaks, gather the numbers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.alloc.ledger import Backend
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.prefix_cache import PrefixCache
from dsv4_npu.alloc.rollback import RollbackRules
from dsv4_npu.budget import PoolSizes
from dsv4_npu.config import CacheConfig
from dsv4_npu.errors import Dsv4NpuError
from dsv4_npu.replay.acceptance import SimulatedAcceptance
from dsv4_npu.replay.intake import Policy
from dsv4_npu.replay.jobs import Sessions, make_jobs
from dsv4_npu.replay.scheduler import Scheduler
from dsv4_npu.replay.stats import Counters, Samples
from dsv4_npu.replay.trace import TraceRequest

Audit = Literal["every", "end"]
#: Called after each round with the requests that are over.
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Deployment:
    """What is replayed: the memory, its sizes, the simulated acceptance and the scheduler's policy.

    ``notes``: what the user should know about it.
    """

    config: CacheConfig
    sizes: PoolSizes
    acceptance: SimulatedAcceptance
    policy: Policy = field(default_factory=Policy)
    sessions: Sessions = "off"
    prefix_cache: bool = True
    backend: Backend = "auto"
    notes: tuple[str, ...] = ()


@dataclass
class Outcome:
    """The result of a replay. ``problems``: what the audit found and what leaked; empty if all is well."""

    counters: Counters
    usage: dict[str, tuple[int, int, int]]
    refused: dict[int, str]
    problems: list[str]
    samples: Samples
    seconds: float
    ledger: str

    @property
    def clean(self) -> bool:
        """Whether the audit found nothing and nothing leaked."""
        return not self.problems

    def reasons(self) -> list[tuple[str, int]]:
        """Refusals by reason, commonest first; reasons that differ in numbers only are one, shown by its first case."""
        groups: dict[str, tuple[str, int]] = {}
        for reason in self.refused.values():
            key = re.sub(r"\d+", "N", reason)
            first, count = groups.get(key, (reason, 0))
            groups[key] = (first, count + 1)
        return sorted(groups.values(), key=lambda pair: -pair[1])


def build(deployment: Deployment) -> Lifecycle:
    """An empty allocator with its life cycle and, if wanted, its prefix cache."""
    config = deployment.config
    allocator = KVAllocator(AllocSpec.of(config, deployment.sizes), backend=deployment.backend)
    by_request = config.platform.c4_state_owner == "request"
    # An engine copies the C4 rows of the request's bank here; a replay has no payload, so a mark stands for the copy.
    cache = PrefixCache(allocator, capture=_captured if by_request else None) if deployment.prefix_cache else None
    rules = RollbackRules.of(allocator.spec, speculative=config.speculation.speculative)
    return Lifecycle(allocator, cache, rules=rules, reserve=max(config.reserve, 2 * config.verify_width))


def replay(
    trace: Sequence[TraceRequest], deployment: Deployment, audit: Audit = "end", progress: Progress | None = None
) -> Outcome:
    """Serve every request of ``trace``, then end everything and check that nothing is left."""
    life = build(deployment)
    allocator = life.alloc
    jobs = make_jobs(trace, deployment.sessions)
    scheduler = Scheduler(life, jobs, deployment.acceptance, deployment.policy, deployment.config.model.vocab_size)
    samples, counters, problems = Samples(allocator), scheduler.counters, list[str]()
    begin = time.perf_counter()
    try:
        while not scheduler.finished:
            scheduler.round()
            samples.take(counters.rounds, _lines(scheduler))
            if audit == "every":
                _audit(allocator, counters)
            if progress is not None:
                progress(counters.served + counters.refused)
        samples.last(counters.rounds, "all requests served")
        scheduler.close()
        _audit(allocator, counters)
    except Dsv4NpuError as error:  # a rule was broken: the verdict says which
        problems.append(f"{type(error).__name__} in round {counters.rounds}: {error}")
    seconds = time.perf_counter() - begin
    problems += leaks(life)
    usage = allocator.usage()
    return Outcome(counters, usage, scheduler.refused, problems, samples, seconds, ledger=allocator.ledger.backend)


def leaks(life: Lifecycle) -> list[str]:
    """What is still in use although everything ended, in words; empty if nothing is."""
    found = [
        f"leak: {used} of {total} {'request rows' if name == 'ROW' else name + ' pages'} still in use at the end"
        for name, (used, _, total) in life.alloc.usage().items()
        if used
    ]
    if life.requests:
        found.append(f"leak: {len(life.requests)} requests are still known to the life cycle")
    if life.cache is not None and life.cache.nodes:
        found.append(f"leak: {life.cache.nodes} cache nodes cannot be evicted")
    return found


def _captured(row: int, end: int) -> tuple[int, int]:
    return row, end


def _audit(allocator: KVAllocator, counters: Counters) -> None:
    allocator.audit(deep=True)
    counters.audits += 1


def _lines(scheduler: Scheduler) -> dict[str, float]:
    return {"running requests": len(scheduler.running), "waiting requests": scheduler.waiting}
