"""A snapshot from one process to another over ``torch.distributed``: rows by position, addresses stay at home.

Each side finds the rows by its own tables and rings, so rings, page sizes, page tables and C4 ownership may differ.
Row formats may not; the receiver checks them before any row is on its way, and its answer makes both sides fail.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from dsv4_npu.errors import InputError
from dsv4_npu.movement.belongings import describe
from dsv4_npu.movement.rows import BITS, Layout, check_layout
from dsv4_npu.movement.snapshot import Snapshot
from dsv4_npu.pools import DSV4Pools

#: Stored scores of this project include the position bias (ape); rows of the other convention must not be mixed in.
CONVENTION = "kv | score with position bias"
_MAX_HEADER = 1 << 20


def header_of(snapshot: Snapshot) -> dict[str, Any]:
    """What the receiver must know before the rows arrive, as JSON values."""
    return {
        "convention": CONVENTION,
        "length": snapshot.length,
        "digest": snapshot.digest,
        "layout": snapshot.layout,
        "shapes": {name: [list(t.shape) for t in tensors] for name, tensors in snapshot.rows.items()},
    }


def send_snapshot(snapshot: Snapshot, peer: int, group: Any = None) -> None:
    """Send a snapshot to rank ``peer``; raises InputError when the peer refuses it, before any row is sent."""
    text = torch.frombuffer(bytearray(json.dumps(header_of(snapshot)).encode()), dtype=torch.uint8)
    dist.send(torch.tensor([text.numel()]), peer, group)
    dist.send(text, peer, group)
    answer = torch.zeros(1, dtype=torch.int64)
    dist.recv(answer, peer, group)
    if not int(answer):
        raise InputError(f"peer {peer} refused the snapshot of {snapshot.length} tokens: its error says why")
    for tensors in snapshot.rows.values():
        for values in tensors:
            if values.numel():
                dist.send(values.contiguous().view(torch.uint8), peer, group)


def receive_snapshot(pools: DSV4Pools, peer: int, group: Any = None) -> Snapshot:
    """Receive a snapshot for ``pools`` from rank ``peer``; InputError (on both sides) for rows that do not fit."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, peer, group)
    if not 0 < int(size) <= _MAX_HEADER:
        raise InputError(f"peer {peer}: a header of {int(size)} bytes: 1 to {_MAX_HEADER} is allowed")
    text = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(text, peer, group)
    header = json.loads(bytes(text.tolist()))
    try:
        layout = check_header(header, pools)
    except InputError:
        dist.send(torch.zeros(1, dtype=torch.int64), peer, group)
        raise
    dist.send(torch.ones(1, dtype=torch.int64), peer, group)
    rows = {}
    for name, kinds in layout.items():
        received = []
        for shape, (_, kind, _) in zip(header["shapes"][name], kinds, strict=True):
            item = getattr(torch, kind).itemsize
            raw = torch.empty((*shape[:-1], shape[-1] * item), dtype=torch.uint8)
            if raw.numel():
                dist.recv(raw, peer, group)
            received.append(raw.view(BITS[item]))
        rows[name] = tuple(received)
    return Snapshot(header["length"], header["digest"], layout, rows)


def check_header(header: dict[str, Any], pools: DSV4Pools) -> Layout:
    """The layout that a header announces; raises InputError where its rows do not fit ``pools``."""
    if sorted(header) != ["convention", "digest", "layout", "length", "shapes"]:
        raise InputError(f"a header of {sorted(header)}: the peer speaks another version of this transfer")
    if header["convention"] != CONVENTION:
        raise InputError(f"state rows of convention {header['convention']!r}: {CONVENTION!r} is needed")
    families = sorted(pools.families())
    if sorted(header["layout"]) != families or sorted(header["shapes"]) != families:
        raise InputError(f"rows of families {sorted(header['layout'])}: {families} are needed")
    layout = {name: [(n, kind, width) for n, kind, width in given] for name, given in header["layout"].items()}
    check_layout(layout, pools)
    spans = describe(pools.config, header["length"])
    for name, kinds in layout.items():
        if header["shapes"][name] != [[n, spans[name].size, width] for n, _, width in kinds]:
            raise InputError(
                f"family {name!r}: rows of shapes {header['shapes'][name]}; "
                f"at length {header['length']} {spans[name].size} of them belong to a request"
            )
    return layout
