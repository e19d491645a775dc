"""Before anything is collected: Triton's own library is decorated when it is first imported, by the switch of then."""

from __future__ import annotations

import importlib.util
import os

import torch

# On a machine without a GPU the kernels of this package run under Triton's interpreter. SGLang's tests, which run in an
# environment of their own, set the switch where they want it.
if not torch.cuda.is_available() and importlib.util.find_spec("sglang") is None:
    os.environ["TRITON_INTERPRET"] = "1"
