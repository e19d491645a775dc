"""Pool sizes from bytes and from tokens: exactly what the pool then takes, with slack for short requests."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from sglang.srt.model_executor import pool_configurator
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from dsv4_npu.errors import ConfigError
from dsv4_npu.sglang.sizes import PoolSizes
from tests.sglang.sides import PAGE, UNIT, Side, prepare

pytestmark = pytest.mark.filterwarnings("ignore")
RATIOS = [0, 4, 128, 4, 128]


def configurator(rows: int = 4, spec: str | None = None, **settings: Any) -> Any:
    prepare()
    get_context().override_server_args(
        page_size=PAGE,
        c128_page_size=UNIT,
        device="cpu",
        attention_backend="torch_native",
        max_running_requests=rows,
        chunked_prefill_size=2048,
        **settings,
    ).install()
    model = types.SimpleNamespace(
        qk_nope_head_dim=24,
        qk_rope_head_dim=8,
        index_head_dim=128,
        context_len=8192,
        window_size=128,
        compress_ratios=RATIOS,
        hf_config=types.SimpleNamespace(kv_source_layer_ids=[], architectures=["DeepseekV4ForCausalLM"]),
    )
    kvc = types.SimpleNamespace(
        kv_cache_dtype_str="bfloat16",
        kv_cache_dtype=torch.bfloat16,
        model_config=model,
        layer_info=types.SimpleNamespace(start_layer=0, end_layer=len(RATIOS)),
        pp_size=1,
        spec_algorithm=SpeculativeAlgorithm.from_string(spec),
        spec_aux_config=types.SimpleNamespace(dspark_num_stages=None),
        sliding_window_size=128,
        page_size=PAGE,
        attn_dp_size=1,
        is_hybrid_swa=True,
    )
    return pool_configurator.create_memory_pool_configurator(kvc)


def pool_bytes(config: Any, rows: int) -> int:
    """Bytes of the tensors of a pool with these sizes."""
    side = Side(
        True,
        full_pages=config.full_max_total_num_tokens // PAGE,
        swa_pages=config.swa_max_total_num_tokens // PAGE,
        c128_pages=config.c128_max_total_num_tokens // UNIT,
        rows=rows,
        ratios=tuple(RATIOS),
    )
    return int(side.pool.slabs.usage_bytes())


def test_sglang_asks_our_class() -> None:
    assert type(configurator()) is PoolSizes


def test_the_largest_sizes_fit_and_a_page_more_would_not() -> None:
    for available in (20 << 20, 33_333_333):
        config = configurator().calculate_pool_sizes(available, PAGE)
        config.max_running_requests = 4
        tables = 4 * (5 * (64 + 4) + config.full_max_total_num_tokens // PAGE + 1)
        taken = pool_bytes(config, 4) + tables
        assert taken <= available
        assert config.c4_max_total_num_tokens == config.full_max_total_num_tokens // 4
        more = configurator().calculate_pool_sizes_from_max_tokens(config.full_max_total_num_tokens + PAGE, PAGE)
        assert pool_bytes(more, 4) + tables + 4 > available


def test_short_requests_have_their_c128_page() -> None:
    config = configurator(rows=12).calculate_pool_sizes_from_max_tokens(16384, PAGE)
    config.max_running_requests = 12
    config = configurator(rows=12).finalize_with_max_running_requests(config)
    assert config.c128_max_total_num_tokens == (16384 // 2048 + 12) * UNIT
    assert config.swa_max_total_num_tokens >= 2048 + 128
    theirs = pool_configurator.DSV4PoolConfigurator.__mro__[1]
    assert theirs.__name__ == "DSV4PoolConfigurator"
    assert theirs is not PoolSizes


def test_memory_that_holds_nothing_is_refused_with_what_to_change() -> None:
    with pytest.raises(ConfigError, match="--max-running"):
        configurator().calculate_pool_sizes(1 << 19, PAGE)


def test_an_explicit_ratio_is_raised_to_one_group() -> None:
    config = configurator(swa_full_tokens_ratio=0.01).calculate_pool_sizes_from_max_tokens(65536, PAGE)
    assert config.swa_max_total_num_tokens >= 2048
