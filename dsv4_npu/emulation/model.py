"""Hugging Face's DeepSeek-V4, tiny and seeded, in float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from dsv4_npu.config import ModelSpec
from dsv4_npu.errors import ConfigError, UnavailableError

#: Keys of a model dictionary that are not arguments of the Hugging Face configuration.
_OURS = ("name", "dspark_block_size", "model_type", "architectures", "torch_dtype", "quantization_config")
#: Above this many parameters a float64 model on a CPU is not what anybody wants.
MAX_PARAMETERS = 50_000_000


def transformers_module() -> Any:
    """Hugging Face ``transformers`` with DeepSeek-V4; raises UnavailableError that says what to install."""
    try:
        import transformers
        from transformers import DeepseekV4ForCausalLM  # noqa: F401
    except ImportError as error:
        raise UnavailableError(
            "the emulation needs transformers 5.19 to 5.24 with DeepSeek-V4: pip install 'dsv4-npu[emulate]'"
        ) from error
    return transformers


def cache_argument(module: torch.nn.Module) -> str:
    """The name under which ``module.forward`` takes the cache: it changed between transformers releases."""
    return (
        "cache" if "cache" in inspect.signature(inspect.unwrap(type(module).forward)).parameters else "past_key_values"
    )


def build_model(spec: ModelSpec, seed: int = 0) -> Any:
    """A randomly initialised ``DeepseekV4ForCausalLM`` in float64 on the CPU, the same for the same seed.

    Everything that Hugging Face initialises to a constant (position biases, attention sinks, hash routes, norms) is
    randomised too: a model in which these are zero cannot see a wrong ring phase or a wrong route.

    Raises:
        ConfigError: the model is too large for a float64 emulation.
    """
    transformers = transformers_module()
    raw = dict(spec.raw)
    keep = {k: v for k, v in raw.items() if k not in _OURS}
    if raw.get("model_type", "deepseek_v4") != "deepseek_v4":
        raise ConfigError(f"model {spec.name}: model_type = {raw['model_type']!r}; 'deepseek_v4' is needed")
    try:
        config = transformers.DeepseekV4Config(**keep)
    except Exception as error:
        # transformers checks its configuration with exception types of several packages.
        raise ConfigError(f"model {spec.name}: transformers refuses its configuration: {error}") from error
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with torch.device("meta"):
        count = sum(p.numel() for p in transformers.DeepseekV4ForCausalLM(config).parameters())
    check_size(count, f"model {spec.name}", "the tiny model")
    return seeded(
        seed,
        lambda: transformers.DeepseekV4ForCausalLM(config),
        lambda model: randomise(model, torch.Generator().manual_seed(seed)),
    )


def check_size(parameters: int, model: str, smaller: str) -> None:
    """Raises ConfigError for a ``model`` of more than :data:`MAX_PARAMETERS`; ``smaller`` names one that runs."""
    if parameters > MAX_PARAMETERS:
        raise ConfigError(
            f"{model} has {parameters:,} parameters; the float64 emulation runs up to {MAX_PARAMETERS:,}: "
            f"use {smaller} or a config of that size"
        )


def seeded(seed: int, make: Callable[[], Any], fill: Callable[[Any], None]) -> Any:
    """What ``make`` builds, in float64 and frozen, with its parameters set by ``fill``; the same for the same seed.

    Hugging Face initialises from torch's global random state, which is left as it was; ``fill`` brings its own.
    """
    previous = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        module = make().to(torch.float64).eval()
    finally:
        torch.set_rng_state(previous)
    fill(module)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module


@torch.no_grad()
def randomise(model: Any, gen: torch.Generator) -> None:
    """Fill every parameter and route table of a model (with its ``config``) from a generator."""
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=gen, dtype=torch.float64)
        if name.endswith(("norm.weight", "layernorm.weight")):
            value.copy_(1.0 + 0.1 * noise)
        elif name.endswith("embed_tokens.weight"):
            value.copy_(noise)
        elif value.dim() >= 2 and not name.endswith("position_bias"):
            value.copy_(noise * value.shape[-1] ** -0.5)
        else:
            value.copy_(0.5 * noise)
    experts = model.config.n_routed_experts
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            # Distinct experts per token: a random permutation's head.
            order = torch.rand((buffer.shape[0], experts), generator=gen).argsort(dim=1)
            buffer.copy_(order[:, : buffer.shape[1]])
