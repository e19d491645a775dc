"""A request's whole memory in host memory, and back into other pages and another row."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from dsv4_npu.alloc.allocator import KVAllocator
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.request import WITH_ROW, Request, State
from dsv4_npu.errors import InputError, OwnershipError
from dsv4_npu.movement.belongings import swa_tail
from dsv4_npu.movement.rows import Layout, Rows, check_layout, check_rows, layout_of, read_rows, write_rows
from dsv4_npu.pools import DSV4Pools


@dataclass(frozen=True)
class Snapshot:
    """Everything that belongs to a request at ``length``, without a page, slot or ring address in it.

    ``digest``: of the first ``length`` tokens, so that it is restored for this history only, and of the token behind
    them where rows of an MTP stage depend on it. ``layout``: row formats.
    """

    length: int
    digest: str
    layout: Layout
    rows: Rows

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return sum(t.numel() * t.element_size() for tensors in self.rows.values() for t in tensors)


def digest_of(request: Request, length: int) -> str:
    """A name of the first ``length`` tokens of a request."""
    return hashlib.sha256(np.ascontiguousarray(request.tokens[:length]).tobytes()).hexdigest()


def take_snapshot(pools: DSV4Pools, alloc: KVAllocator, request: Request) -> Snapshot:
    """Copy all that belongs to a request at its committed end; call it before the row is given up.

    Raises:
        OwnershipError: no row, forwards that are not learned, a hole, or live compressor rows that are not proved to
            be in their rings (after a discarded verify), or no token behind the last position although its rows depend
            on one: such a request is to be recomputed.
    """
    if request.state not in WITH_ROW:
        raise OwnershipError(f"snapshot: request {request.rid!r} is {request.state.value}: it has no row")
    if request.unlearned:
        raise OwnershipError(f"snapshot: request {request.rid!r} has {request.unlearned} steps that were not learned")
    length = min(alloc.committed(request.row), len(request))
    if not request.log.resident(length):
        raise OwnershipError(
            f"snapshot: request {request.rid!r} at {length}: its compressor rows are not all in their rings"
        )
    named = length + request.log.rules.lookahead
    if named > len(request):
        raise OwnershipError(
            f"snapshot: request {request.rid!r} at {length}: the token behind it is not known, "
            "and a draft stage's last row depends on it"
        )
    rows = read_rows(pools, alloc, request.row, length)
    return Snapshot(length, digest_of(request, named), layout_of(pools), rows)


def _same_history(pools: DSV4Pools, request: Request, snapshot: Snapshot) -> bool:
    """Whether the snapshot's rows are those of the request's tokens."""
    target = pools.config.model.num_layers
    staged = all(layers > target for layers, _, _ in snapshot.layout["swa"])
    if request.log.rules.lookahead and staged:
        return snapshot.digest == digest_of(request, snapshot.length + 1)
    return snapshot.digest in (digest_of(request, snapshot.length), digest_of(request, snapshot.length + 1))


def restore_snapshot(pools: DSV4Pools, life: Lifecycle, request: Request, snapshot: Snapshot) -> int:
    """Put a snapshot into the row that an admitted request has now; returns the position that it goes on from.

    The request is in ``PREFILL`` (after ``admit`` or ``readmit``) and nothing of it was planned. What is left is to
    prefill its tokens from the returned position on, at least one. A cached prefix stays shared; where it reaches as
    far as the snapshot, nothing is copied.

    Raises:
        InputError: rows of another format, or of another history.
        OwnershipError: the request is not freshly admitted.
        CapacityError: the pages are not there, after the cache gave what it can. Nothing was changed in either case.
    """
    alloc, length = life.alloc, snapshot.length
    if request.state is not State.PREFILL or request.unlearned or request.planned != request.cached:
        raise OwnershipError(
            f"restore: request {request.rid!r} is {request.state.value}, planned to {request.planned}: "
            "a freshly admitted one is needed"
        )
    check_layout(snapshot.layout, pools)
    check_rows(pools, length, snapshot.rows)
    if length >= len(request) or not _same_history(pools, request, snapshot):
        raise InputError(f"restore: the snapshot of {length} tokens is none of request {request.rid!r}'s history")
    if length <= request.cached:
        return request.cached
    with alloc.transaction() as plan:
        plan.extend(request.row, length, swa_tail(pools.config, length))
        if not plan.fits():
            life.make_room(plan.need)
        plan.commit(slots=False)
    write_rows(pools, alloc, request.row, length, snapshot.rows, alloc.shared(request.row))
    alloc.commit(request.row, length)
    for ring in (request.log.c4, request.log.c128):
        ring.save(*ring.rule.live(length))
    # Rows captured at the prefix are older than the snapshot's and may share their slots.
    request.restore = None
    request.planned = length
    return length
