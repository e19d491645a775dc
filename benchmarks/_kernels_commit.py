"""The small ops around a commit: compaction, bonus tokens, accepted slots, and the slots of an extend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from _kernels_case import POISON, Case, Sizes, both, generator, same

from dsv4_npu.ops import _registry


@dataclass
class Accepted:
    """What a verify of a tree leaves behind."""

    predict: torch.Tensor
    hidden: torch.Tensor
    index: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    bonus: torch.Tensor


def accepted(device: str, seed: int, batch: int, size: Sizes) -> Accepted:
    rng = generator(device, seed)
    rows = batch * size.drafts
    path = torch.rand(batch, size.drafts - 1, device=device, generator=rng).argsort(1) + 1
    width = (size.drafts + 1) // 2
    path = path[:, : width - 1].sort(1).values
    first = torch.arange(batch, device=device)[:, None] * size.drafts
    return Accepted(
        torch.randint(0, 129280, (rows,), device=device, dtype=torch.int32, generator=rng),
        torch.randn(rows, size.hidden, device=device, generator=rng).bfloat16(),
        torch.cat((first, first + path), 1).int(),
        torch.randint(1, width + 1, (batch,), device=device, dtype=torch.int32, generator=rng),
        torch.randperm(rows + 5, device=device, generator=rng)[:rows] + 1,
        torch.full((batch,), POISON, device=device, dtype=torch.int32),
    )


def after_verify(device: str, batch: int, size: Sizes) -> Iterator[Case]:
    """compact_accept_, fill_bonus_tokens_ and gather_accepted_slots on one kind of input."""

    def make(seed: int) -> Accepted:
        return accepted(device, seed, batch, size)

    shape = f"D {size.drafts}, half of it accepted at most"
    function, bare = both("compact_accept_", device)

    def verify_compact(x: Accepted) -> None:
        predict, hidden = x.predict.clone(), x.hidden.clone()
        _registry.ops["compact_accept_"].ref(predict, hidden, x.index, x.lengths)
        function(x.predict, x.hidden, x.index, x.lengths)
        kept = torch.arange(size.drafts, device=device) < x.lengths[:, None]
        same("compact_accept_", x.predict[kept.flatten()], predict[kept.flatten()])
        same("compact_accept_", x.hidden[kept.flatten()], hidden[kept.flatten()])

    def compact_torch(x: Accepted) -> None:
        rows = x.index.flatten().long()
        to = (
            torch.arange(batch, device=device)[:, None] * size.drafts + torch.arange(x.index.shape[1], device=device)
        ).flatten()
        x.predict[to] = x.predict[rows]
        x.hidden[to] = x.hidden[rows]

    yield Case(
        "compact_accept_",
        f"{shape}, hidden {size.hidden}",
        batch,
        make,
        lambda x: function(x.predict, x.hidden, x.index, x.lengths),
        lambda x: bare(x.predict, x.hidden, x.index, x.lengths),
        verify_compact,
        lambda x: 2 * int(x.lengths.sum()) * (size.hidden * 2 + 4),
        "copy",
        {"torch (whole width)": compact_torch},
    )
    fill, bare_fill = both("fill_bonus_tokens_", device)

    def verify_bonus(x: Accepted) -> None:
        want = torch.empty_like(x.bonus)
        _registry.ops["fill_bonus_tokens_"].ref(want, x.predict, x.index, x.lengths)
        fill(x.bonus.fill_(POISON), x.predict, x.index, x.lengths)
        same("fill_bonus_tokens_", x.bonus, want)

    def bonus_torch(x: Accepted) -> None:
        last = x.index.gather(1, x.lengths[:, None].long() - 1).flatten().long()
        torch.index_select(x.predict, 0, last, out=x.bonus)

    yield Case(
        "fill_bonus_tokens_",
        shape,
        batch,
        make,
        lambda x: fill(x.bonus, x.predict, x.index, x.lengths),
        lambda x: bare_fill(x.bonus, x.predict, x.index, x.lengths),
        verify_bonus,
        lambda x: 16 * batch,
        "copy",
        {"torch": bonus_torch},
    )
    gather, bare_gather = both("gather_accepted_slots", device)

    def verify_gather(x: Accepted) -> None:
        want = _registry.ops["gather_accepted_slots"].ref(x.slots, x.index, x.lengths)
        for got, expected in zip(gather(x.slots, x.index, x.lengths), want, strict=True):
            same("gather_accepted_slots", got, expected)

    def gather_torch(x: Accepted) -> tuple[torch.Tensor, torch.Tensor]:
        step = torch.arange(x.index.shape[1], device=device)
        live = step < x.lengths[:, None]
        target = x.slots.view(batch, size.drafts)[:, : x.index.shape[1]]
        return torch.where(live, target, -1), torch.where(live, x.slots[x.index.long()], -1)

    yield Case(
        "gather_accepted_slots",
        shape,
        batch,
        make,
        lambda x: gather(x.slots, x.index, x.lengths),
        lambda x: bare_gather(x.slots, x.index, x.lengths),
        verify_gather,
        lambda x: x.index.numel() * (4 + 4 * 8),
        "copy",
        {"torch": gather_torch},
    )


def extend(device: str, batch: int, size: Sizes) -> Case:
    name = "extend_slots"
    function, bare = both(name, device)
    columns = size.pages // batch
    total = batch * size.lengths

    def make(seed: int) -> tuple[torch.Tensor, ...]:
        rng = generator(device, seed)
        table = torch.randint(1, size.pages, (batch + 1, columns), device=device, dtype=torch.int32, generator=rng)
        rows = torch.randperm(batch, device=device, generator=rng) + 1
        most = columns * size.page - size.lengths
        starts = torch.randint(0, most, (batch,), device=device, generator=rng)
        return table, rows, starts, torch.full((batch,), size.lengths, device=device)

    def verify(x: tuple[torch.Tensor, ...]) -> None:
        want = _registry.ops[name].ref(*x, size.page, total, columns)
        got: Any = function(*x, size.page, total, columns)
        for mine, expected in zip(got, want, strict=True):
            same(name, mine, expected)

    def with_torch(x: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        table, rows, starts, lengths = x
        position = starts[:, None] + torch.arange(size.lengths, device=device)
        mine = table[rows]
        slots = mine.gather(1, position // size.page).long() * size.page + position % size.page
        used = torch.arange(columns, device=device) * size.page < (starts + lengths)[:, None]
        return slots.flatten(), torch.where(used, mine, 0)

    return Case(
        name,
        f"{size.lengths} new tokens each, page {size.page}, {columns} columns",
        batch,
        make,
        lambda x: function(*x, size.page, total, columns),
        lambda x: bare(*x, size.page, total, columns),
        verify,
        lambda x: total * 8 + batch * columns * 8,
        "copy",
        {"torch (equal lengths)": with_torch},
    )
