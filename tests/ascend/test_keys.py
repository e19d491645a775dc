"""Every Triton kernel has a committed proof for its present source. Needs neither triton-ascend nor Triton."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import keys


def test_every_kernel_has_a_proof_of_its_present_source() -> None:
    problems = keys.stale()
    assert not problems, "run make ascend: " + "; ".join(problems)


def test_layout_and_comments_do_not_change_a_key() -> None:
    source = '"""Doc."""\nimport a\n\ndef f(x):\n    """Doc."""\n    return x + 1  # why\n'
    same = "import a\ndef f( x ):\n    return (x +\n            1)\n"
    assert keys.canonical(source) == keys.canonical(same)
    assert keys.canonical(source) != keys.canonical(source.replace("+ 1", "+ 2"))
    assert keys.canonical(source) != keys.canonical(source.replace("import a", "import b"))


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of one op's folder and of what it imports, at another place."""
    ops = tmp_path / "dsv4_npu" / "ops"
    for path in keys.OPS.rglob("*.py"):
        copy = ops / path.relative_to(keys.OPS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    monkeypatch.setattr(keys, "OPS", ops)
    monkeypatch.setattr(keys, "ROOT", tmp_path)
    return ops


@pytest.mark.parametrize("op", keys.kernel_ops())
def test_a_changed_source_changes_the_key(op: str, changed: Path) -> None:
    before = keys.op_key(op)
    path = changed / op / "triton.py"
    path.write_text(path.read_text() + "\n# a comment\n")
    assert keys.op_key(op) == before
    path.write_text(path.read_text() + "\nanother = 1\n")
    assert keys.op_key(op) != before


def test_a_changed_import_changes_the_key(changed: Path) -> None:
    before = {op: keys.op_key(op) for op in keys.kernel_ops()}
    shared = changed / "_launch.py"
    shared.write_text(shared.read_text() + "\nanother = 1\n")
    assert all(keys.op_key(op) != before[op] for op in before)


def test_stale_proofs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads(keys.RESULTS.read_text())
    for op, entry in content["ops"].items():
        entry["key"] = keys.op_key(op)
    first, second, third = sorted(content["ops"])[:3]
    content["ops"][first]["key"] = "0"
    del content["ops"][second]
    content["ops"][third]["kernels"] = []
    content["ops"]["gone"] = content["ops"][third]
    results = tmp_path / "ascend.json"
    results.write_text(json.dumps(content))
    monkeypatch.setattr(keys, "RESULTS", results)
    problems = " ".join(keys.stale())
    for words in (f"{first}: its source changed", f"{second}: no proof", f"{third}: no proof of", "gone: a proof of"):
        assert words in problems
