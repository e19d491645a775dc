"""The tests of this folder run in SGLang's process, the emulated platform selected, as `make sglang-test` does.

Where SGLang is not installed only the tests that do without it are collected.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path

#: They read files, or run what of this room imports nothing of SGLang.
WITHOUT_SGLANG = ("test_versions.py", "test_vigilance.py")

if importlib.util.find_spec("sglang") is None:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in WITHOUT_SGLANG]
else:
    os.environ["SGLANG_PLATFORM"] = "dsv4_npu_emulated"
    # SGLang's test kit imports it for benchmarks alone.
    if importlib.util.find_spec("datasets") is None:
        sys.modules["datasets"] = types.ModuleType("datasets")

    import torch
    from sglang.srt.plugins import load_plugins

    torch.set_num_threads(1)
    load_plugins()
