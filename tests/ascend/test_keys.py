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
    """A copy of the ops and of the proofs at another place: the folder of the ops."""
    for folder in (keys.OPS, keys.HERE):
        for path in folder.rglob("*"):
            if path.suffix in (".py", ".c", ".txt"):
                copy = tmp_path / path.relative_to(keys.ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(keys, "OPS", tmp_path / keys.OPS.relative_to(keys.ROOT))
    monkeypatch.setattr(keys, "HERE", tmp_path / keys.HERE.relative_to(keys.ROOT))
    monkeypatch.setattr(keys, "ROOT", tmp_path)
    return keys.OPS


def all_keys() -> dict[str, str]:
    return {op: keys.op_key(op) for op in keys.kernel_ops()}


def append(path: Path, text: str) -> None:
    path.write_text(f"{path.read_text()}\n{text}\n")


@pytest.mark.parametrize("op", keys.kernel_ops())
def test_a_changed_source_oracle_or_case_changes_the_key(op: str, changed: Path) -> None:
    seen = [keys.op_key(op)]
    for path in (changed / op / "triton.py", changed / op / "ref.py", keys.HERE / "cases" / f"{op}.py"):
        append(path, "# a comment")
        assert keys.op_key(op) == seen[-1]
        append(path, "another = 1")
        seen.append(keys.op_key(op))
    assert len(set(seen)) == 4


SAMPLING = {"chain_speculative_sampling", "tree_speculative_sampling_target_only"}
RENORM = {"top_k_renorm_prob", "top_p_renorm_prob"}
IMPORTED = {
    "dsv4_npu/ops/_launch.py": set(keys.kernel_ops()),
    "dsv4_npu/ops/_draw_ref.py": SAMPLING | RENORM,
    "tests/ascend/case.py": set(keys.kernel_ops()),
    "tests/ascend/cases/verify.py": SAMPLING | RENORM | {"verify_tree_greedy"},
    "tests/ascend/cases/renorm.py": RENORM,
    "tests/ascend/cases/accept.py": {"compact_accept", "fill_bonus_tokens", "gather_accepted_slots"},
    "tests/ascend/report.py": set(),
}


@pytest.mark.parametrize("path", IMPORTED)
def test_a_changed_import_changes_the_keys_of_those_that_use_it(path: str, changed: Path) -> None:
    before = all_keys()
    append(keys.ROOT / path, "another = 1")
    after = all_keys()
    assert {op for op in before if after[op] != before[op]} == IMPORTED[path]


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("import dsv4_npu.ops._x", "_x.py"),
        ("from dsv4_npu.ops import _x", "_x.py"),
        ("from dsv4_npu.ops._x import name", "_x.py"),
        ("from dsv4_npu.ops import x", "x/__init__.py"),
        ("from dsv4_npu.ops.x import name", "x/__init__.py"),
        ("from dsv4_npu.ops.x import ref", "x/ref.py"),
        ("from .. import _x", "_x.py"),
        ("from .._x import name", "_x.py"),
        ("from ..x import ref", "x/ref.py"),
        ("def f():\n    from .ref import name", "move_kv/ref.py"),
    ],
)
def test_every_way_to_import_is_followed(line: str, file: str, changed: Path) -> None:
    (changed / "x").mkdir()
    for path in (changed / file, changed / "x" / "__init__.py", changed / "_x.py"):
        path.touch()
    path = changed / "move_kv" / "start.py"
    path.write_text(line + "\n")
    assert keys._closure(path) >= {path, changed / file}
    path.write_text(line.replace("dsv4_npu", "elsewhere") if "dsv4_npu" in line else "from os import path\n")
    assert keys._closure(path) == {path}


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
