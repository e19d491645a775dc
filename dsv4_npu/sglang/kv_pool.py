"""SGLang's DSV4 NPU KV pool with our slabs as its storage.

SGLang reads per-layer tensors of sub-pools (``swa_kv_pool.kv_buffer[layer]``, ``compress_state_pools[layer]``, ...).
Each of them is a view of one slab of :class:`~dsv4_npu.pools.DSV4Pools`, so that a clear of all layers is one launch
and a copy of all layers one gather, while everything that SGLang inherits goes on working on the views.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.hardware_backend.npu.dsv4.dsv4_memory_pool import (
    DSV4NPUTokenToKVPool,
    NPUCompressStatePool,
    NPUDeepSeekV4IndexerPool,
    NPUDeepSeekV4SingleKVPool,
)
from sglang.srt.mem_cache.deepseek_v4_compress_state import KVAndScore

from dsv4_npu import addressing, movement, ops
from dsv4_npu.alloc.sidecar_rows import SidecarRows
from dsv4_npu.errors import ConfigError, InputError
from dsv4_npu.movement.payload import c128_state_pages
from dsv4_npu.pools import DSV4Pools, RowSlab, StateSlab
from dsv4_npu.sglang.layout import cache_config, pool_sizes
from dsv4_npu.sglang.request_copy import load_request, read_request
from dsv4_npu.sglang.start import before_pools
from dsv4_npu.sglang.verify import verify_applied

BufferInfos = tuple[list[int], list[int], list[int]]


class SlabKVPool(NPUDeepSeekV4SingleKVPool):  # type: ignore[misc]
    """SWA, C4 or C128 rows: ``kv_buffer[layer]`` is ``[pages, page, 1, row]``, a view of the family's slab."""

    def __init__(self, slab: RowSlab, *args: Any, **kwargs: Any) -> None:
        self._slab = slab
        super().__init__(*args, **kwargs)

    def _create_buffers(self) -> None:
        data = self._slab.data
        self.kv_buffer: list[torch.Tensor] = [data[layer] for layer in range(self._slab.layers)]
        self.kv_cache_total_dim = data.shape[-1]
        self.bytes_per_page_padded = self._slab.page * data.shape[-1] * data.element_size()

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Rows of a layer as they are stored."""
        found: torch.Tensor = self.kv_buffer[layer_id - self.start_layer]
        return found


class SlabStatePool(NPUCompressStatePool):  # type: ignore[misc]
    """Compressor states of one layer: ``kv_score_buffer.kv_score`` is ``[rows, kv | score]``, a view of the slab."""

    def __init__(self, slab: StateSlab, layer: int, **kwargs: Any) -> None:
        self._slab, self._layer = slab, layer
        super().__init__(size=slab.banks * slab.ring, ring_size=slab.ring, ratio=slab.ratio, **kwargs)
        assert self._size == slab.rows
        self.dummy_state_loc = slab.dummy

    def _alloc_kv_score_buffer(self, **_: Any) -> None:
        self.memory_saver_adapter = None
        self.custom_mem_pool = None
        self.kv_score_buffer = KVAndScore(self._slab.data[self._layer])


class SlabIndexerPool(NPUDeepSeekV4IndexerPool):  # type: ignore[misc]
    """Indexer keys and scales, stored once: the packed CUDA buffer beside them is not allocated."""

    def __init__(self, slab: RowSlab, *args: Any, **kwargs: Any) -> None:
        self._slab = slab
        super().__init__(*args, **kwargs)

    def _create_buffer(self) -> None:
        slab = self._slab
        self.index_k_buffer = [slab.data[layer] for layer in range(slab.layers)]
        scale = slab.scale
        self.index_scale_buffer = [] if scale is None else [scale[layer] for layer in range(slab.layers)]
        self.index_k_with_scale_buffer = None


class KVPool(DSV4NPUTokenToKVPool):  # type: ignore[misc]
    """All key-value memory of a DeepSeek-V4 model on one device, as SGLang's scheduler and backends expect it.

    Arguments are those of SGLang's class (sizes in tokens or entries). ``slabs`` holds the storage.

    Raises:
        UnavailableError: SGLang would go on to use parts of its own beside this class.
        ConfigError: a layout that has no counterpart here, or an SWA pool that cannot hold one C128 group.
    """

    def __init__(
        self,
        *,
        swa_size: int,
        c4_size: int,
        c128_size: int,
        page_size: int,
        swa_page_size: int,
        compression_ratios: list[int],
        device: str,
        max_num_reqs: int,
        num_req_slots: int | None = None,
        start_layer: int | None = None,
        end_layer: int | None = None,
        enable_hisparse: bool = False,
        full_size: int | None = None,
        c4_state_dtype: torch.dtype = torch.float32,
        **rest: Any,
    ) -> None:
        verify_applied()
        if enable_hisparse:
            raise ConfigError("enable_hisparse = True; False is needed: HiSparse has no pool on an NPU")
        if swa_page_size != page_size:
            raise ConfigError(f"swa_page_size = {swa_page_size}; page_size = {page_size} is needed on an NPU")
        ratios = list(compression_ratios)
        if start_layer is not None and end_layer is not None and end_layer <= len(ratios):
            ratios = ratios[start_layer:end_layer]
        slots = num_req_slots if num_req_slots is not None else max_num_reqs + 1
        config = cache_config(
            ratios=ratios,
            nope_dim=rest["qk_nope_head_dim"],
            rope_dim=rest["qk_rope_head_dim"],
            indexer_dim=rest["indexer_head_dim"],
            window=rest.get("sliding_window", 128),
            page_size=page_size,
            request_rows=slots - 1,
            dtype=rest["dtype"],
            rings={ratio: self.get_ring_size(ratio) for ratio in (4, 128)},
        )
        tokens = full_size if full_size is not None else c4_size * 4
        if any(ratios):
            before_pools(device, swa_size, tokens, config.c128_page_size)
        self.config = config
        self.slabs = DSV4Pools(
            config, pool_sizes(config, tokens, swa_size, c128_size), device=device, state_dtype=c4_state_dtype
        )
        self._sidecar: SidecarRows | None = None
        self._row_ids = torch.arange(slots, device=device)
        super().__init__(
            max_num_reqs=max_num_reqs,
            num_req_slots=num_req_slots,
            swa_size=swa_size,
            c4_size=c4_size,
            c128_size=c128_size,
            page_size=page_size,
            swa_page_size=swa_page_size,
            compression_ratios=compression_ratios,
            device=device,
            start_layer=start_layer,
            end_layer=end_layer,
            enable_hisparse=False,
            full_size=full_size,
            c4_state_dtype=c4_state_dtype,
            **rest,
        )
        self.mem_usage = self.slabs.usage_bytes() / (1 << 30)

    def _make_kv_pool(self, *, page_size: int, global_page_size: int, **kwargs: Any) -> SlabKVPool:
        slabs = {global_page_size: self.slabs.swa, global_page_size // 4: self.slabs.c4}
        slab = slabs.get(page_size, self.slabs.c128)
        return SlabKVPool(
            slab,
            kwargs["size"],
            page_size,
            kwargs["dtype"],
            self.qk_nope_head_dim,
            self.qk_rope_head_dim,
            kwargs["layer_num"],
            kwargs["device"],
            False,
            kernel_page_size=slab.page,
        )

    def _make_indexer_pool(self, size: int, page_size: int, *args: Any, **kwargs: Any) -> SlabIndexerPool:
        kwargs.pop("enable_memory_saver", None)
        return SlabIndexerPool(
            self.slabs.index,
            size,
            page_size,
            *args[:4],
            enable_memory_saver=False,
            kernel_page_size=page_size,
            **kwargs,
        )

    def _init_paged_compress_states(self, enable_memory_saver: bool) -> None:
        total = len(self.compression_ratios)
        self.compress_state_pools: list[SlabStatePool | None] = [None] * total
        self.indexer_compress_state_pools: list[SlabStatePool | None] = [None] * total

        def pool(slab: StateSlab, layer: int, head_dim: int) -> SlabStatePool:
            return SlabStatePool(
                slab,
                layer,
                overlap=slab.ratio == addressing.C4_RATIO,
                head_dim=head_dim,
                dtype=torch.float32,
                device=self.device,
                enable_memory_saver=False,
                request_scoped=slab.ratio == addressing.C128_RATIO,
                swa_page_size=self.swa_page_size,
            )

        head = self.qk_nope_head_dim + self.qk_rope_head_dim
        for local, layer in enumerate(range(self._stage_start, self._stage_end)):
            if local in self.slabs.c4_index:
                at = self.slabs.c4_index[local]
                self.compress_state_pools[layer] = pool(self.slabs.c4_state, at, head)
                self.indexer_compress_state_pools[layer] = pool(self.slabs.index_state, at, self.indexer_head_dim)
            elif local in self.slabs.c128_index:
                self.compress_state_pools[layer] = pool(self.slabs.c128_state, self.slabs.c128_index[local], head)

    def register_sidecar(self, sidecar: SidecarRows) -> None:
        """The request rows that name C128 pages; host copies of a request find its entries there."""
        self._sidecar = sidecar

    def clear_unaccepted_c128_draft_states(
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        accept_lens: torch.Tensor,
        num_draft_tokens: int,
    ) -> None:
        """Empty the C128 rows of rejected drafts in every layer with one launch (``seq_lens`` before the verify)."""
        if num_draft_tokens <= 1 or req_pool_indices.numel() == 0 or not self.slabs.c128_state.layers:
            return
        ops.clear_c128_draft_states_(
            self.slabs.c128_state.data,
            req_pool_indices,
            seq_lens,
            accept_lens,
            self.slabs.c128_state.ring,
            num_draft_tokens,
        )

    def clear_request_scoped_state(self, req_pool_idx: int) -> None:
        """Empty the request's banks: C128 everywhere, C4 (attention and indexer) where requests own it (A5)."""
        slabs = [self.slabs.c128_state]
        if not self.slabs.c4_state_by_page:
            slabs += [self.slabs.c4_state, self.slabs.index_state]
        row = self._row_ids[req_pool_idx : req_pool_idx + 1]
        for slab in slabs:
            if slab.layers:
                ops.clear_request_states_(slab.data, row, slab.ring)

    def request_state_transfer_indices(self, req_pool_idx: int, seq_len: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Pages of 128 C128 state rows that a transfer of the request at ``seq_len`` sends: one, or none."""
        span = movement.describe(self.config, seq_len)["c128 state"]
        positions = np.arange(span.start, span.stop)
        rows = addressing.request_state_rows(np.full_like(positions, req_pool_idx), positions, self.config.ring(128))
        return c128_state_pages(rows).astype(np.int32)

    def get_contiguous_buf_infos(self) -> BufferInfos:
        """Buffers addressed by FULL page: C4 entries, indexer keys, indexer scales, layer by layer."""
        return self._infos("full")

    def get_state_buf_infos(self) -> BufferInfos:
        """Buffers addressed by SWA page: SWA rows, and C4 states where SWA pages own them (A2/A3)."""
        infos = self._infos("swa")
        if not self.slabs.c4_state_by_page:
            return infos
        ring = self.slabs.c4_state.ring
        pointers, lengths, items = self._infos("c4_state")
        return infos[0] + pointers, infos[1] + lengths, infos[2] + [item * ring for item in items]

    def get_request_state_buf_infos(self) -> BufferInfos:
        """C128 states, in items of 128 rows."""
        return self._infos("c128_state")

    def get_c128_kv_buf_infos(self) -> BufferInfos:
        """Buffers addressed by C128 page."""
        return self._infos("c128")

    def get_c4_state_buf_infos(self) -> BufferInfos:
        """C4 states of attention, then of the indexer, in items of one row."""
        return self._infos("c4_state")

    def _infos(self, name: str) -> BufferInfos:
        info = movement.buffer_infos(self.slabs)[name]
        return info.pointers, info.lengths, info.item_lengths

    def set_swa_buffer(self, layer_id: int, loc: torch.Tensor, cache: torch.Tensor) -> None:
        """Write rows ``[n, D]`` (or ``[n, 1, D]``) at SWA slots."""
        if self._on_npu():
            super().set_swa_buffer(layer_id, loc, cache)
        else:
            self.slabs.swa.write(
                self._swa_local_layer_id(layer_id), loc.view(-1).long(), cache.reshape(loc.numel(), -1)
            )

    def set_compress_buffer(
        self, layer_id: int, loc: torch.Tensor, kv: torch.Tensor, kv_scale: torch.Tensor | None, from_indexer: bool
    ) -> None:
        """Write compressed rows (or, with ``from_indexer``, unquantised indexer keys where no scale is given)."""
        if self._on_npu():
            super().set_compress_buffer(layer_id, loc, kv, kv_scale, from_indexer)
            return
        item = self.layer_mapping[layer_id]
        slab = self.slabs.index if from_indexer else self.slabs.c4 if item.compress_ratio == 4 else self.slabs.c128
        if kv_scale is not None:
            raise InputError("kv_scale is given; None is needed off an NPU: the slab quantises the rows itself")
        slab.write(item.compress_layer_id, loc.view(-1).long(), kv.reshape(loc.numel(), -1))

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: int | None = None
    ) -> dict[str, tuple[torch.Tensor, ...]]:
        """Host copies of all that belongs to a request whose ``len(indices)`` tokens lie at FULL slots ``indices``."""
        return read_request(self, indices, self._row(req_pool_index))

    def load_cpu_copy(
        self,
        kv_cache_cpu: dict[str, tuple[torch.Tensor, ...]],
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: int | None = None,
    ) -> None:
        """Store such copies where the request lies now."""
        load_request(self, kv_cache_cpu, indices, self._row(req_pool_index))

    @property
    def sidecar(self) -> SidecarRows:
        """The registered request rows."""
        if self._sidecar is None:
            raise InputError("no request pool is registered: call its register_dsv4_allocator first")
        return self._sidecar

    def _row(self, req_pool_index: int | None) -> int:
        if req_pool_index is None:
            raise InputError("req_pool_index = None; the request's row is needed: its C128 pages and states hang on it")
        return int(req_pool_index)

    def _on_npu(self) -> bool:
        return torch.device(self.device).type == "npu"
