"""The compressor's save rule, tested with a few rows before an NPU server with speculation takes memory."""

from __future__ import annotations

import torch

from dsv4_npu import addressing
from dsv4_npu.compressor.fused import fused_operator, installed_compressor
from dsv4_npu.compressor.probe import Operator, ProbeResult, probe
from dsv4_npu.errors import UnavailableError

#: Ratio and head dimension of every compressor: attention C4, the C4 indexer, attention C128.
COMPRESSORS = ((4, 512), (4, 128), (128, 512))


def probe_before_serving(
    device: torch.device | str,
    verify_width: int,
    hidden: int,
    by_request: bool,
    operator: Operator | None = None,
) -> tuple[ProbeResult, ...]:
    """Probe every compressor at the verify width of the server; nothing without speculation.

    Args:
        device: the NPU.
        verify_width: D, ``--speculative-num-draft-tokens``; 1 without speculation.
        hidden: the model's hidden size.
        by_request: whether C4 states lie in banks of requests (A5).
        operator: what is probed; the installed fused compressor by default.

    Raises:
        ConfigError: accepted rows would be lost; the message gives the safe width.
        UnavailableError: the operator is not there or refuses the probe's arguments.
    """
    if verify_width <= 1:
        return ()
    operator = operator or fused_operator(installed_compressor(by_request), hidden, by_request)
    results = []
    for ratio, head_dim in COMPRESSORS:
        ring = addressing.ring_size(ratio, speculative=True)
        try:
            result = probe(operator, ratio, ring, verify_width, head_dim, device)
        except (RuntimeError, TypeError) as error:
            raise UnavailableError(
                f"the C{ratio} compressor cannot be probed on {device} ({type(error).__name__}: {error}), so it is "
                "unknown whether it keeps accepted rows: leave --speculative-algorithm out, and report this message"
            ) from error
        result.require()
        results.append(result)
    return tuple(results)
