"""Requests whose every row has a known value, placed and read back by addresses worked out here, not by the product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from dsv4_npu.alloc import AllocSpec, Cleanup, KVAllocator
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.prefix_cache import PrefixCache
from dsv4_npu.alloc.request import Request
from dsv4_npu.alloc.rollback import RollbackRules
from dsv4_npu.budget import sizes_for_tokens
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec
from dsv4_npu.pools import DSV4Pools

LONGEST = 640


@dataclass(frozen=True)
class Shape:
    """What a deployment can vary in."""

    platform: str = "a3"
    page: int = 128
    c128_page: int = 2
    width: int = 4
    native: bool = True
    draft_stages: bool = False

    def config(self) -> CacheConfig:
        rows = {} if self.native else {"kv_row": "fp64", "indexer_row": "fp64"}
        return CacheConfig(
            ModelSpec.load("tiny"),
            PlatformSpec.load(self.platform),
            SpeculationSpec("chain", self.width - 1) if self.width > 1 else SpeculationSpec(),
            page_size=self.page,
            c128_page_size=self.c128_page,
            context_len=LONGEST,
            request_rows=4,
            emulated_kernels=True,
            **rows,  # type: ignore[arg-type]
        )


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A slab tensor as bytes ``[layers, rows, bytes of a row]``, sharing its memory."""
    layers, width = tensor.shape[0], tensor.shape[-1] * tensor.element_size()
    return tensor.view(torch.uint8).view(layers, -1, width)


@lru_cache(maxsize=256)
def truth(layers: int, width: int, seed: int) -> torch.Tensor:
    """Bytes ``[layers, position, width]`` that a family's tensor holds for each position or entry."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (layers, LONGEST + 16, width), dtype=torch.uint8, generator=gen)


def tokens(length: int) -> list[int]:
    return torch.randint(320, (LONGEST + 16,), generator=torch.Generator().manual_seed(5)).tolist()[:length]


class World:
    """One process: pools, owner, life cycle."""

    def __init__(self, shape: Shape, cache: bool = False) -> None:
        self.shape, self.config = shape, shape.config()
        sizes = sizes_for_tokens(self.config, 4 * self.config.width, 1.0)
        self.pools = DSV4Pools(self.config, sizes, draft_stages=shape.draft_stages)
        self.alloc = KVAllocator(AllocSpec.of(self.config, sizes))
        rules = RollbackRules.of(self.alloc.spec, speculative=shape.width > 1)
        self.cache = PrefixCache(self.alloc, capture=lambda row, end: object()) if cache else None
        self.life = Lifecycle(self.alloc, self.cache, rules=rules, reserve=self.config.reserve, on_clear=self._clear)

    def _clear(self, cleanup: Cleanup) -> None:
        for name, slab in self.pools.families().items():
            if name == "c128 state" or ("state" in name and cleanup.c4_request_bank):
                bank = slab.data[:, cleanup.row * slab.ring : (cleanup.row + 1) * slab.ring]  # type: ignore[union-attr]
                half = bank.shape[-1] // 2
                bank[..., :half], bank[..., half:] = 0.0, float("-inf")

    def address(self, name: str, row: int, at: int) -> int:
        """Row of a family's slab that holds position (or entry) ``at``; 0 or less: nowhere."""
        state, page, config = self.alloc.state, self.config.page, self.config
        ring = 0 if "state" not in name else config.ring(128 if name == "c128 state" else 4)
        if name == "c128":
            return int(state.c128_table[row, at // config.c128_page_size]) * config.c128_page_size + (
                at % config.c128_page_size
            )
        if name in ("c4", "c4 indexer"):
            last = 4 * at + 3
            return int(state.block_table[row, last // page]) * (page // 4) + last % page // 4
        if name == "c128 state" or (ring and self.shape.platform == "a5"):
            return row * ring + at % ring
        swa = int(state.full_to_swa[state.block_table[row, at // page]])
        if not swa:
            return 0
        return swa * ring + at % ring if ring else swa * page + at % page

    def positions(self, name: str, length: int) -> range:
        """Positions (or entries) of a family that the next forward of a request of ``length`` may read."""
        if name == "swa":
            return range(max(0, length - 127), length)
        ratio = 128 if name.startswith("c128") else 4
        if "state" not in name:
            return range(length // ratio)
        closing = next(p for p in range(length, length + ratio) if (p + 1) % ratio == 0)
        rows = ratio if ratio == 128 else 8
        return range(max(0, closing - rows + 1), length)

    def fill(self, row: int, length: int, overshoot: int = 0) -> None:
        """Write the truth of ``length`` positions in order, then ``overshoot`` rejected rows of something else."""
        for seed, (name, slab) in enumerate(self.pools.families().items()):
            count = length // (128 if name == "c128" else 4) if name in ("c4", "c4 indexer", "c128") else length
            extra = overshoot if name == "swa" or "state" in name else 0
            at = [self.address(name, row, p) for p in range(count + extra)]
            keep = {slot: p for p, slot in enumerate(at) if slot > 0}
            slots, source = torch.tensor(list(keep), dtype=torch.int64), torch.tensor(list(keep.values()))
            for part, tensor in enumerate(slab.tensors()):
                view = raw(tensor)
                values = truth(view.shape[0], view.shape[2], 10 * seed + part)
                if slots.numel():
                    fresh = values[:, source]
                    fresh[:, source >= count] = 0x5A
                    view[:, slots] = fresh

    def wrong(self, row: int, length: int, shared: int = 0) -> list[str]:
        """Families of which a readable row of ``row`` does not hold its truth."""
        bad = []
        for seed, (name, slab) in enumerate(self.pools.families().items()):
            wanted = list(self.positions(name, length))
            at = [self.address(name, row, p) for p in wanted]
            if not at:
                continue
            for part, tensor in enumerate(slab.tensors()):
                view = raw(tensor)
                values = truth(view.shape[0], view.shape[2], 10 * seed + part)
                if min(at) <= 0 or not torch.equal(view[:, torch.tensor(at)], values[:, torch.tensor(wanted)]):
                    bad.append(name)
                    break
        return bad

    def poison(self) -> None:
        """NaN (all bits set) everywhere but in the dummy state rows."""
        for name, slab in self.pools.families().items():
            for tensor in slab.tensors():
                view = raw(tensor)
                (view[:, :-1] if "state" in name else view).fill_(0xFF)

    def prefilled(self, rid: str, length: int, overshoot: int = 0) -> Request:
        """A request with ``length`` positions of history, one more token, and every row in its place."""
        request = self.life.admit(rid, tokens(length + 1), 8)
        while request.planned < length:
            end = self.life.chunk_end(request, length - request.planned)
            step = self.life.extend([(request, end)])
            self.life.launch(step)
            self.life.done(step)
            self.life.learn(step, {})
        if overshoot:
            with self.alloc.transaction() as plan:
                plan.extend(request.row, length + overshoot)
                plan.commit()
        self.fill(request.row, length, overshoot)
        return request

    def occupy(self, lengths: Sequence[int]) -> None:
        """Other requests that take rows and pages, so that what comes next lies elsewhere."""
        for index, length in enumerate(lengths):
            other = self.life.admit(f"other {index}", tokens(length), 1)
            self.life.preallocate(other, length)
