"""Making ``device="npu"`` work: once, early enough, and with the reason when it cannot be had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the emulated npu device runs kernels under Triton's interpreter")


def in_a_new_process(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], env={}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


TRY = """
from dsv4_npu.emulation import device
from dsv4_npu.errors import UnavailableError
try:
    device.activate()
except UnavailableError as error:
    print(error)
"""


def test_without_triton_activation_says_what_to_install() -> None:
    assert "pip install --no-deps triton" in in_a_new_process(f"import sys; sys.modules['triton'] = None{TRY}")


def test_without_the_hook_of_torch_activation_names_the_version() -> None:
    script = "import torch.utils.backend_registration as b; del b._setup_privateuseone_for_python_backend"
    assert "has no torch.utils.backend_registration." in in_a_new_process(script + TRY)


def test_beside_another_backend_activation_is_refused() -> None:
    assert "xpu2 is loaded" in in_a_new_process(f"import torch; torch.utils.rename_privateuse1_backend('xpu2'){TRY}")


def test_importing_the_module_changes_nothing_and_triton_may_be_loaded_before() -> None:
    script = """
import torch, triton, dsv4_npu.emulation.device as device
assert torch._C._get_privateuse1_backend_name() == "privateuseone" and not device.is_active()
device.activate()
from dsv4_npu import ops
p = ops.top_k_renorm_prob(torch.tensor([[.1, .2, .7]]).to("npu"), torch.tensor([2], dtype=torch.int32).to("npu"))
print(p.device, [round(x, 3) for x in p.tolist()[0]])
"""
    assert in_a_new_process(script) == "npu:0 [0.0, 0.222, 0.778]"


def test_kernels_that_were_compiled_before_are_refused() -> None:
    script = f"import dsv4_npu.ops.move_kv.triton{TRY}"
    assert "activate the device before the first kernel runs" in in_a_new_process(script)
