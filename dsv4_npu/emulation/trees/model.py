"""Models with plain attention, tiny and seeded, in float64: Hugging Face's Llama, and DeepSeek-V3 with latent rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsv4_npu.emulation.model import check_size, seeded, transformers_module
from dsv4_npu.errors import ConfigError, UnavailableError
from dsv4_npu.pools.full_kv import FullKVPool

#: Two queries share a key-value head; 320 tokens hold the bytes of a text, as the tiny DeepSeek-V4 does.
TINY: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
}
TINY_NAME = "tiny-llama"
#: Multi-head latent attention: a token's memory is one compressed row and one rotary key for all heads.
TINY_LATENT: Mapping[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 8192,
}
#: Models that are built in, by the name that ``--model`` takes.
BUILT_IN: Mapping[str, Mapping[str, Any]] = {TINY_NAME: TINY, "tiny-mla": TINY_LATENT}
#: ``model_type`` -> names of the classes of its configuration and of the model.
_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
}
#: Gain of the attention's output: below 1 the last token says much about the next one, so that a draft head that
#: was never trained guesses some tokens right.
ATTENTION_GAIN = 0.5


def is_plain(raw: Mapping[str, Any]) -> bool:
    """Whether a Hugging Face configuration is of a model with plain attention that is known here."""
    return raw.get("model_type") in _CLASSES


def build_target(raw: Mapping[str, Any], seed: int = 0) -> Any:
    """A randomly initialised causal language model in float64 on the CPU, the same for the same seed.

    Args:
        raw: a Hugging Face configuration with ``model_type`` "llama" or "deepseek_v3", such as :data:`TINY`.

    Raises:
        ConfigError: another model type, values that transformers refuses, or too many parameters.
        UnavailableError: no transformers, or one whose DeepSeek-V3 does not cache latent rows.
    """
    transformers = transformers_module()
    kind = raw.get("model_type")
    if kind not in _CLASSES:
        raise ConfigError(f"model_type = {kind!r}; one of {sorted(_CLASSES)} is needed")
    config_class, model_class = (getattr(transformers, name) for name in _CLASSES[kind])
    latent = kind == "deepseek_v3"
    if latent and not hasattr(transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention, "expand_kv"):
        raise UnavailableError(
            f"transformers {transformers.__version__} caches expanded keys for {kind}; 5.24 caches the latent rows: "
            "pip install 'transformers==5.24.0'"
        )
    keep = {k: v for k, v in raw.items() if k not in ("model_type", "architectures", "torch_dtype", "dtype", "name")}
    try:
        config = config_class(**keep, attn_implementation="eager")
        with torch.device("meta"):
            count = sum(p.numel() for p in model_class(config).parameters())
    except Exception as error:
        # transformers checks its configuration with exception types of several packages.
        raise ConfigError(f"transformers refuses the {kind} configuration: {error}") from error
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if heads % shared:
        raise ConfigError(f"num_key_value_heads = {shared}; a divisor of num_attention_heads = {heads} is needed")
    check_size(count, "the model", TINY_NAME)
    return seeded(
        seed,
        lambda: model_class(config),
        lambda model: _randomise(model, torch.Generator().manual_seed(seed)),
    )


@torch.no_grad()
def _randomise(model: Any, gen: torch.Generator) -> None:
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=gen, dtype=torch.float64)
        if value.dim() == 1:
            value.copy_(1.0 + 0.1 * noise)
        elif name.endswith("embed_tokens.weight"):
            value.copy_(noise)
        else:
            gain = ATTENTION_GAIN if name.endswith("o_proj.weight") else 1.0
            value.copy_(noise * gain * value.shape[-1] ** -0.5)


def pool_for(config: Any, pages: int, page: int) -> FullKVPool:
    """The full-KV pool, float64, of a model with this Hugging Face configuration."""
    layers = config.num_hidden_layers
    if getattr(config, "kv_lora_rank", None):
        return FullKVPool.latent(
            layers, pages, page, config.kv_lora_rank + config.qk_rope_head_dim, dtype=torch.float64
        )
    return FullKVPool(
        layers,
        pages,
        page,
        heads=config.num_key_value_heads,
        key_dim=config.head_dim,
        value_dim=config.head_dim,
        dtype=torch.float64,
    )
