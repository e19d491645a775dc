"""SGLang's platform without hardware: its scheduler and our memory on a CPU.

An out-of-tree platform, since SGLang would reach for CUDA or an NPU on any other. What SGLang may be imported here is
what :mod:`dsv4_npu.sglang.platform` may.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities

from dsv4_npu.sglang import sampling_module
from dsv4_npu.sglang.activation import EMULATED
from dsv4_npu.sglang.verify import verify_applied

sampling_module.inject()


class EmulatedPlatform(CpuSRTPlatform):  # type: ignore[misc]
    """A CPU under the name of an out-of-tree platform: no Triton, no graphs."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()
    dsv4_npu_platform = EMULATED

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Called in the main process once the arguments are parsed: the first moment to stop a server."""
        verify_applied()

    def post_load_model(self, model: Any) -> None:
        """Called in each scheduler process before its pools are sized."""
        verify_applied()

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """What SGLang allows for DeepSeek-V4; the draft model is computed like the target."""
        return algorithm in ("EAGLE", "DSPARK")

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        """DeepSeek-V4's own attention, on which both algorithms draft."""
        return backend == "dsv4"

    def get_paged_allocator_cls(self) -> type | None:
        """SGLang's torch allocator: no Triton kernel is launched on this platform."""
        verify_applied()
        return None
