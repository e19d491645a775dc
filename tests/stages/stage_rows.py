"""Which rows of the draft stages are written and read, and in which order, by the log of the slab that holds them.

Real stages over real pools and tables, with hidden states that mean nothing: only the rows count here. A request is set
to a length, then drafts, has some rows accepted, and again; every row is labelled by its last write, and every read is
looked up.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from dsv4_npu.budget import PoolSizes
from dsv4_npu.config import CacheConfig, PlatformSpec, SpeculationSpec
from dsv4_npu.emulation.forward import Bounds, Tables
from dsv4_npu.emulation.stages import OwnDrafter, StageNet, StageRounds
from dsv4_npu.pools import DSV4Pools

#: Lengths around the ends of pages and windows, and short ones.
LENGTHS = (1, 2, 64, 126, 127, 128, 129, 255, 256)
COLUMNS = 3


class Log:
    """Labels of rows by their last write, and what reads found; a hidden dummy row is nobody's."""

    def __init__(self, rounds: StageRounds, target_layers: int) -> None:
        self.slab, self.first = rounds.pools.swa, target_layers
        self.label: dict[tuple[int, int], tuple[str, int]] = {}
        self.now = ("inject", 0)
        self.written: list[tuple[int, int]] = []
        self.found: Counter[str] = Counter()
        self.lengths: dict[int, int] = {}
        self._write, self._read = self.slab.write, self.slab.read
        self.slab.write, self.slab.read = self.write, self.read  # type: ignore[method-assign]

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        assert layer >= self.first, "a stage never touches a layer of the target"
        for slot in slots[slots > 0].tolist():
            self.label[layer, slot] = self.now
            self.written.append((layer, slot))
        self._write(layer, slots, rows)

    def read(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        kind, number = self.now
        for slot in slots[slots > 0].tolist():
            request, position = place(slot)
            label = self.label.get((layer, slot))
            if position < self.lengths[request]:
                self.found["committed" if label and label[0] == "inject" else "rejected"] += 1
            else:
                self.found["this round's" if label == (kind, number) else "rejected"] += 1
        return self._read(layer, slots, dtype)


def place(slot: int) -> tuple[int, int]:
    """Request and position of a slot: request b has the pages ``1 + 3 b ..``."""
    page, offset = divmod(slot, 128)
    request, column = divmod(page - 1, COLUMNS)
    return request, column * 128 + offset


def slot_of(request: int, position: int) -> int:
    return (1 + request * COLUMNS + position // 128) * 128 + position % 128


def two_rounds(net: StageNet, spec: Any, kind: str, width: int, length: int) -> Counter[str]:
    """Draft, accept a, draft, accept a', draft, for all a and a' in 1..D; what all of that read."""
    pairs = list(itertools.product(range(1, width + 1), repeat=2))
    batch = len(pairs)
    config = CacheConfig(
        spec,
        PlatformSpec.load("a3"),
        SpeculationSpec("chain" if kind == "mtp" else "dspark", width - 1),
        context_len=COLUMNS * 128 - 2 * width,
        request_rows=batch,
        kv_row="fp64",
        indexer_row="fp64",
        c128_page_size=1,
        emulated_kernels=True,
    )
    pages = batch * COLUMNS
    pools = DSV4Pools(config, PoolSizes(pages, pages, 1, batch), draft_stages=True)
    table = torch.arange(1, pages + 1, dtype=torch.int32).view(batch, COLUMNS)
    table = torch.cat((torch.zeros((1, COLUMNS), dtype=torch.int32), table))
    tables = Tables(table, torch.arange(pages + 1, dtype=torch.int32), table.new_zeros((batch + 1, 1)))
    rounds = StageRounds(OwnDrafter(net, kind), pools, tables)  # type: ignore[arg-type]
    log = Log(rounds, spec.num_layers)
    layers = range(spec.num_layers, spec.num_layers + net.stages)
    for request in range(batch):
        for layer, position in itertools.product(layers, range(length)):
            log.label[layer, slot_of(request, position)] = ("inject", 0)
    rows = torch.arange(1, batch + 1)
    starts = torch.full((batch,), length)
    gen = torch.Generator().manual_seed(0)
    for number in (1, 2, 3):
        lows = starts.tolist()
        log.lengths = dict(enumerate(lows))
        bounds = Bounds(lows, lows, [width] * batch)
        log.now, log.written = ("draft", number), []
        roots = torch.randint(spec.vocab_size, (batch,), generator=gen)
        drafts = rounds.propose(rows, starts, roots, bounds, width - 1) if width > 1 else None
        # MTP writes no row for its first step, whose position was injected, DSpark one for every draft.
        wrote = width - 2 if kind == "mtp" else width - 1
        expect(log.written, layers, lows, [max(0, wrote)] * batch)
        if number == 3:
            break
        accept = torch.tensor([pair[number - 1] for pair in pairs])
        tokens = roots[:, None] if drafts is None else torch.cat((roots[:, None], drafts.tokens), dim=1)
        hidden = torch.randn((batch, width, spec.hidden_size), generator=gen, dtype=torch.float64)
        log.now, log.written = ("inject", number), []
        rounds.committed(rows, starts, accept, tokens, tokens.flatten().to(torch.int32), hidden, bounds)
        expect(log.written, layers, lows, accept.tolist())
        starts = starts + accept
    return log.found


def expect(written: list[tuple[int, int]], layers: range, starts: Sequence[int], counts: Sequence[int]) -> None:
    """Exactly the rows of ``[start, start + count)`` of each request were written, once in every stage."""
    want = [
        (layer, slot_of(request, start + offset))
        for layer in layers
        for request, (start, count) in enumerate(zip(starts, counts, strict=True))
        for offset in range(count)
    ]
    assert sorted(written) == sorted(want)
