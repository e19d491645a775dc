"""The tests of this folder run in SGLang's process, the emulated platform selected, as `make sglang-test` does.

Where SGLang is not installed only the tests that do without it are collected.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_[!v]*.py"]
else:
    os.environ["SGLANG_PLATFORM"] = "dsv4_npu_emulated"
    # SGLang's test kit imports it for benchmarks alone.
    if importlib.util.find_spec("datasets") is None:
        sys.modules["datasets"] = types.ModuleType("datasets")

    import torch
    from sglang.srt.plugins import load_plugins

    torch.set_num_threads(1)
    load_plugins()
