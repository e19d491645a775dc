"""Steps from launch to learn: what the engine does with a planned step, and what it makes of its outcome."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.prefix_cache import PrefixCache
from dsv4_npu.alloc.request import Step
from dsv4_npu.alloc.rollback import RollbackRules
from dsv4_npu.budget import PoolSizes
from dsv4_npu.config import CacheConfig
from dsv4_npu.emulation import device as emulated
from dsv4_npu.emulation.cache import PooledModel
from dsv4_npu.emulation.drafters import Drafter
from dsv4_npu.emulation.forward import Bounds, Tables
from dsv4_npu.emulation.requests import EngineOptions, RequestRun, RoundRecord
from dsv4_npu.emulation.rounds import DeviceRounds, Launched
from dsv4_npu.emulation.stages import OwnDrafter, StageRounds
from dsv4_npu.emulation.states import StateKeeper
from dsv4_npu.emulation.stream import Events
from dsv4_npu.errors import AuditError, InputError
from dsv4_npu.pools import DSV4Pools
from dsv4_npu.spec import VerifyResult, accepted_rows, accepted_tokens, plan_commit


def state_dtype(config: CacheConfig) -> torch.dtype:
    """Exact rows come with exact states; states beside rows of any other format are what a device holds."""
    return torch.float64 if config.kv_row == "fp64" else torch.float32


@dataclass(frozen=True)
class Flight:
    """A launched step that is not learned yet, with its requests in batch order."""

    step: Step
    runs: list[RequestRun]
    launched: Launched


class FlightLoop:
    """Pools, ownership and the steps in flight; the base of :class:`~dsv4_npu.emulation.engine.Engine`.

    Attributes:
        flights: launched and not learned, in launch order; at most two with overlap, else one.
        running, finished: requests that have a row, and those whose turn is over.
        rounds: verify rounds learned; last_round: the newest of them.
        costs: on the emulated device, what each verify round of the loop cost: planning and launching it, and learning
            what it learned.
    """

    def __init__(
        self,
        model: Any,
        config: CacheConfig,
        sizes: PoolSizes,
        drafter: Drafter | OwnDrafter | None,
        options: EngineOptions,
        on_round: Callable[[Any], None] | None,
    ) -> None:
        if config.verify_width > 1 and drafter is None:
            raise InputError(f"drafter = None with {config.speculation.kind} speculation; a drafter is needed")
        if options.overlap and config.verify_width > 1 and drafter is not None and drafter.needs_history:
            raise InputError(
                f"overlap with drafter {drafter.name!r}: it looks at the history, which the host has one round late; "
                "use 'early-exit', or no overlap"
            )
        if options.device not in ("cpu", emulated.NAME):
            raise InputError(f"device = {options.device!r}; 'cpu' or {emulated.NAME!r} is needed")
        if options.device == emulated.NAME:
            emulated.activate()
        self.config, self.options, self.on_round = config, options, on_round
        own = drafter if isinstance(drafter, OwnDrafter) else None
        self.drafter: Drafter | None = None if isinstance(drafter, OwnDrafter) else drafter
        lookahead = own.lookahead if own else 0
        self.pools = DSV4Pools(
            config, sizes, device=options.device, state_dtype=state_dtype(config), draft_stages=own is not None
        )
        self.alloc = KVAllocator(AllocSpec.of(config, sizes), device=options.device)
        self.states = StateKeeper(self.pools, self.alloc)
        capture = self.states.capture
        cache = PrefixCache(self.alloc, capture=capture, lookahead=lookahead) if options.prefix_cache else None
        rules = RollbackRules.of(self.alloc.spec, speculative=config.speculation.speculative, lookahead=lookahead)
        self.life = Lifecycle(
            self.alloc, cache, rules=rules, reserve=config.reserve, on_clear=self.states.clear_released
        )
        mirrors = self.alloc.mirrors
        tables = Tables(mirrors.block_table, mirrors.full_to_swa, mirrors.c128_table)
        self.device = DeviceRounds(self.pools, tables, PooledModel(model, self.pools), self.states, options.seed)
        if own is not None:
            self.device.stages = StageRounds(own, self.pools, tables)
        self.flights: deque[Flight] = deque()
        self.running: list[RequestRun] = []
        self.finished: list[RequestRun] = []
        self.rounds = 0
        self.last_round: RoundRecord | None = None
        self.costs: list[Events] = []

    def drain(self) -> bool:
        """Learn everything that was launched; whether there was anything."""
        any_flight = bool(self.flights)
        self._tell(self._learn_all_but(0))
        return any_flight

    def _on_ended(self, run: RequestRun) -> None:
        """A running request has its last token."""
        raise NotImplementedError

    def _before_launch(self, step: Step) -> None:
        self.states.before_forward(step.requests)
        self.alloc.flush()
        self.life.launch(step)

    def _launch_prefill(self, step: Step, runs: list[RequestRun]) -> None:
        self._before_launch(step)
        starts, ends = step.starts.tolist(), step.ends.tolist()
        chunks = [run.request.tokens[s:e] for run, s, e in zip(runs, starts, ends, strict=True)]
        known = [run.request.tokens[e : e + 1].tolist() for run, e in zip(runs, ends, strict=True)]
        following = [one[0] if one else -1 for one in known]
        launched = self.device.prefill(step.rows.tolist(), starts, chunks, following, self.options)
        self.flights.append(Flight(step, runs, launched))

    def _launch_verify(self, step: Step, runs: list[RequestRun]) -> None:
        self._before_launch(step)
        width, starts = self.config.verify_width, step.starts.tolist()
        # Each round that is launched and not learned has moved the request on by 1 to D rows.
        unknown = [run.request.unlearned - 1 for run in runs]
        bounds = Bounds(
            [start + n for start, n in zip(starts, unknown, strict=True)],
            [start + n * width for start, n in zip(starts, unknown, strict=True)],
            [width] * len(runs),
        )
        look_back = self.drafter is not None and self.drafter.needs_history
        launched = self.device.verify(
            step.rows.tolist(),
            bounds,
            self.options,
            self.drafter,
            [run.request.tokens.tolist() for run in runs] if look_back else [],
            exact=self.options.device == "cpu" and not self.options.overlap,
        )
        self.flights.append(Flight(step, runs, launched))

    def _learn_all_but(self, newest: int) -> int:
        """Learn the oldest flights until ``newest`` are left; how many of them were verify rounds."""
        rounds = 0
        while len(self.flights) > newest:
            flight = self.flights.popleft()
            if flight.step.kind == "prefill":
                self._learn_prefill(flight)
            else:
                self._learn_verify(flight)
                rounds += 1
        return rounds

    def _tell(self, rounds: int) -> None:
        for _ in range(rounds if self.on_round else 0):
            assert self.on_round is not None
            self.on_round(self)

    def _learn_prefill(self, flight: Flight) -> None:
        (first,) = flight.launched.copy.wait()
        self.life.done(flight.step)
        ends = flight.step.ends.tolist()
        whole = [b for b, run in enumerate(flight.runs) if ends[b] == len(run.request)]
        tokens = first.tolist()
        bad = [b for b in whole if tokens[b] < 0]
        if bad:
            raise InputError(f"request {bad[0]}: no token could be drawn, its row holds no positive probability")
        self._learn(
            flight.step,
            {flight.runs[b]: [tokens[b]] for b in whole},
            {flight.runs[b]: [flight.launched.logits[b]] for b in whole},
        )

    def _learn_verify(self, flight: Flight) -> None:
        starts, lens, predict, index, target, source = flight.launched.copy.wait()
        self.life.done(flight.step)
        result = VerifyResult(predict, index, lens)
        accepted = accepted_rows(result)
        self._check_commit(flight, starts, accepted, target, source)
        self.last_round = RoundRecord(flight.step.rows.tolist(), starts.tolist(), [len(at) for at in accepted])
        logits = flight.launched.logits.flatten(0, 1)
        taken = self._learn(
            flight.step,
            dict(zip(flight.runs, accepted_tokens(result), strict=True)),
            {run: list(logits[at]) for run, at in zip(flight.runs, accepted, strict=True)},
        )
        for run, at in zip(flight.runs, accepted, strict=True):
            if run in taken:
                run.accepts[len(at)] += 1
        self.rounds += 1

    def _check_commit(
        self,
        flight: Flight,
        starts: torch.Tensor,
        accepted: list[list[int]],
        target: torch.Tensor,
        source: torch.Tensor,
    ) -> None:
        """What the device committed is what the host's rule says, from the host's own tables.

        Raises:
            AuditError: another start, other slots, or a chain whose accepted rows are not in place.
        """
        rows = flight.step.rows
        for run, row, start in zip(flight.runs, rows.tolist(), starts.tolist(), strict=True):
            if run.request.reason is None and run.request.ending != "abort" and start != self.alloc.committed(row):
                raise AuditError(
                    f"request {run.rid} in row {row}: the device verified from {start}, "
                    f"the host has committed {self.alloc.committed(row)}"
                )
        window = self.alloc.window(rows, starts.numpy(), self.config.verify_width).out_full
        commit = plan_commit(window.reshape(len(rows), -1), starts.numpy(), accepted)
        seen = [np.concatenate([s[b, : len(at)] for b, at in enumerate(accepted)]) for s in (target, source)]
        if not np.array_equal(seen[0], commit.targets) or not np.array_equal(seen[1], commit.sources):
            raise AuditError(f"step {flight.step.number}: the device commits slots {seen}, the host owns {commit}")
        if commit.moves[0].size:
            raise AuditError(f"step {flight.step.number}: a chain's accepted prefix is in place, got moves {commit}")

    def _learn(
        self,
        step: Step,
        tokens: dict[RequestRun, list[int]],
        logits: dict[RequestRun, Sequence[torch.Tensor]],
    ) -> set[RequestRun]:
        """Tell the life cycle what came out; what it takes is the output, the rest of a run is dropped.

        Returns the requests that took anything: one that ended a round ago has computed this one for nothing.
        """
        ended = self.life.learn(step, {run.request: run_tokens for run, run_tokens in tokens.items()})
        taken = set()
        for run in tokens:
            new = run.request.outputs[len(run.outputs) :]
            run.logits += logits[run][: len(new)]
            run.outputs += new
            if new:
                taken.add(run)
        for run in [r for r in self.running if r.request in ended]:
            self._on_ended(run)
        return taken
