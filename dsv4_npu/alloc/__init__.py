"""Ownership of KV pages on the host: ledgers, transactions, prefixes, epochs, mirrors, audit. No payload tensors."""

from __future__ import annotations

from dsv4_npu.alloc.allocator import Cleanup, Holder, KVAllocator
from dsv4_npu.alloc.export import RowPages, require_whole
from dsv4_npu.alloc.ledger import compiled_ledger_available, make_ledger
from dsv4_npu.alloc.spec import AllocSpec, FamilyCounts
from dsv4_npu.alloc.state import LedgerState
from dsv4_npu.alloc.transaction import OutCacheLoc, Transaction

__all__ = [
    "AllocSpec",
    "Cleanup",
    "FamilyCounts",
    "Holder",
    "KVAllocator",
    "LedgerState",
    "OutCacheLoc",
    "RowPages",
    "Transaction",
    "compiled_ledger_available",
    "make_ledger",
    "require_whole",
]
