"""SGLang's real engine on a CPU, serving the emulation's model."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import pickle
import signal
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dsv4_npu.config import ModelSpec
from dsv4_npu.errors import ConfigError, UnavailableError
from dsv4_npu.sglang import engine_dspark, engine_npu
from dsv4_npu.sglang.engine_forward import ForwardSetup
from dsv4_npu.sglang.engine_seams import run_scheduler

#: What SGLang asks of a configuration beyond what Hugging Face's model needs; it shapes an object that never computes.
_SGLANG_KEYS: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "torch_dtype": "bfloat16",
    "n_group": 1,
    "topk_group": 1,
    "n_hash_layers": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "attention_bias": False,
    "swiglu_limit": 10.0,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

DEFAULT_SETUP = ForwardSetup()


def write_model(setup: ForwardSetup, folder: Path) -> Path:
    """A folder with the ``config.json`` by which SGLang makes its own, empty objects of target and drafter."""
    spec = ModelSpec.load(setup.model)
    raw = {key: value for key, value in spec.raw.items() if key not in ("name", "dspark_block_size")}
    stages = 0
    if setup.draft_tokens:
        stages = 3 if setup.algorithm == "DSPARK" else 1
    if setup.algorithm == "DSPARK":
        raw |= engine_dspark.CHECKPOINT | {"dspark_block_size": setup.draft_tokens}
    raw.update(
        _SGLANG_KEYS,
        compress_ratios=list(spec.compress_ratios[: spec.num_layers]) + [0] * stages,
        num_nextn_predict_layers=min(stages, 1),
        qk_nope_head_dim=spec.nope_dim,
        v_head_dim=spec.head_dim,
        kv_lora_rank=spec.head_dim,
        window_size=spec.sliding_window,
        intermediate_size=raw["moe_intermediate_size"],
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    return folder


class EmulatedEngine:
    """``sglang.Engine`` whose scheduler process computes with :class:`~dsv4_npu.sglang.engine_forward.EngineForward`.

    Attributes:
        sglang: the engine itself.
        spec, setup: the model.
        tokens, page: FULL tokens of the pools, and of one page.

    Args:
        setup: the model; its ``record`` is set here.
        start_method: "spawn", as SGLang starts its processes, or "fork", which saves them the imports.
        device: "cpu", or "npu" for the emulated device, after :func:`dsv4_npu.sglang.engine_npu.prepare`; forks.
        options: further arguments of SGLang's server, over those that the emulation needs.

    Raises:
        UnavailableError: SGLang is not installed.
        ConfigError: DSpark on the emulated npu device.
    """

    def __init__(
        self, setup: ForwardSetup = DEFAULT_SETUP, start_method: str = "spawn", device: str = "cpu", **options: Any
    ) -> None:
        try:
            from sglang.srt.entrypoints.engine import Engine
        except ImportError as error:
            raise UnavailableError(
                f"SGLang cannot be imported ({error}): make an environment with `make sglang-env`"
            ) from error
        if device == "npu":
            if setup.algorithm == "DSPARK":
                raise ConfigError("algorithm = 'DSPARK' on the npu device; 'EAGLE' is needed there, or device = 'cpu'")
            engine_npu.install()
            start_method = "fork"
        self._folder = tempfile.TemporaryDirectory(prefix="dsv4-npu-engine-")
        folder = Path(self._folder.name)
        self.spec = ModelSpec.load(setup.model)
        self.setup = dataclasses.replace(setup, record=folder / "logits")

        class Emulated(Engine):  # type: ignore[misc]
            run_scheduler_process_func = staticmethod(partial(run_scheduler, self.setup))

            @classmethod
            def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
                # SGLang has just set "spawn" for the whole process; the detokenizer follows the scheduler.
                multiprocessing.set_start_method(start_method, force=True)
                return super()._launch_scheduler_processes(*args, **kwargs)

        arguments: dict[str, Any] = {
            "model_path": str(write_model(setup, folder / "model")),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "device": device,
            "kv_cache_dtype": "bfloat16",
            "disable_cuda_graph": True,
            "random_seed": 0,
            "context_length": 6144,
            # Three requests fill the pools but for a page or two, and then want a page each.
            "max_total_tokens": 4480 if device == "npu" else 4352,
            "max_running_requests": 4,
            "swa_full_tokens_ratio": 0.6,
            # Admit eagerly: the pools are small so that requests must be retracted.
            "schedule_conservativeness": 0.1,
            "chunked_prefill_size": 512,
        }
        if setup.draft_tokens:
            arguments |= {
                # As SGLang does on a CPU: its relay between rounds is a Triton kernel of its own.
                "disable_overlap_schedule": True,
                "speculative_algorithm": setup.algorithm,
                "speculative_num_draft_tokens": setup.draft_tokens + 1,
            }
            if setup.algorithm == "DSPARK":
                engine_dspark.allow_on_cpu()
            else:
                arguments |= {"speculative_num_steps": setup.draft_tokens, "speculative_eagle_topk": 1}
        arguments |= options
        self.tokens: int = arguments["max_total_tokens"]
        # SGLang's choice for DeepSeek-V4, off and on an NPU.
        self.page = 128 if device == "npu" else 256
        self.sglang = Emulated(**arguments)

    def generate(self, prompts: list[list[int]], max_new: int | list[int], **options: Any) -> list[dict[str, Any]]:
        """Greedy outputs of all ``prompts`` as SGLang returns them, with ``options`` for its ``generate``."""
        counts = [max_new] * len(prompts) if isinstance(max_new, int) else max_new
        sampling = [{"max_new_tokens": n, "temperature": 0, "ignore_eos": True} for n in counts]
        out: list[dict[str, Any]] = self.sglang.generate(input_ids=prompts, sampling_params=sampling, **options)
        return out

    def flush(self) -> bool:
        """Drop the prefix cache and every state; whether SGLang found itself idle and did so."""
        return bool(self.sglang.flush_cache().success)

    def report(self) -> dict[str, Any]:
        """What the scheduler process has computed and holds now, see :meth:`EngineSeams.report`."""
        path = Path(self._folder.name) / "report.json"
        self.sglang.collective_rpc("dsv4_npu_report", path=str(path))
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return data

    def tamper(self, name: str = "") -> None:
        """Spoil the memory that later forwards see by one of :data:`~dsv4_npu.sglang.engine_tampers.TAMPERS`."""
        self.sglang.collective_rpc("dsv4_npu_tamper", name=name)

    def logits(self) -> dict[tuple[str, int], npt.NDArray[np.float64]]:
        """The float64 logits that the engine sampled from, by request id and position of the row; read once."""
        path = self.setup.record
        assert path is not None
        found = {}
        with path.open("r+b") as file:
            while True:
                try:
                    rid, start, rows = pickle.load(file)
                except EOFError:
                    break
                found.update({(rid, start + i): row for i, row in enumerate(rows)})
            file.truncate(0)
        return found

    def shutdown(self) -> None:
        """Stop SGLang's processes; call it in the main thread, as the constructor."""
        # SGLang kills its whole process, this one too, when a child reports that it or a sibling died. While we stop
        # them that report is no news.
        before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        try:
            self.sglang.shutdown()
        finally:
            signal.signal(signal.SIGQUIT, before)
        self._folder.cleanup()
