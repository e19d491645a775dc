"""Everything that is checked in a scheduler process before our pools take memory. The pool's constructor calls it."""

from __future__ import annotations

import torch

from dsv4_npu.sglang import activation, sampling_module
from dsv4_npu.sglang.limits import check_swa_tokens
from dsv4_npu.sglang.probe import probe_before_serving
from dsv4_npu.sglang.verify import verify_applied


def before_pools(device: str | torch.device, swa_tokens: int, full_tokens: int, c128_page_size: int) -> None:
    """Refuse a half-applied plugin, sizes that cannot work and a compressor that loses accepted rows.

    Then settle whose sampling functions run. Raises UnavailableError or ConfigError before anything is allocated.
    """
    verify_applied()
    check_swa_tokens(swa_tokens, c128_page_size, full_tokens)
    if activation.active() == activation.NPU:
        _probe_compressors(device)
    sampling_module.settle(torch.device(device))


def _probe_compressors(device: str | torch.device) -> None:
    """On an NPU with speculation: the operator's save rule at the widest verify that this server may use."""
    from sglang.srt.hardware_backend.npu.utils import is_npu_arch35
    from sglang.srt.runtime_context import max_speculative_num_draft_tokens, process_model_config

    width = max_speculative_num_draft_tokens()
    if width is not None:
        probe_before_serving(device, width, process_model_config().hidden_size, by_request=is_npu_arch35())
