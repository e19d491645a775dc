"""Faults of ownership: pages released twice, never, too early, or read by somebody else."""

from __future__ import annotations

import numpy as np

from dsv4_npu.alloc.state import FULL, N_FREE
from dsv4_npu.replay.runner import leaks
from tests.docs.faults import allocator, audited, fault, filled, life_on, refused, serve


@fault("closed-twice")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    row = filled(alloc, "chat", 300)
    alloc.close(row)
    return refused(lambda: alloc.close(row)) if planted else []


@fault("finished-twice")
def _(planted: bool, backend: str) -> list[str]:
    life = life_on(allocator(backend))
    request = serve(life, life.admit("chat", [1] * 300, 8))
    life.finish(request)
    return refused(lambda: life.abort(request)) if planted else []


@fault("row-of-another")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    row = filled(alloc, "chat", 300)
    alloc.close(row, "chat")
    again = filled(alloc, "mail", 300)
    return refused(lambda: alloc.close(row if planted else again, "chat" if planted else "mail"))


@fault("page-freed-twice")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    row = filled(alloc, "chat", 300)
    pages, c128 = alloc.take_over(row, 2)
    alloc.close(row)
    alloc.release_c128(c128)
    alloc.free_pages(pages)
    return refused(lambda: alloc.free_pages(pages)) if planted else []


@fault("c128-released-twice")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    row = filled(alloc, "chat", 300)
    page = alloc.state.c128_table[row, :1].copy()
    alloc.retain_c128(page)
    alloc.close(row)
    alloc.release_c128(page)
    return refused(lambda: alloc.release_c128(page)) if planted else []


@fault("free-list-corrupt")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    row = filled(alloc, "chat", 300)
    if planted:
        state = alloc.state
        state.free_list[FULL][state.counters[N_FREE]] = state.block_table[row, 0]
        state.counters[N_FREE] += 1
    return [one for one in audited(alloc) if "listed as free" in one]


@fault("c128-leak")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    life = life_on(alloc, cache=False)
    request = serve(life, life.admit("chat", [1] * 300, 8))
    if planted:
        alloc.retain_c128(alloc.state.c128_table[request.row, :1].copy())
    life.finish(request)
    return audited(alloc)


@fault("c128-leak-at-the-end")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    life = life_on(alloc, cache=False)
    request = serve(life, life.admit("chat", [1] * 300, 8))
    if planted:
        alloc.retain_c128(alloc.state.c128_table[request.row, :1].copy())
    life.finish(request)
    return leaks(life)


@fault("outside-leak")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    row = filled(alloc, "chat", 130)
    pages, c128 = alloc.take_over(row, 1)
    alloc.close(row)
    if not planted:
        alloc.free_pages(pages)
        alloc.release_c128(c128)
    return [one for one in audited(alloc) if "no holder names it" in one]


@fault("two-readers")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    one, two = filled(alloc, "chat", 300), filled(alloc, "mail", 200)
    alloc.flush()
    if planted:
        alloc.state.block_table[two, 0] = alloc.state.block_table[one, 0]
    return [one for one in audited(alloc) if "does not own" in one or "mirror" in one]


@fault("shared-page-freed")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    row = filled(alloc, "chat", 300)
    pages, _ = alloc.take_over(row, 2)
    if not planted:
        alloc.close(row)
    return refused(lambda: alloc.free_pages(pages))


@fault("freed-unaligned")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    row = filled(alloc, "chat", 300, allocated=512)
    boundary = 300 if planted else 384
    alloc.free_slots(alloc.slots(row, boundary, 512).out_full)
    page = int(alloc.state.block_table[row, 2])
    return [] if page else refused(lambda: alloc.decode_step([row], 8))


@fault("hole-read")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    row = filled(alloc, "chat", 300)
    if planted:
        alloc.state.c128_table[row, 1] = 0
    return refused(lambda: alloc.slots(row, 200, 300)) + refused(lambda: alloc.row_pages(row, 300))


@fault("hole-audited")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    row = filled(alloc, "chat", 300)
    alloc.flush()
    if planted:
        alloc.ledger.release_c128(alloc.state.c128_table[row, 1:2].astype(np.int64))
        alloc.state.c128_table[row, 1] = 0
        alloc.mirrors.c128_table[row, 1] = 0
    return audited(alloc)


@fault("epoch-not-drained")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    row = filled(alloc, "chat", 100)
    epoch = alloc.launch()
    alloc.close(row)
    if planted:
        alloc.epochs.done(epoch)
    else:
        alloc.done(epoch)
    return [one for one in audited(alloc) if one.startswith("FULL")]


@fault("mirror-stale")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    row = filled(alloc, "chat", 300)
    alloc.flush()
    if planted:
        alloc.mirrors.block_table[row, 1] = 19
    return audited(alloc)


@fault("swa-lost")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    row = filled(alloc, "chat", 300)
    if planted:
        alloc.state.full_to_swa[alloc.state.block_table[row, 1]] = 0
    return [one for one in audited(alloc) if "mirror" not in one]


@fault("swa-never-evicted")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend, swa_pages=4, verify_width=4)
    row = filled(alloc, "chat", 508)
    if not planted:
        alloc.evict_window(row)
    return [
        *refused(lambda: alloc.decode_step([row], 8)),
        *(["audit: clean"] if planted and not audited(alloc) else []),
    ]


@fault("swa-freed-early")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend, verify_width=4)
    row = filled(alloc, "chat", 300, allocated=512)
    state = alloc.state
    if planted:
        state.committed[row] = state.allocated[row]
    alloc.evict_window(row)
    state.committed[row] = 300
    return [*audited(alloc), *refused(lambda: alloc.decode_step([row], 8))]


@fault("swa-kept")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    row = filled(alloc, "chat", 300)
    if planted:
        alloc.state.evict_cursor[row] = alloc.state.swa_start[row] = 1
    return audited(alloc)
