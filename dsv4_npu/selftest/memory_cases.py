"""Cases of the ops that move, clear and number memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from dsv4_npu.selftest.case import OpCase, Refusal

PAGE = 128


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _state(layers: int, rows: int, width: int) -> torch.Tensor:
    return torch.arange(layers * rows * width, dtype=torch.float32).view(layers, rows, width) + 1


def _clear(
    requests: Sequence[int], lengths: Sequence[int], accepted: Sequence[int], drafts: int, banks: int, ring: int = 256
) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "state": _state(3, banks * ring, 8),
        "req_pool_indices": torch.tensor(requests, dtype=torch.int64),
        "seq_lens": torch.tensor(lengths, dtype=torch.int64),
        "accept_lens": torch.tensor(accepted, dtype=torch.int64),
        "ring_size": ring,
        "num_draft_tokens": drafts,
    }


def _move(tgt: Sequence[int], src: Sequence[int], pages: int = 3, page: int = 16) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "slab": _state(2, pages * page, 8).view(2, pages, page, 1, 8),
        "tgt": torch.tensor(tgt, dtype=torch.int64),
        "src": torch.tensor(src, dtype=torch.int64),
    }


def _paths(dtype: torch.dtype = torch.int32) -> dict[str, torch.Tensor]:
    """The tree root → {A, B}, A → C with A and C accepted, beside a request whose drafts were all rejected."""
    return {
        "accept_index": torch.tensor([[0, 1, 3, -1], [4, -1, -1, -1]], dtype=dtype),
        "accept_lens": torch.tensor([3, 1], dtype=dtype),
    }


def _many(batch: int, drafts: int) -> dict[str, torch.Tensor]:
    """Accepted paths of any length through every second or every row."""
    rng = _seeded(3)
    lens = torch.randint(1, drafts // 2 + 1, (batch,), generator=rng)
    steps = torch.randint(1, 3, (batch, 1), generator=rng)
    rows = torch.arange(1, drafts).expand(batch, -1) * steps
    rows = torch.cat((torch.zeros(batch, 1, dtype=torch.int64), rows), dim=1)
    rows = torch.where(torch.arange(drafts) < lens[:, None], rows + torch.arange(batch)[:, None] * drafts, -1)
    return {"accept_index": rows.to(torch.int32), "accept_lens": lens.to(torch.int32)}


def _extend(batch: int, seed: int) -> dict[str, Any]:
    rng = _seeded(seed)
    starts = torch.randint(0, 500, (batch,), generator=rng)
    lengths = torch.randint(0, 400, (batch,), generator=rng)
    table = torch.randint(1, 9000, (batch + 1, 8), generator=rng).to(torch.int32)
    return {
        "block_table": table,
        "req_pool_indices": torch.randperm(batch, generator=rng) + 1,
        "starts": starts,
        "lengths": lengths,
        "page_size": PAGE,
        "total": int(lengths.sum()),
        "columns": 8,
    }


def memory_cases() -> Iterator[OpCase | Refusal]:
    """Every case of these ops."""
    yield from _clears()
    yield from _moves()
    yield from _commits()
    yield OpCase(
        "slots of a request that begins inside a page",
        "extend_slots",
        lambda: {
            "block_table": torch.tensor([[0, 0, 0], [7, 5, 9]], dtype=torch.int32),
            "req_pool_indices": torch.tensor([1]),
            "starts": torch.tensor([126]),
            "lengths": torch.tensor([4]),
            "page_size": PAGE,
            "total": 4,
            "columns": 3,
        },
        {"result 0": [7 * 128 + 126, 7 * 128 + 127, 5 * 128, 5 * 128 + 1], "result 1": [[7, 5, 0]]},
    )
    yield OpCase("slots and tables of 23 requests", "extend_slots", lambda: _extend(23, 1))
    yield OpCase("no requests are no work", "extend_slots", lambda: _extend(0, 2))


def _clears() -> Iterator[OpCase | Refusal]:
    op = "clear_c128_draft_states_"
    for name, made in (
        ("rejected rows of three requests, one over the ring's end", _clear([2, 4, 1], [254, 0, 511], [1, 3, 6], 6, 5)),
        ("all accepted: nothing is cleared", _clear([1, 2], [5, 255], [4, 4], 4, 3)),
        ("case 8: padded rows touch the bank of request 0 alone", _clear([3, 0, 0], [9, 0, 0], [2, 1, 1], 4, 4)),
        ("no requests are no work", _clear([], [], [], 4, 2)),
    ):
        yield OpCase(name, op, made)
    plain = _clear([1], [127], [1], 4, 2, ring=128)
    yield Refusal("case 7: a ring without speculation has no width", op, plain, "at most 0")
    yield Refusal("case 7: a width above the pad", op, _clear([1], [10], [2], 131, 2), "at most 130")
    op = "clear_request_states_"

    def banks(requests: Sequence[int], ring: int) -> Callable[[], dict[str, Any]]:
        return lambda: {
            "state": _state(2, 5 * ring, 8),
            "req_pool_indices": torch.tensor(requests, dtype=torch.int64),
            "ring_size": ring,
        }

    yield OpCase("two banks of C4 states", op, banks([3, 1], 16))
    yield OpCase("a bank of C128 states", op, banks([4], 256))
    yield OpCase("no requests are no work", op, banks([], 16))


def _moves() -> Iterator[OpCase]:
    op = "move_kv_"
    yield OpCase("case 41: token 17 to slot 3 of a paged buffer, every other byte equal", op, _move([3], [17]))
    yield OpCase("case 42: downwards over its own sources", op, _move([1, 2, 3], [2, 3, 4]))
    yield OpCase("case 42: upwards over its own sources", op, _move([2, 3, 4], [1, 2, 3]))
    yield OpCase("case 42: a swap", op, _move([1, 2], [2, 1]))
    yield OpCase("the worked example: the third accepted row over B", op, _move([18], [19]))
    yield OpCase("no pairs are no work", op, _move([], []))

    def grouped() -> dict[str, Any]:
        pairs = _move([17, 18, 33, 34], [17, 19, 35, 34])()
        return {**pairs, "tgt": pairs["tgt"].view(2, 2), "src": pairs["src"].view(2, 2)}

    yield OpCase("two requests in parallel", op, grouped)

    def bfloat() -> dict[str, Any]:
        moved = _move([5, 40, 7], [40, 5, 30])()
        return {**moved, "slab": moved["slab"].to(torch.bfloat16)}

    yield OpCase("bfloat16 rows", op, bfloat)


def _commits() -> Iterator[OpCase]:
    slots = torch.arange(42080, 42088)
    yield OpCase(
        "the worked example: R, A, C of slots 42080..42083",
        "gather_accepted_slots",
        lambda: {"out_cache_loc": slots.clone(), **_paths()},
        {
            "result 0": [[42080, 42081, 42082, -1], [42084, -1, -1, -1]],
            "result 1": [[42080, 42081, 42083, -1], [42084, -1, -1, -1]],
        },
    )
    yield OpCase(
        "the worked example: X is the bonus",
        "fill_bonus_tokens_",
        lambda: {
            "bonus_tokens": torch.full((2,), -77, dtype=torch.int64),
            "predict": torch.tensor([10, 12, -77, 99, 55, -77, -77, -77], dtype=torch.int32),
            **_paths(),
        },
        {"bonus_tokens": [99, 55]},
    )
    yield OpCase(
        "the worked example: A, C, X to the front",
        "compact_accept_",
        lambda: {
            "predict": torch.tensor([10, 12, 7, 99, 55, 6, 6, 6], dtype=torch.int32),
            "hidden_states": _state(1, 8, 32)[0],
            **_paths(),
        },
    )
    for batch in (0, 17):
        name = f"{batch} requests" if batch else "no requests are no work"
        yield OpCase(name, "gather_accepted_slots", partial(_slots, batch))
        yield OpCase(name, "fill_bonus_tokens_", partial(_bonus, batch))
    yield OpCase(
        "17 requests",
        "compact_accept_",
        lambda: {
            "predict": torch.arange(17 * 6, dtype=torch.int32),
            "hidden_states": _state(1, 17 * 6, 64)[0].to(torch.bfloat16),
            **_many(17, 6),
        },
    )
    yield OpCase(
        "case 40: 4096 requests of 8 rows stay within the grid's limit",
        "gather_accepted_slots",
        lambda: {"out_cache_loc": torch.arange(4096 * 8), **_many(4096, 8)},
        slow=True,
    )


def _slots(batch: int) -> dict[str, torch.Tensor]:
    return {"out_cache_loc": torch.arange(batch * 6) * 3, **_many(batch, 6)}


def _bonus(batch: int) -> dict[str, torch.Tensor]:
    return {
        "bonus_tokens": torch.full((batch,), -77, dtype=torch.int64),
        "predict": torch.arange(batch * 6, dtype=torch.int32) * 5,
        **_many(batch, 6),
    }
