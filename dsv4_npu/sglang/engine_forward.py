"""SGLang's forward, computed by the emulation: a Hugging Face DeepSeek-V4 in float64 over the slots that SGLang gave.

``ModelRunner._forward_raw`` is the one place where SGLang computes a model. Here it gets logits of the same tokens
from :class:`~dsv4_npu.emulation.cache.PooledModel`, whose rows are reached only through SGLang's tables. So a page that
the scheduler, the prefix cache or an allocator gave out wrongly shows in the engine's own output tokens.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsv4_npu import addressing
from dsv4_npu.budget import PoolSizes
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec
from dsv4_npu.emulation.cache import PooledModel
from dsv4_npu.emulation.device import held
from dsv4_npu.emulation.forward import Tables, plan_batch
from dsv4_npu.emulation.model import build_model
from dsv4_npu.errors import ConfigError, OwnershipError
from dsv4_npu.pools import DSV4Pools
from dsv4_npu.sglang.engine_tables import EngineTables

#: Changes the tables that one forward sees; for checks that must fail.
Tamper = Callable[["EngineForward", Tables, Sequence[int], "Piece"], Tables]


@dataclass(frozen=True)
class ForwardSetup:
    """What the scheduler process needs to compute the model; it travels to it by pickle.

    Attributes:
        model: name or ``config.json`` of the model, as :meth:`ModelSpec.load` takes it.
        seed: of its weights.
        record: a file that gets the float64 logits of every sampled row, or None.
        draft_tokens: drafts of a chain that a verify checks, 0 without speculation.
        algorithm: SGLang's worker that drafts them, "EAGLE" or "DSPARK".
    """

    model: str = "tiny"
    seed: int = 0
    record: Path | None = None
    draft_tokens: int = 0
    algorithm: str = "EAGLE"


@dataclass
class ForwardBook:
    """What the forwards of a process were, and what was wrong with the tables they were given."""

    forwards: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    most_requests: int = 0
    violations: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Piece:
    """One forward over part of a batch: indices into the batch, with the positions of each."""

    index: list[int]
    starts: list[int]
    lengths: list[int]


def pieces(starts: Sequence[int], lengths: Sequence[int], unit: int) -> list[Piece]:
    """The batch ``[start, start + length)`` cut at multiples of ``unit``, as forwards in order.

    On A2 and A3 the C4 state lies with the SWA page, and only the rows that end a forward are sure to be saved. A
    prefix of the cache may end at a multiple of ``unit`` (a C128 group), so a forward ends there too.
    """
    out: list[Piece] = []
    at = list(starts)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    while True:
        index = [b for b in range(len(at)) if at[b] < ends[b]]
        if not index:
            return out
        stops = [min(ends[b], at[b] // unit * unit + unit) for b in index]
        out.append(Piece(index, [at[b] for b in index], [stop - at[b] for b, stop in zip(index, stops, strict=True)]))
        for b, stop in zip(index, stops, strict=True):
            at[b] = stop


class EngineForward:
    """Computes the batches of one SGLang scheduler.

    Args:
        setup: the model.
        req_to_token_pool, allocator: SGLang's objects, of its own classes or of ours. If the allocator's KV pool has
            ``slabs`` (:class:`DSV4Pools`), the rows live there; else in pools of the same sizes beside SGLang's.
    """

    def __init__(self, setup: ForwardSetup, req_to_token_pool: Any, allocator: Any) -> None:
        self.setup = setup
        self.spec = spec = ModelSpec.load(setup.model)
        self.tables = EngineTables(req_to_token_pool, allocator, spec.sliding_window)
        pools = getattr(allocator.get_kvcache(), "slabs", None)
        self.own_pools = pools is None
        self.pools: DSV4Pools = self._pools_beside(spec) if pools is None else pools
        _check_rows(self.pools, spec)
        self.pooled = PooledModel(build_model(spec, setup.seed), self.pools)
        self.book = ForwardBook()
        self.tamper: Tamper | None = None
        self.cut = addressing.C128_RATIO * self.tables.c128_page
        #: The request that last computed in each row, and from where: a row that starts again has a new owner.
        self._last: dict[int, tuple[str, int]] = {}

    def _pools_beside(self, spec: ModelSpec) -> DSV4Pools:
        tables, allocator = self.tables, self.tables.allocator
        rows = tables.rows.req_to_token.shape[0] - 1
        drafts = self.setup.draft_tokens
        config = CacheConfig(
            spec,
            PlatformSpec.load("a2"),
            SpeculationSpec("chain", drafts) if drafts else SpeculationSpec(),
            page_size=tables.page,
            c128_page_size=tables.c128_page,
            context_len=min(spec.max_positions, int(tables.rows.req_to_token.shape[1])),
            request_rows=rows,
            kv_row="fp64",
            indexer_row="fp64",
        )
        page, c128 = tables.page, allocator.c128_attn_allocator
        sizes = PoolSizes(allocator.size_full // page, allocator.size_swa // page, int(c128.num_pages), rows)
        return DSV4Pools(config, sizes, state_dtype=torch.float64)

    def clear_state(self, row: int) -> None:
        """Empty the C128 bank of a request row in pools beside SGLang's, when SGLang clears its own."""
        if self.own_pools:
            state = self.pools.c128_state
            bank = state.data[:, row * state.ring : (row + 1) * state.ring]
            bank[..., : state.half] = 0.0
            bank[..., state.half :] = float("-inf")

    def compute(
        self,
        rids: Sequence[str],
        rows: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        tokens: torch.Tensor,
        written: torch.Tensor,
        keep: int,
    ) -> list[torch.Tensor]:
        """Logits ``[<= keep, V]`` of the last ``keep`` new rows of each request.

        Args:
            rids, rows: the requests and their request rows.
            starts, lengths: positions ``[start, start + length)`` of the new rows.
            tokens, written: int64 ``[sum of lengths]``; their tokens and the FULL slots that the scheduler gave them.
            keep: rows per request whose logits are wanted.
        """
        self._look(rids, rows, starts, lengths, written)
        split = torch.split(tokens.to(torch.int64), list(lengths))
        out: list[list[torch.Tensor]] = [[] for _ in rows]
        for piece in pieces(starts, lengths, self.cut):
            width = max(piece.lengths)
            padded = torch.zeros((len(piece.index), width), dtype=torch.int64)
            for i, (b, start, length) in enumerate(zip(piece.index, piece.starts, piece.lengths, strict=True)):
                first = start - starts[b]
                padded[i, :length] = split[b][first : first + length]
            tables = self.tables.tables()
            chosen = [rows[b] for b in piece.index]
            if self.tamper is not None:
                tables = self.tamper(self, tables, chosen, piece)
            logits = self._forward(padded, tables, chosen, piece)
            for i, b in enumerate(piece.index):
                out[b].append(logits[i, : piece.lengths[i]])
        kept = [torch.cat(parts)[-keep:] for parts in out]
        self._record(rids, starts, lengths, kept)
        return kept

    def _forward(self, tokens: torch.Tensor, tables: Tables, rows: list[int], piece: Piece) -> torch.Tensor:
        try:
            plan = plan_batch(self.pools, tables, rows, piece.starts, piece.lengths)
        except OwnershipError as error:
            self.book.violations.append(str(error))
            return torch.zeros((*tokens.shape, self.spec.vocab_size), dtype=torch.float64)
        return self.pooled.forward(tokens, plan)

    def _look(
        self,
        rids: Sequence[str],
        rows: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        written: torch.Tensor,
    ) -> None:
        """Audit what the scheduler gave; wrong tables are noted, and the forward runs on them all the same."""
        found = self.tables.violations(rows, starts, lengths, written)
        state = self.pools.c128_state
        rings = held(state.data)
        for rid, row, start in zip(rids, rows, starts, strict=True):
            before = self._last.get(row, ("", -1))
            if (before[0] != rid or start <= before[1]) and state.layers:
                bank = rings[:, row * state.ring : (row + 1) * state.ring]
                if bool((bank[..., : state.half] != 0).any()) or not bool(bank[..., state.half :].isneginf().all()):
                    found.append(f"row {row}: the C128 state bank of a new request is not empty")
            self._last[row] = (rid, start)
        self.book.violations += found
        self.book.rows += sum(lengths)
        self.book.most_requests = max(self.book.most_requests, len(rows))

    def _record(
        self, rids: Sequence[str], starts: Sequence[int], lengths: Sequence[int], kept: Sequence[torch.Tensor]
    ) -> None:
        if self.setup.record is None:
            return
        with self.setup.record.open("ab") as file:
            for rid, start, length, logits in zip(rids, starts, lengths, kept, strict=True):
                pickle.dump((rid, start + length - len(logits), logits.numpy()), file)


def _check_rows(pools: DSV4Pools, spec: ModelSpec) -> None:
    """Rows must hold float64 as it is, or the engine's logits could not equal the oracle's."""
    config = pools.config
    if (config.kv_row, config.indexer_row) != ("fp64", "fp64") or pools.c128_state.data.dtype != torch.float64:
        raise ConfigError(
            f"kv_row = {config.kv_row!r}, indexer_row = {config.indexer_row!r}, states of "
            f"{pools.c128_state.data.dtype}; fp64, fp64 and torch.float64 are needed by the emulated forward"
        )
    if config.model.compress_ratios[: spec.num_layers] != spec.compress_ratios[: spec.num_layers]:
        raise ConfigError(
            f"compress_ratios = {config.model.compress_ratios} of the pools; {spec.compress_ratios} of {spec.name} "
            "are needed"
        )
