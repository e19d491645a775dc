"""What SGLang asks while it looks for its platform: is it this one?

SGLang calls these functions of every installed platform, also where another one, or none, is selected, and a platform
that answers wins if it is the only one. So they answer only when ``SGLANG_PLATFORM`` names them, and importing this
module costs nothing.
"""

from __future__ import annotations

from dsv4_npu.errors import UnavailableError

NPU = "dsv4_npu"
EMULATED = "dsv4_npu_emulated"


def activate() -> str | None:
    """The platform for Ascend NPUs if ``SGLANG_PLATFORM=dsv4_npu``, else None.

    Raises UnavailableError where it is named but SGLang's version is unknown or torch sees no NPU.
    """
    if _selected() != NPU:
        return None
    from dsv4_npu.sglang import versions

    versions.check()
    if not npu_available():
        raise UnavailableError(
            f"SGLANG_PLATFORM={NPU}: torch sees no Ascend NPU in this process (torch.npu is missing or reports no "
            "device). On an Ascend host install torch_npu for this torch and check `npu-smi info`; without hardware "
            f"use SGLANG_PLATFORM={EMULATED} (docs/sglang.md); to run SGLang without this package unset the variable."
        )
    return "dsv4_npu.sglang.platform:NpuPlatform"


def activate_emulated() -> str | None:
    """The platform without hardware if ``SGLANG_PLATFORM=dsv4_npu_emulated``, else None.

    Raises UnavailableError where it is named but SGLang's version is unknown.
    """
    if _selected() != EMULATED:
        return None
    from dsv4_npu.sglang import versions

    versions.check()
    return "dsv4_npu.sglang.emulated_platform:EmulatedPlatform"


def npu_available() -> bool:
    """Whether torch has a usable NPU, by the same question that SGLang asks."""
    import torch

    npu = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_available())


def active() -> str | None:
    """:data:`NPU` or :data:`EMULATED` if SGLang's platform in this process is ours, else None."""
    from sglang.srt.platforms import current_platform

    name = getattr(type(current_platform), "dsv4_npu_platform", None)
    return name if name in (NPU, EMULATED) else None


def _selected() -> str | None:
    from sglang.srt.environ import envs

    return envs.SGLANG_PLATFORM.get() or None
