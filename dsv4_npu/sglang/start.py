"""Everything that is checked in a scheduler process before our pools take memory. The pool's constructor calls it."""

from __future__ import annotations

import torch

from dsv4_npu.sglang import sampling_module
from dsv4_npu.sglang.limits import check_swa_tokens
from dsv4_npu.sglang.verify import verify_applied


def before_pools(device: str | torch.device, swa_tokens: int, full_tokens: int, c128_page_size: int) -> None:
    """Refuse a half-applied plugin and sizes that cannot work; then settle whose sampling functions run.

    Raises UnavailableError or ConfigError before anything is allocated.
    """
    verify_applied()
    check_swa_tokens(swa_tokens, c128_page_size, full_tokens)
    sampling_module.settle(torch.device(device))
