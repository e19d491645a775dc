"""Hugging Face's Llama, tiny and seeded, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsv4_npu.emulation.model import MAX_PARAMETERS, transformers_module
from dsv4_npu.errors import ConfigError

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
#: Gain of the attention's output: below 1 the last token says much about the next one, so that a draft head that
#: was never trained guesses some tokens right.
ATTENTION_GAIN = 0.5


def build_llama(raw: Mapping[str, Any], seed: int = 0) -> Any:
    """A randomly initialised ``LlamaForCausalLM`` in float64 on the CPU, the same for the same seed.

    Args:
        raw: a Hugging Face configuration with ``model_type`` "llama", such as :data:`TINY`.

    Raises:
        ConfigError: another model type, values that transformers refuses, or too many parameters.
    """
    transformers = transformers_module()
    if raw.get("model_type") != "llama":
        raise ConfigError(f"model_type = {raw.get('model_type')!r}; 'llama' is needed")
    keep = {k: v for k, v in raw.items() if k not in ("model_type", "architectures", "torch_dtype", "dtype", "name")}
    try:
        config = transformers.LlamaConfig(**keep, attn_implementation="eager")
        with torch.device("meta"):
            count = sum(p.numel() for p in transformers.LlamaForCausalLM(config).parameters())
    except Exception as error:
        # transformers checks its configuration with exception types of several packages.
        raise ConfigError(f"transformers refuses the Llama configuration: {error}") from error
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if heads % shared:
        raise ConfigError(f"num_key_value_heads = {shared}; a divisor of num_attention_heads = {heads} is needed")
    if count > MAX_PARAMETERS:
        raise ConfigError(
            f"the model has {count:,} parameters; the float64 emulation runs up to {MAX_PARAMETERS:,}: "
            f"use {TINY_NAME} or a config of that size"
        )
    previous = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config).to(torch.float64).eval()
        _randomise(model, torch.Generator().manual_seed(seed))
    finally:
        torch.set_rng_state(previous)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


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
