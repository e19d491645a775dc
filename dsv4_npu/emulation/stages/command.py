"""What ``dsv4-npu run`` makes of ``--spec`` and ``--drafter`` where draft stages are concerned."""

from __future__ import annotations

from typing import Any, Literal, cast

from dsv4_npu.config import ModelSpec, configs_dir
from dsv4_npu.emulation.engine import Engine
from dsv4_npu.emulation.stages.check import DraftWatch
from dsv4_npu.emulation.stages.drafter import OwnDrafter
from dsv4_npu.emulation.stages.linear import Linear
from dsv4_npu.emulation.stages.net import build_stages
from dsv4_npu.errors import ConfigError
from dsv4_npu.options import DEFAULT_DRAFTS

#: Values of ``--spec``. MTP verifies as every chain does; its name says where the drafts come from.
SPECS = (*DEFAULT_DRAFTS, "mtp")


def rule_of(spec: str) -> Literal["none", "chain", "dspark"]:
    """The speculation rule behind a value of ``--spec``."""
    return cast(Literal["none", "chain", "dspark"], "chain" if spec == "mtp" else spec)


def drafter_of(given: str | None, spec: str) -> str:
    """The drafter of a run: as given, else the model's own stage for mtp, and early exit otherwise.

    Raises:
        ConfigError: the own stages with a plain chain, or mtp with another drafter.
    """
    if given is None:
        return "own" if spec == "mtp" else "early-exit"
    if spec == "mtp" and given != "own":
        raise ConfigError(
            f"--spec mtp with --drafter {given}: its drafts are the model's own stage's; use --spec chain"
        )
    if spec == "chain" and given == "own":
        raise ConfigError("--spec chain with --drafter own: use --spec mtp (one stage) or --spec dspark (several)")
    return given


def model_of(model: ModelSpec, spec: str, drafter: str) -> ModelSpec:
    """The model with the draft stages that a run needs: for DSpark's own drafts its DSpark variant, where there is one.

    The target's layers are the same in both.

    Raises:
        ConfigError: own drafts without a stage, or mtp with several.
    """
    variant = configs_dir() / "models" / f"{model.name}_dspark.json"
    if spec == "dspark" and drafter == "own" and variant.is_file() and model.num_draft_stages < 2:
        model = ModelSpec.load(variant.stem)
    count = model.num_draft_stages
    if drafter == "own" and spec != "none" and (count != 1 if spec == "mtp" else not count):
        raise ConfigError(
            f"--spec {spec} with --drafter own: model {model.name} has {count} draft stages (compress_ratios "
            f"beyond num_hidden_layers); {'1 is' if spec == 'mtp' else '1 or more are'} needed"
        )
    return model


def own_drafter(target: Any, model: ModelSpec, spec: str, seed: int) -> OwnDrafter:
    """The drafter over the model's own stages, with weights from ``seed``.

    Raises:
        ConfigError: the model has no stages, or several for mtp.
    """
    return OwnDrafter(build_stages(target, model, seed), "mtp" if spec == "mtp" else "dspark")


def watched(engine: Engine) -> DraftWatch | None:
    """Collect the proposals of an engine with draft stages.

    None without stages, over rows that are not float64, and with simulated acceptance, whose history is made up.
    """
    stages, config = engine.device.stages, engine.config
    if stages is None or config.kv_row != "fp64" or engine.options.accept not in ("greedy", "rejection"):
        return None
    linear = Linear(stages.net.target, stages.net, stages.kind, config.model.sliding_window)
    watch = DraftWatch(linear, engine.running)
    stages.watch = watch.see
    return watch
