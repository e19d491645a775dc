"""SGLang's platform on Ascend NPUs, with this package's memory.

SGLang makes it while its own ``srt.utils`` is half imported, so nothing of SGLang but ``srt.platforms``,
``srt.environ`` and the hook registry may be imported here.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.npu import NPUSRTPlatform

from dsv4_npu.sglang import sampling_module
from dsv4_npu.sglang.activation import NPU
from dsv4_npu.sglang.verify import verify_applied

# Before SGLang's verify_sampling is first imported: it keeps None for whatever it does not find then.
sampling_module.inject()


class NpuPlatform(NPUSRTPlatform):  # type: ignore[misc]
    """SGLang's NPU platform with its identity (``is_npu()``); every process is checked before it takes memory."""

    dsv4_npu_platform = NPU

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Called in the main process once the arguments are parsed: the first moment to stop a server."""
        verify_applied()
        super().apply_server_args_defaults(server_args)

    def post_load_model(self, model: Any) -> None:
        """Called in each scheduler process before its pools are sized."""
        verify_applied()
        super().post_load_model(model)

    def get_paged_allocator_cls(self) -> type | None:
        """Called by SGLang's allocators: the last moment, should the pools be SGLang's own after all."""
        verify_applied()
        allocator: type | None = super().get_paged_allocator_cls()
        return allocator
