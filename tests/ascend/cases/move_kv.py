"""Moves of token rows: overlaps both ways, swaps, skipped pairs, groups, odd rows of every element type, long lists."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4_npu.ops.move_kv import ref, triton

from ..case import Case, Outputs, untouched


def move(
    label: str, slab: torch.Tensor, tgt: list[int] | torch.Tensor, src: list[int] | torch.Tensor, **options: object
) -> Case:
    def outcome(run: object, index: torch.dtype) -> Outputs:
        changed = slab.clone()
        run(changed, *(torch.as_tensor(slots).to(index).contiguous() for slots in (tgt, src)))  # type: ignore[operator]
        return {"slab": changed.view(torch.uint8)}

    index = torch.int32 if len(label) % 2 else torch.int64
    return Case(
        label,
        lambda: outcome(triton.run, index),
        lambda: outcome(ref.move_kv_, index),
        **options,  # type: ignore[arg-type]
    )


def slab(layers: int, pages: int, page: int, row: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    random = torch.Generator().manual_seed(layers * 100 + pages * 10 + row)
    raw = torch.randint(0, 256, (layers, pages, page, 1, row * dtype.itemsize), generator=random, dtype=torch.uint8)
    return raw.view(dtype)


def far_slots() -> Case:
    """Slots beyond 2**31 elements, in memory that nobody touches otherwise."""
    last = 4100 * 1024 - 1
    tgt, src = torch.tensor([last - 3, last - 2]), torch.tensor([last - 2, last])

    def outcome(run: object) -> Outputs:
        with untouched():
            slab = torch.empty(1, 4100, 1024, 1, 512)
        rows = slab.view(-1, 512)
        rows[last - 3 :] = torch.arange(4.0).view(4, 1)
        run(slab, tgt, src)  # type: ignore[operator]
        return {"rows": rows[last - 3 :].clone()}

    return Case(f"slot {last} of 512 words", lambda: outcome(triton.run), lambda: outcome(ref.move_kv_))


def cases() -> Iterator[Case]:
    yield move("page-shaped, 17 to 3", slab(2, 3, 16, 6), [3], [17])
    yield move("down over itself", slab(1, 2, 4, 8), [1, 2, 3], [2, 3, 4])
    yield move("up over itself", slab(3, 2, 4, 8), [2, 3, 4], [1, 2, 3])
    yield move("swap", slab(2, 2, 4, 12), [1, 2], [2, 1])
    yield move("skipped pairs", slab(2, 4, 4, 10), [5, -1, 6, -1, 7], [9, -1, 5, -1, 6])
    yield move("nothing but skipped pairs", slab(2, 4, 4, 10), [-1, -1], [-1, -1])
    yield move("bytes, odd row", slab(2, 3, 4, 7, torch.int8), [1, 2, 3, 4], [4, 3, 2, 1])
    yield move("halves, odd row", slab(2, 3, 4, 9, torch.bfloat16), [1, 2, 3], [3, 1, 2])
    groups = torch.arange(1, 1 + 7 * 6).view(7, 6)
    yield move("groups", slab(2, 6, 8, 20), groups[:, :3], groups[:, 3:])
    yield move("groups that turn", slab(2, 6, 8, 20), groups, groups.roll(1, 1), programs=1)
    shuffled = torch.randperm(1300, generator=torch.Generator().manual_seed(0)) + 1
    yield move("a long list", slab(1, 84, 16, 3), shuffled[:700], shuffled[600:1300])
    yield move("longer than a tile", slab(2, 84, 16, 3), shuffled[:1100], shuffled[200:1300])
    yield far_slots()
    committed = torch.arange(128, 128 + 4 * 16).view(4, 16)
    for name, layers, row, dtype in (
        ("A3 rows of bfloat16", 2, 512, torch.bfloat16),
        ("A5 rows of bytes", 2, 640, torch.int8),
        ("state rows", 2, 2048, torch.float32),
    ):
        pairs = (committed[:, :8], committed[:, 3:11])
        yield move(name, slab(layers, 4, 128, row, dtype), *pairs, production=True)
