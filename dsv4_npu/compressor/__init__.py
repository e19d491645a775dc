"""The C4 and C128 compressor on rings: the exact reference that every faster implementation is measured against."""

from dsv4_npu.compressor.device_plan import most_windows, plan_ring_on_device
from dsv4_npu.compressor.plan import RingPlan, plan_ring
from dsv4_npu.compressor.reference import CompressorWeights, compress_batch, rms_norm, rotate_interleaved

__all__ = [
    "CompressorWeights",
    "RingPlan",
    "compress_batch",
    "most_windows",
    "plan_ring",
    "plan_ring_on_device",
    "rms_norm",
    "rotate_interleaved",
]
