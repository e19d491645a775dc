"""The ops that move, clear and number memory, at served sizes: Pro's 31 C128 layers, rings of 256 rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import _kernels_public as public
import torch
from _kernels_case import SMALL, Case, Sizes, both, generator
from _kernels_commit import after_verify, extend

from dsv4_npu.ops import _registry


@dataclass
class Verified:
    """A batch of requests after a verify, as the memory ops see it."""

    requests: torch.Tensor
    lengths: torch.Tensor
    accepted: torch.Tensor


def verified(device: str, seed: int, batch: int, drafts: int) -> Verified:
    rng = generator(device, seed)
    return Verified(
        torch.randperm(batch, device=device, generator=rng) + 1,
        torch.randint(0, 100_000, (batch,), device=device, generator=rng),
        torch.randint(1, drafts + 1, (batch,), device=device, generator=rng),
    )


def clear_draft_states(device: str, batch: int, size: Sizes, rivals: dict[str, Any]) -> Case:
    name = "clear_c128_draft_states_"
    function, bare = both(name, device)
    state = torch.empty(size.layers, (batch + 1) * size.ring + size.ring, size.width, device=device)

    def call(run: Callable[..., object]) -> Callable[[Verified], object]:
        return lambda x: run(state, x.requests, x.lengths, x.accepted, size.ring, size.drafts)

    def real(x: Verified) -> None:
        for layer in state.unbind(0):
            rivals["clear"](layer, x.requests, x.lengths, x.accepted, ring_size=size.ring, num_draft_tokens=size.drafts)

    others = {"public": call(public.clear)} | ({"sglang": real} if "clear" in rivals else {})

    def verify(x: Verified) -> None:
        state.normal_(generator=generator(device, 1))
        before, want = state.clone(), state.clone()
        _registry.ops[name].ref(want, x.requests, x.lengths, x.accepted, size.ring, size.drafts)
        for run in (call(function), *others.values()):
            state.copy_(before)
            run(x)
            if not torch.equal(state, want):
                raise AssertionError(f"{name}: the state differs from ref's")

    return Case(
        name,
        f"{size.layers} layers, D {size.drafts}, accept lengths 1..D",
        batch,
        lambda seed: verified(device, seed, batch, size.drafts),
        call(function),
        call(bare),
        verify,
        lambda x: int((size.drafts - x.accepted).sum()) * size.layers * size.width * 4,
        "fill",
        others,
        sets=16,
        calls=48,
    )


def clear_requests(device: str, batch: int, size: Sizes) -> Case:
    name = "clear_request_states_"
    function, bare = both(name, device)
    state = torch.empty(size.layers, (4 * batch + 2) * size.ring, size.width, device=device)
    half = torch.zeros(size.width // 2, device=device)
    empty_row = torch.cat((half, half - torch.inf))

    def make(seed: int) -> torch.Tensor:
        return torch.randperm(4 * batch, device=device, generator=generator(device, seed))[:batch] + 1

    def verify(rows: torch.Tensor) -> None:
        state.normal_(generator=generator(device, 1))
        want = state.clone()
        _registry.ops[name].ref(want, rows, size.ring)
        function(state, rows, size.ring)
        if not torch.equal(state, want):
            raise AssertionError(f"{name}: the state differs from ref's")

    def with_torch(rows: torch.Tensor) -> None:
        banks = state[:, : (4 * batch + 2) * size.ring].view(size.layers, -1, size.ring, size.width)
        banks[:, rows] = empty_row

    return Case(
        name,
        f"{size.layers} layers, ring {size.ring}",
        batch,
        make,
        lambda rows: function(state, rows, size.ring),
        lambda rows: bare(state, rows, size.ring),
        verify,
        lambda rows: len(rows) * size.layers * size.ring * size.width * 4,
        "fill",
        {"torch": with_torch},
        sets=4,
        calls=16,
    )


def move(device: str, batch: int, size: Sizes) -> Case:
    """Each request of ``batch`` moves three rows down over rejected ones."""
    name = "move_kv_"
    function, bare = both(name, device)
    slab = torch.empty(size.layers, size.pages, size.page, 1, size.row, dtype=torch.bfloat16, device=device)
    slots = size.pages * size.page

    def make(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = generator(device, seed)
        apart = slots // batch
        first = torch.arange(batch, device=device) * apart + torch.randint(
            1, apart - 8, (batch,), device=device, generator=rng
        )
        target = first[:, None] + torch.arange(3, device=device)
        return target, target + torch.tensor([1, 1, 2], device=device)

    def verify(pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        slab.normal_(generator=generator(device, 1))
        want = slab.clone()
        _registry.ops[name].ref(want, *pairs)
        function(slab, *pairs)
        if not torch.equal(slab, want):
            raise AssertionError(f"{name}: the slab differs from ref's")

    def with_torch(pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        rows = slab.view(size.layers, slots, size.row)
        rows[:, pairs[0].flatten()] = rows[:, pairs[1].flatten()]

    return Case(
        name,
        f"{size.layers} layers, 3 rows of {2 * size.row} B per request",
        batch,
        make,
        lambda pairs: function(slab, *pairs),
        lambda pairs: bare(slab, *pairs),
        verify,
        lambda pairs: 2 * pairs[0].numel() * size.layers * size.row * 2,
        "copy",
        {"torch": with_torch},
        sets=16,
    )


def memory_cases(device: str, small: bool, rivals: dict[str, Any]) -> Iterator[Callable[[], Iterator[Case]]]:
    """Builders of cases, so that only one case's memory is held at a time."""
    size = SMALL if small else Sizes()
    for batch in (1, 3) if small else (1, 64, 256):
        yield lambda batch=batch: iter([clear_draft_states(device, batch, size, rivals)])
    some = 3 if small else 64
    yield lambda: iter([clear_requests(device, 2 if small else 16, size)])
    yield lambda: iter([move(device, some, size)])
    yield lambda: after_verify(device, some, size)
    yield lambda: iter([extend(device, some, size)])
