"""SGLang's DSV4 NPU allocator on our page ledger: every decision from host numbers, every slot computed on the device.

SGLang names pages by slots in its own request table and prefix tree. The ledger
(:class:`~dsv4_npu.alloc.slot_pages.SlotPages`) knows which pages are out and who counts in a C128 page; which request
or tree node holds a FULL page is SGLang's knowledge. An allocation takes pages of all families or of none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.hardware_backend.npu.dsv4.dsv4_allocator import DSV4NPUTokenToKVPoolAllocator

from dsv4_npu import addressing
from dsv4_npu.alloc.slot_pages import SlotPages
from dsv4_npu.alloc.state import C128, FULL, SWA
from dsv4_npu.errors import CapacityError, InputError, OwnershipError
from dsv4_npu.sglang.bundle import OutCacheLoc
from dsv4_npu.sglang.capacity import Capacity
from dsv4_npu.sglang.families import Family
from dsv4_npu.sglang.late_reads import LateReads, host_ids, to_device
from dsv4_npu.sglang.releases import Releases
from dsv4_npu.sglang.shadow_audit import ShadowAudit, configured_every
from dsv4_npu.sglang.slots import Growth, page_tables, runs_of, slots_of
from dsv4_npu.sglang.verify import verify_applied

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
C128Holder = Callable[[], I64]
#: Tokens of a C128 entry, and the shift from a FULL slot to its C4 slot.
RATIO, C4_SHIFT = addressing.C128_RATIO, addressing.C4_RATIO.bit_length() - 1
_NONE, _NO_PAGES = np.zeros(0, np.int64), np.zeros(0, np.int32)


class KVAllocator(Releases, Capacity, DSV4NPUTokenToKVPoolAllocator):  # type: ignore[misc]
    """FULL, SWA and C128 pages of one model, with SGLang's signatures.

    Arguments are those of SGLang's class. ``full_to_swa_index_mapping`` (int64, one entry per FULL slot, then -1) is
    the device's copy of the mapping, written where a page gets or loses its SWA page.

    Raises:
        UnavailableError: SGLang would go on to use parts of its own beside this class.
        OwnershipError: of any call, for pages that are not what the caller says; nothing is changed then. On a device
            ids of freed pages arrive late, and it is a later call that raises.
    """

    def __init__(
        self, size: int, size_swa: int, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool
    ) -> None:
        verify_applied()
        self._size_full, self._size_swa = size, size_swa
        self.page_size, self.dtype, self.device, self.need_sort = page_size, dtype, device, need_sort
        self._kvcache = kvcache
        self._req_to_token_pool = None
        self._swa_ring_cost = 0
        self.free_pages = self.release_pages = None
        self.free_group: list[torch.Tensor] | None = None
        self.swa_free_group: list[torch.Tensor] = []
        self.swa_page_ids_group: list[torch.Tensor] = []
        self._at = torch.device(device)
        self._on_host = self._at.type == "cpu"
        self._no_entry = torch.empty(0, dtype=torch.int32, device=device)
        self._no_slot = self._typed(torch.empty(0, dtype=torch.int64, device=device))
        unit = kvcache.c128_page_size
        entries = kvcache.c128_size
        self.pages = SlotPages(page_size, unit, size // page_size, size_swa // page_size, max(1, entries // unit))
        self.full_attn_allocator = Family(self, FULL, size, page_size, None)
        self.swa_attn_allocator = Family(self, SWA, size_swa, page_size, kvcache.swa_kv_pool)
        self.c128_attn_allocator = Family(self, C128, entries, unit, kvcache.c128_kv_pool)
        self.full_to_swa_index_mapping = torch.zeros(size + page_size + 1, dtype=torch.int64, device=device)
        self.full_to_swa_index_mapping[-1] = -1
        self._mapping = self.full_to_swa_index_mapping[: (size // page_size + 1) * page_size].view(-1, page_size)
        self._offsets = torch.arange(page_size, dtype=torch.int64, device=device)
        if self._on_host:
            self._host_mapping, self._host_offsets = self._mapping.numpy(), self._offsets.numpy()
        self._late = LateReads(device)
        self._promised = [0, 0, 0]
        self._uncounted = 0
        self._unwritten: I32 | None = None
        self._holders: list[C128Holder] = []
        self._table: Any = None
        kvcache.register_mapping(self.full_to_swa_index_mapping)
        self._shadow = ShadowAudit(self._census, configured_every())

    @property
    def c128_page_refcount(self) -> torch.Tensor:
        """Holders of each C128 page, int32, on the host."""
        return torch.from_numpy(self.pages.state.c128_count)

    def register_request_pool(self, pool: Any) -> None:
        """The request pool whose sidecar rows hold C128 pages; it calls this when it gets its allocator."""
        self._table = pool
        self._kvcache.register_sidecar(pool.sidecar)

    def register_c128_holder(self, holder: C128Holder) -> None:
        """A holder of C128 pages beside the request rows; the call lists its pages as a multiset."""
        self._holders.append(holder)

    def free_tokens(self, family: int) -> int:
        """Slots of a family that are free, or will be once the ids of freed pages arrive."""
        if self._uncounted:
            self.settle()
        state = self.pages.state
        unit = state.spec.c128_page_size if family == C128 else self.page_size
        return (state.free(family) + self._promised[family]) * unit

    def take(self, full: int, swa: int, c128: int) -> tuple[I32, I32, I32]:
        """Pages of the three families, all or none (CapacityError)."""
        state = self.pages.state
        if len(self._late) and any(need > state.free(family) for family, need in enumerate((full, swa, c128))):
            self.settle()
        return self.pages.take(full, swa, c128)

    def alloc(self, need_size: int) -> None:
        """Slots without a request are for pools of page size 1."""
        raise InputError(
            f"alloc({need_size}): pages of {self.page_size} are given out by alloc_extend and alloc_decode"
        )

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        *,
        req_pool_indices: torch.Tensor | None = None,
        req_to_token_pool: Any = None,
    ) -> OutCacheLoc | None:
        """Slots of positions ``[prefix, seq)`` of each request; None, and nothing taken, when a family is short.

        Lengths int64 ``[bs]``; ``last_loc`` is the FULL slot of position ``prefix - 1`` (-1 without one).
        """
        return self._extend(prefix_lens_cpu, seq_lens_cpu, last_loc, req_pool_indices, req_to_token_pool, None)

    def alloc_extend_swa_tail(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        swa_tail_len: int,
        *,
        req_pool_indices: torch.Tensor | None = None,
        req_to_token_pool: Any = None,
    ) -> OutCacheLoc | None:
        """:meth:`alloc_extend` of one request, with SWA pages only where the last ``swa_tail_len`` positions lie."""
        if len(seq_lens_cpu) != 1 or not 0 <= swa_tail_len <= extend_num_tokens:
            raise InputError(
                f"swa_tail_len = {swa_tail_len} for {len(seq_lens_cpu)} requests; "
                f"one request and 0 to {extend_num_tokens} is allowed"
            )
        return self._extend(prefix_lens_cpu, seq_lens_cpu, last_loc, req_pool_indices, req_to_token_pool, swa_tail_len)

    def _extend(
        self,
        prefix: torch.Tensor,
        seq: torch.Tensor,
        last_loc: torch.Tensor,
        rows: torch.Tensor | None,
        table: Any,
        swa_tail: int | None,
    ) -> OutCacheLoc | None:
        self._shadow.step()
        old, new = prefix.numpy(), seq.numpy()
        growth = Growth.of(old, new, self.page_size)
        entries = Growth.of(old // RATIO, new // RATIO, self.pages.spec.c128_page_size)
        full_count = growth.total
        swa_count = full_count
        if swa_tail is not None:
            first = (int(new[0]) - swa_tail) // self.page_size if swa_tail else int(new[0])
            swa_count = min(full_count, max(0, addressing.pages_for(int(new[0]), self.page_size) - first))
        taken = self._begin(full_count, swa_count, entries.total)
        if taken is None:
            return None
        full, swa, c128 = taken
        self._map(full[full_count - swa_count :], swa)
        if self._on_host:
            runs = runs_of(growth, full, last_loc.numpy())
            out_full, out_c4 = runs.slots(), runs.every(addressing.C4_RATIO).slots()
        else:
            tables = page_tables(growth, full, last_loc // self.page_size, self._at)
            out_full, out_c4 = slots_of(growth, tables), slots_of(growth, tables, addressing.C4_RATIO)
        return OutCacheLoc(
            self._typed(out_full),
            self._typed(self.full_to_swa_index_mapping.index_select(0, out_full)),
            self._typed(out_c4),
            self._c128_slots(entries, c128, rows, table),
            c128,
        )

    def alloc_decode(
        self,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        *,
        req_pool_indices: torch.Tensor | None = None,
        req_to_token_pool: Any = None,
    ) -> OutCacheLoc | None:
        """The slot of position ``seq - 1`` of each request; None, and nothing taken, when a family is short."""
        self._shadow.step()
        new = seq_lens_cpu.numpy()
        places = new & (RATIO - 1)
        fresh, closing, entries, c128 = _NONE, _NONE, _NONE, _NO_PAGES
        opening = 0
        if len(new) and places.min() < 2:
            fresh = np.flatnonzero(new % self.page_size == 1)
            closing = np.flatnonzero(places == 0)
            entries = new[closing] // RATIO - 1
            opening = int(np.count_nonzero(entries % self.pages.spec.c128_page_size == 0))
        out_full = (last_loc if last_loc.dtype == torch.int64 else last_loc.to(torch.int64)) + 1
        if len(fresh) or opening:
            taken = self._begin(len(fresh), len(fresh), opening)
            if taken is None:
                return None
            full, swa, c128 = taken
            if len(fresh):
                self._map(full, swa)
                starts = to_device(full * np.int64(self.page_size), self._at)
                whole = len(fresh) == len(new)
                out_full = starts if whole else out_full.index_copy_(0, to_device(fresh, self._at), starts)
        out_c128 = self._no_entry
        if len(closing):
            out_c128 = self._closed_entries(entries, closing, c128, req_pool_indices, req_to_token_pool)
        out_swa = self.full_to_swa_index_mapping.index_select(0, out_full)
        inside = places & (addressing.C4_RATIO - 1)
        open_windows = np.count_nonzero(inside)
        if open_windows == len(new):
            out_c4 = self._no_slot
        elif not open_windows:
            out_c4 = self._c4_slots(out_full)
        else:
            windows = to_device(np.flatnonzero(inside == 0), self._at)
            out_c4 = self._c4_slots(out_full.index_select(0, windows))
        if not self._on_host:
            out_full, out_swa, out_c4 = self._typed(out_full), self._typed(out_swa), self._typed(out_c4)
        return OutCacheLoc(out_full, out_swa, out_c4, out_c128, c128)

    def give_back(self, bundle: OutCacheLoc) -> None:
        """Undo the C128 part of an allocation whose table write never came."""
        if bundle.given is not None and self._unwritten is bundle.given:
            self.pages.give_back_c128(bundle.given)
            self._unwritten = None

    def written(self, given: I32) -> None:
        """The table write of an allocation was done: its C128 pages have their holders."""
        if self._unwritten is given:
            self._unwritten = None

    def retain_c128_pages(self, page_ids: torch.Tensor) -> None:
        """Count one holder for each entry of a multiset of pages."""
        self.pages.retain_c128(host_ids(page_ids))

    def release_c128_pages(self, page_ids: torch.Tensor) -> None:
        """Take one holder off for each entry of a multiset of pages."""
        self.pages.release_c128(host_ids(page_ids))

    def replace_req_c128_prefix(self, req_pool_idx: int, page_ids: torch.Tensor, req_to_token_pool: Any) -> None:
        """Replace the leading sidecar columns of a request: new pages are counted before old ones are released."""
        req_to_token_pool.replace_prefix(int(req_pool_idx), host_ids(page_ids))

    def resize(self, config: Any) -> None:
        """Begin anew with smaller or equal sizes: the tensors stay as they were built."""
        sizes = {
            "full": (int(config.full_max_total_num_tokens), self._mapping.numel() - self.page_size),
            "swa": (int(config.swa_max_total_num_tokens), self._kvcache.swa_size),
            "c128": (int(config.c128_max_total_num_tokens), self._kvcache.c128_size),
        }
        for name, (wanted, built) in sizes.items():
            if not 0 < wanted <= built:
                raise InputError(f"resize: {name} = {wanted} slots; 1 to {built}, what the pool was built with")
        full, swa, c128 = (wanted for wanted, _ in sizes.values())
        unit = self.pages.spec.c128_page_size
        self._size_full, self._size_swa = full, swa
        for family, size in ((self.full_attn_allocator, full), (self.swa_attn_allocator, swa)):
            family.size, family.num_pages = size, size // self.page_size
        self.c128_attn_allocator.size, self.c128_attn_allocator.num_pages = c128, c128 // unit
        self.clear()

    def clear(self) -> None:
        """Every page is free again and every row of the sidecar empty."""
        self._late = LateReads(self.device)
        self._promised, self._uncounted, self._unwritten = [0, 0, 0], 0, None
        unit = self.pages.spec.c128_page_size
        self.pages.resize(
            self._size_full // self.page_size,
            self._size_swa // self.page_size,
            max(1, self.c128_attn_allocator.size // unit),
        )
        self.full_to_swa_index_mapping[:-1].fill_(0)
        self.free_group = None
        if self._table is not None:
            self._table.reset_rows()

    def verify_byte_accounting(self) -> list[str]:
        """What is wrong with the pages of all three families, C128's holders included; empty when nothing is."""
        self.settle()
        return self._census()

    def _census(self) -> list[str]:
        held = [holder() for holder in self._holders]
        if self._table is not None:
            held.append(self._table.sidecar.held())
        return self.pages.census(np.concatenate([np.zeros(0, np.int64), *held]))

    def _begin(self, full: int, swa: int, c128: int) -> tuple[I32, I32, I32] | None:
        if self._unwritten is not None:
            raise OwnershipError(
                f"C128 pages {self._unwritten.tolist()} of the last allocation were written to no request row: "
                f"maybe_write_dsv4_extend or maybe_write_dsv4_decode must follow each allocation"
            )
        try:
            taken = self.take(full, swa, c128)
        except CapacityError:
            return None
        if c128:
            self._unwritten = taken[2]
        return taken

    def _map(self, full: I32, swa: I32) -> None:
        if not len(full):
            return
        if self._on_host:
            self._host_mapping[full] = swa[:, None] * np.int64(self.page_size) + self._host_offsets
        else:
            ids = to_device(np.stack((full, swa)).astype(np.int64), self._at)
            self._mapping.index_copy_(0, ids[0], ids[1][:, None] * self.page_size + self._offsets)

    def _c128_slots(self, growth: Growth, pages: I32, rows: torch.Tensor | None, table: Any) -> torch.Tensor:
        if not (growth.new > growth.old).any():
            return self._no_entry
        filled = growth.old % growth.page > 0
        last = None
        if filled.any():
            if rows is None or table is None:
                raise InputError("req_pool_indices and req_to_token_pool are needed: a C128 page is partly filled")
            columns = np.maximum(growth.old - 1, 0) // growth.page
            if self._on_host:
                last = table.sidecar.table[rows.numpy(), columns]
            else:
                last = table.req_to_c128_sidecar[rows, to_device(columns, self._at)]
        if self._on_host:
            before = growth.old - 1 if last is None else last * growth.page + (growth.old - 1) % growth.page
            return runs_of(growth, pages, before).slots().to(torch.int32)
        return slots_of(growth, page_tables(growth, pages, last, self._at)).to(torch.int32)

    def _closed_entries(
        self, entries: I64, closing: I64, opened: I32, rows: torch.Tensor | None, table: Any
    ) -> torch.Tensor:
        """C128 slots of one entry of each request in ``closing``: on the pages ``opened`` now, or on the row's page."""
        page = self.pages.spec.c128_page_size
        columns, offsets = entries // page, entries % page
        if len(opened) == len(entries):
            return to_device(opened * np.int32(page), self._at)
        if rows is None or table is None:
            raise InputError("req_pool_indices and req_to_token_pool are needed: a C128 page is partly filled")
        fresh = offsets == 0
        if self._on_host:
            held = table.sidecar.table[rows.numpy()[closing], columns]
            held[fresh] = opened
            return torch.from_numpy(held * page + offsets.astype(np.int32))
        sent = to_device(np.stack((closing, columns, offsets)), self._at)
        pages = table.req_to_c128_sidecar[rows.index_select(0, sent[0]), sent[1]]
        if len(opened):
            pages.index_copy_(0, to_device(np.flatnonzero(fresh), self._at), to_device(opened, self._at))
        slots: torch.Tensor = pages * page + sent[2]
        return slots.to(torch.int32)

    def _c4_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """C4 slots of FULL slots; the shift is the quicker one on a CPU."""
        return slots >> C4_SHIFT if self._on_host else slots // addressing.C4_RATIO

    def _typed(self, slots: torch.Tensor) -> torch.Tensor:
        return slots.to(torch.int32) if self._at.type == "npu" else slots
