"""This package as a drop-in for SGLang's DeepSeek-V4 memory on Ascend NPUs.

SGLang finds :mod:`dsv4_npu.sglang.activation` and :mod:`dsv4_npu.sglang.plugin` through entry points. Both import next
to nothing until ``SGLANG_PLATFORM`` names this package; only then are SGLang's classes replaced by those of this room.
"""
