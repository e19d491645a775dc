"""The package imports, and its CPU ops run, whatever optional part is missing or broken.

Device ops then say what to install.
Each scenario runs in a fresh interpreter on a copy of the package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dsv4_npu"

PRELUDE = """
import sys, warnings
# An editable installation would find in the checkout what the copy lacks.
sys.meta_path = [f for f in sys.meta_path if not f.__module__.startswith("__editable__")]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import dsv4_npu, dsv4_npu.ops
from dsv4_npu.errors import UnavailableError
from dsv4_npu.ops import _registry, availability
assert dsv4_npu.__file__.startswith(HERE), dsv4_npu.__file__
loaded = [n for n in ("triton", "torch_npu", "transformers", "sglang") if sys.modules.get(n) is not None]
assert not loaded, f"importing the package imported {loaded}"

import torch
state = torch.ones(2, 2 * 256, 4)
arguments = (state, torch.tensor([1]), torch.tensor([254]), torch.tensor([2]), 256, 4)
dsv4_npu.ops.clear_c128_draft_states_(*arguments)
assert state[:, :, 3].isinf().nonzero().tolist() == [[0, 256], [0, 257], [1, 256], [1, 257]], state
parts = {part.name: part for part in availability.report()}

def device_op_error():
    try:
        dsv4_npu.ops.clear_c128_draft_states_(*arguments, backend="triton")
    except UnavailableError as error:
        return str(error)
    raise AssertionError("a device op ran without a device")
"""


def run(tmp_path: Path, body: str, *, before: str = "", extension: bytes | None = None) -> None:
    """Run the prelude and ``body`` on a copy of the package whose ``_C.so`` is absent or holds ``extension``."""
    shutil.copytree(PACKAGE, tmp_path / "dsv4_npu", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if extension is not None:
        (tmp_path / "dsv4_npu" / "_C.so").write_bytes(extension)
    script = f"HERE = {str(tmp_path)!r}\n{before}\n{PRELUDE}\n{body}"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


NO_TRITON = "import sys; sys.modules['triton'] = None"


def test_without_triton(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
message = device_op_error()
assert "clear_c128_draft_states_" in message and "pip install triton-ascend" in message, message
assert not parts["triton"].usable and "install triton-ascend" in parts["triton"].detail
""",
        before=NO_TRITON,
    )


def test_with_a_triton_that_cannot_load_its_libraries(tmp_path: Path) -> None:
    broken = tmp_path / "triton"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise OSError('libascendcl.so: cannot open shared object file')")
    run(tmp_path, "assert 'libascendcl.so' in device_op_error()\nassert not parts['triton'].usable")


def test_triton_without_a_device(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    run(tmp_path, "message = device_op_error()\nassert 'torch_npu and triton-ascend' in message, message")


@pytest.mark.parametrize("error", ["OSError('libhccl.so: cannot open shared object file')", "ImportError('no CANN')"])
def test_with_a_torch_npu_that_fails_on_import(tmp_path: Path, error: str) -> None:
    broken = tmp_path / "torch_npu"
    broken.mkdir()
    (broken / "__init__.py").write_text(f"raise {error}")
    run(
        tmp_path,
        f"""
detail = parts["torch_npu"].detail
assert not parts["torch_npu"].usable and {error.split("'")[1]!r} in detail and "CANN" in detail, detail
assert "triton" in device_op_error()
""",
    )


def test_without_torch_npu(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
assert not parts["torch_npu"].usable and "install the torch_npu" in parts["torch_npu"].detail
device_op_error()
""",
        before="import sys; sys.modules['torch_npu'] = None",
    )


def test_without_the_extension(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
assert not parts["_C"].usable and "pip install" in parts["_C"].detail
assert not any(op.has_cpp for op in _registry.ops.values())
told = [str(warning.message) for warning in caught]
assert told.count(f"CPU kernels run in plain torch, slower: {_registry.extension_problem}") == 1, told
try:
    dsv4_npu.ops.clear_c128_draft_states_(*arguments, backend="cpu")
except UnavailableError as error:
    assert "_C.so is not built" in str(error)
else:
    raise AssertionError("the C++ kernel ran without the extension")
""",
    )


def test_with_an_extension_that_does_not_load(tmp_path: Path) -> None:
    body = "assert not parts['_C'].usable and 'does not load with torch' in parts['_C'].detail, parts['_C']"
    run(tmp_path, body, extension=b"not a shared object")


def test_with_nothing_optional_at_all(tmp_path: Path) -> None:
    # An editable installation would still find the checkout's compiled ledger.
    hidden = (
        "import sys\n"
        "for name in ('triton', 'torch_npu', 'transformers', 'sglang', 'rich', 'dsv4_npu._ledger'):\n"
        "    sys.modules[name] = None"
    )
    run(tmp_path, "assert not any(p.usable for p in parts.values())", before=hidden)
