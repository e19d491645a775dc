"""From the arguments that SGLang gives its KV pool to our configuration and sizes."""

from __future__ import annotations

import torch
from sglang.srt.hardware_backend.npu.utils import is_npu_arch35
from sglang.srt.runtime_context import get_schedule, get_spec

from dsv4_npu.budget import PoolSizes
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec
from dsv4_npu.errors import ConfigError

#: Row formats by the dtype that SGLang asks for; None: the platform's own.
ROWS: dict[torch.dtype, str | None] = {torch.bfloat16: None, torch.float32: "fp32", torch.float64: "fp64"}


def cache_config(
    *,
    ratios: list[int],
    nope_dim: int,
    rope_dim: int,
    indexer_dim: int,
    window: int,
    page_size: int,
    request_rows: int,
    dtype: torch.dtype,
    rings: dict[int, int],
) -> CacheConfig:
    """The configuration of one pipeline stage's pools. ``rings`` are checked against the speculation settings.

    Raises:
        ConfigError: a dtype, ratio, ring or C128 page size that has no counterpart here.
    """
    if dtype not in ROWS:
        raise ConfigError(f"kv cache dtype = {dtype}; one of {[str(one) for one in ROWS]} is needed")
    platform = PlatformSpec.load("a5" if is_npu_arch35() else "a3")
    model = ModelSpec(
        name="sglang",
        num_layers=len(ratios),
        hidden_size=nope_dim + rope_dim,
        num_heads=1,
        head_dim=nope_dim + rope_dim,
        rope_dim=rope_dim,
        indexer_dim=indexer_dim,
        indexer_topk=1,
        sliding_window=window,
        vocab_size=1,
        max_positions=page_size,
        compress_ratios=tuple(ratios),
    )
    config = CacheConfig(
        model,
        platform,
        speculation(),
        page_size=page_size,
        c128_page_size=get_schedule().c128_page_size,
        context_len=page_size,
        request_rows=request_rows,
        kv_row=ROWS[dtype],
        indexer_row=ROWS[dtype],
    )
    for ratio, ring in rings.items():
        if ring != config.ring(ratio):
            raise ConfigError(f"ring of ratio {ratio} = {ring}; {config.ring(ratio)} is needed with {speculation()}")
    return config


def speculation() -> SpeculationSpec:
    """SGLang's speculative settings: a chain of D - 1 drafts, whatever proposes them."""
    spec = get_spec()
    if spec.speculative_algorithm is None or not spec.speculative_num_draft_tokens:
        return SpeculationSpec()
    kind = "dspark" if str(spec.speculative_algorithm).upper().endswith("DSPARK") else "chain"
    return SpeculationSpec("dspark" if kind == "dspark" else "chain", spec.speculative_num_draft_tokens - 1)


def pool_sizes(config: CacheConfig, full_tokens: int, swa_tokens: int, c128_entries: int) -> PoolSizes:
    """Usable pages of SGLang's sizes. A draft worker's pool has no compressed layers and passes zeros for them."""
    return PoolSizes(
        full_pages=max(1, full_tokens // config.page),
        swa_pages=max(1, swa_tokens // config.page),
        c128_pages=max(1, c128_entries // config.c128_page_size),
        request_rows=config.request_rows,
    )
