"""dsv4_npu: DeepSeek-V4's key-value memory for speculative serving on Ascend NPUs.

Importing the package needs torch and numpy alone: torch_npu, triton, transformers, SGLang and the compiled extensions
are looked for only by the calls that use them.
"""

from __future__ import annotations

from dsv4_npu.errors import Dsv4NpuError

__version__ = "0.1.0"
__all__ = ["Dsv4NpuError", "__version__"]
