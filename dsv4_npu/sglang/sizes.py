"""How many tokens SGLang may use: our budget, which counts what our slabs take."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.model_executor.pool_configurator import DSV4PoolConfigurator, MemoryPoolConfig

from dsv4_npu import addressing, budget
from dsv4_npu.config import CacheConfig
from dsv4_npu.sglang.layout import cache_config, speculation
from dsv4_npu.sglang.verify import verify_applied

logger = logging.getLogger(__name__)


class PoolSizes(DSV4PoolConfigurator):  # type: ignore[misc]
    """Pool sizes of DeepSeek-V4 from bytes or from a number of tokens.

    Every byte is that of the tensors which :class:`~dsv4_npu.sglang.kv_pool.KVPool` allocates: the states of the
    request slots first, draft stages as many as there are, and one C128 page of slack per request slot, without which
    short requests exhaust C128 while most of FULL is free.

    Raises:
        ConfigError: memory that holds no page beside the fixed part; the message says which option to change.
    """

    def __init__(self, kvc: Any) -> None:
        verify_applied()
        super().__init__(kvc)
        self._kv_dtype: torch.dtype = kvc.kv_cache_dtype
        aux = getattr(kvc, "spec_aux_config", None)
        dspark = int(getattr(aux, "dspark_num_stages", None) or 0)
        self._draft_stages = (dspark or 1) if self.is_speculative else 0
        self._window = int(kvc.model_config.window_size)

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        """The largest sizes that fit into ``available_bytes``."""
        slots = self._resolve_max_running_requests_per_worker(available_bytes)
        config = self._config(page_size, slots)
        return self._pool_config(
            config, budget.largest_sizes(config, int(available_bytes), self.swa_ratio, **self._swa(config))
        )

    def calculate_pool_sizes_from_max_tokens(self, max_total_num_tokens: int, page_size: int) -> MemoryPoolConfig:
        """The sizes of a given number of tokens, in whole pages."""
        requested = self.requested_max_running_requests_per_worker
        config = self._config(page_size, requested or 1)
        tokens = max(page_size, max_total_num_tokens // page_size * page_size)
        return self._pool_config(config, budget.sizes_for_tokens(config, tokens, self.swa_ratio, **self._swa(config)))

    def finalize_with_max_running_requests(self, config: MemoryPoolConfig) -> MemoryPoolConfig:
        """Slack and states of the request slots that there will be."""
        config = super().finalize_with_max_running_requests(config)
        assert config.max_running_requests is not None
        unit = self._unit()
        pages = addressing.c128_columns(config.full_max_total_num_tokens, unit)
        slots = self._get_num_req_slots(config.max_running_requests) - 1
        config.c128_max_total_num_tokens = (pages + slots) * unit
        return config

    def _unit(self) -> int:
        from sglang.srt.runtime_context import get_schedule

        return int(get_schedule().c128_page_size)

    def _config(self, page_size: int, max_running: int) -> CacheConfig:
        ratios = list(self.stage_compress_ratios)
        config = cache_config(
            ratios=ratios,
            nope_dim=self.qk_nope_head_dim,
            rope_dim=self.qk_rope_head_dim,
            indexer_dim=self.indexer_head_dim,
            window=self._window,
            page_size=page_size,
            request_rows=self._get_num_req_slots(max_running) - 1,
            dtype=self._kv_dtype,
            rings={ratio: self.ring_sizes[ratio] for ratio in (4, 128) if ratio in self.ring_sizes},
        )
        stages = tuple(ratios) + (0,) * self._draft_stages
        model = replace(config.model, compress_ratios=stages, max_positions=self.context_len)
        return replace(config, model=model, context_len=self.context_len, row_width=None, speculation=speculation())

    def _swa(self, config: CacheConfig) -> dict[str, int]:
        floor = addressing.ceil_to(budget.group_swa_floor(config), config.page)
        if self.swa_cap_tokens is None:
            return {"swa_floor": floor}
        return {"swa_tokens": max(int(self.swa_cap_tokens), floor)}

    def _pool_config(self, config: CacheConfig, sizes: budget.PoolSizes) -> MemoryPoolConfig:
        whole = budget.budget_of(config, sizes)
        full, swa = sizes.full_pages * config.page, sizes.swa_pages * config.page
        logger.info(
            "dsv4_npu pools: %d tokens, %d SWA tokens, %d C128 pages, %d request slots: %.2f GiB",
            full,
            swa,
            sizes.c128_pages,
            sizes.request_rows,
            whole.total_bytes / budget.GIB,
        )
        return MemoryPoolConfig(
            max_total_num_tokens=full,
            full_max_total_num_tokens=full,
            swa_max_total_num_tokens=swa,
            c4_max_total_num_tokens=full // addressing.C4_RATIO,
            c128_max_total_num_tokens=sizes.c128_pages * config.c128_page_size,
            c4_state_pool_size=sizes.swa_pages * config.ring(addressing.C4_RATIO),
            c128_state_pool_size=0,
        )
