"""A request's memory that leaves and comes back: what belongs to it, host snapshots, transfer to a peer."""

from dsv4_npu.movement.belongings import Span, describe, locate
from dsv4_npu.movement.buffers import BufferInfo, buffer_infos
from dsv4_npu.movement.host_store import HostStore
from dsv4_npu.movement.payload import PayloadLists, check_paired, payload_lists
from dsv4_npu.movement.peer import receive_snapshot, send_snapshot
from dsv4_npu.movement.rows import Layout, clear_freed_banks, layout_of, read_rows, write_rows
from dsv4_npu.movement.snapshot import Snapshot, restore_snapshot, take_snapshot

__all__ = [
    "BufferInfo",
    "HostStore",
    "Layout",
    "PayloadLists",
    "Snapshot",
    "Span",
    "buffer_infos",
    "check_paired",
    "clear_freed_banks",
    "describe",
    "layout_of",
    "locate",
    "payload_lists",
    "read_rows",
    "receive_snapshot",
    "restore_snapshot",
    "send_snapshot",
    "take_snapshot",
    "write_rows",
]
