"""Which SGLang releases are served. These tests need no SGLang, except where they say so."""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from pathlib import Path

import pytest

from dsv4_npu.errors import ConfigError, UnavailableError
from dsv4_npu.sglang import static, versions
from dsv4_npu.sglang.targets import EMULATED, TARGETS, targets
from tests.sglang.processes import answer

RECORD = Path(__file__).with_name("targets_by_release.json")
#: The wheel of the older release, where somebody has put it: `pip download --no-deps sglang==0.5.22 -d out`.
WHEELS = Path(__file__).parents[2] / "out"

installed = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang (make sglang-test)")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "etc").mkdir()
    return tmp_path


def test_known_releases_pass(environment: Path) -> None:
    assert "engine" in versions.check("0.5.23")
    assert "not run" in versions.check("0.5.22")


def test_an_unknown_release_is_refused_with_the_way_round(environment: Path) -> None:
    with pytest.raises(UnavailableError, match=r"SGLang 0\.5\.24 is unknown .* 0\.5\.23, 0\.5\.22.*accept_sglang") as e:
        versions.check("0.5.24")
    assert str(environment / "etc" / "dsv4_npu_sglang.json") in str(e.value)


def test_the_override_accepts_exactly_one_release(environment: Path) -> None:
    versions.override_file().write_text('{"accept_sglang": "0.5.24"}')
    assert "not tested" in versions.check("0.5.24")
    with pytest.raises(UnavailableError, match=r"0\.5\.25 is unknown"):
        versions.check("0.5.25")


@pytest.mark.parametrize(
    "text",
    ["", "[]", '"0.5.24"', "{}", '{"accept_sglang": true}', '{"accept_sglang": ""}', '{"accept": "0.5.24"}'],
)
def test_a_broken_override_is_refused_and_named(environment: Path, text: str) -> None:
    versions.override_file().write_text(text)
    with pytest.raises(ConfigError, match=r"dsv4_npu_sglang\.json"):
        versions.check("0.5.24")


def test_without_sglang_there_is_an_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda: None)
    with pytest.raises(UnavailableError, match="pip install --no-deps sglang"):
        versions.check()


# -- the targets in each release --------------------------------------------------------------------------------------


def resolved(read: static.Reader, version: str) -> dict[str, object]:
    return {target.at(version): static.definition(read, target.at(version)) for target in targets(None, version)}


def test_every_target_is_recorded_for_every_known_release() -> None:
    record = json.loads(RECORD.read_text())
    assert sorted(record) == sorted(versions.KNOWN)
    for version, definitions in record.items():
        assert sorted(definitions) == sorted({target.at(version) for target in targets(None, version)})
        assert all(definitions.values())


def test_the_operators_page_lists_what_is_replaced_and_what_is_known() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
    rows = {tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in page.splitlines() if line.startswith("|")}
    for target in TARGETS:
        if target.kind != "check":
            assert (target.purpose, f"`{target.theirs}`", f"`{target.ours}`") in rows
    assert sum(row[1].startswith("`sglang.") for row in rows if len(row) == 3) == sum(
        t.kind != "check" for t in TARGETS
    )
    for version, known in versions.KNOWN.items():
        assert any(row[:2] == (version, known) for row in rows)


@installed
def test_the_record_is_that_of_the_installed_release() -> None:
    import sglang

    read = static.reader(Path(sglang.__path__[0]).parent)
    version = versions.installed()
    assert resolved(read, version) == json.loads(RECORD.read_text())[version]


@pytest.mark.parametrize("version", [v for v in versions.KNOWN if list(WHEELS.glob(f"sglang-{v}-*.whl"))])
def test_the_record_is_that_of_the_wheel(version: str) -> None:
    (wheel,) = WHEELS.glob(f"sglang-{version}-*.whl")
    assert resolved(static.reader(wheel), version) == json.loads(RECORD.read_text())[version]


LIVE = """
import json
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang, torch
from dsv4_npu.sglang import sampling_module, verify, versions
report = verify.targets_report()
verify.verify_applied()
print(json.dumps({
    "path": sglang.__path__[0],
    "version": versions.installed(),
    "states": [[state.target.at(versions.installed()), state.state] for state in report],
    "sampling": sampling_module.settle(torch.device("cpu")),
}))
"""


@installed
@pytest.mark.slow
@pytest.mark.parametrize("version", [v for v in versions.KNOWN if v != "0.5.23" and list(WHEELS.glob(f"sglang-{v}-*"))])
def test_every_target_is_in_force_in_a_process_of_the_older_release(version: str, tmp_path: Path) -> None:
    (wheel,) = WHEELS.glob(f"sglang-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    found = answer(LIVE, "dsv4_npu_emulated", PYTHONPATH=str(tmp_path))
    assert found["path"] == str(tmp_path / "sglang")
    assert found["version"] == version
    assert found["states"] == [[t.at(version), "ours"] for t in targets(EMULATED, version)]
    assert set(found["sampling"].values()) == {"ours"}


@pytest.mark.parametrize("kind", ["class", "function"])
def test_a_replacement_fits_what_it_replaces(kind: str) -> None:
    """Leaf for leaf: a class stands for a class, a function for a function, in every release that has it."""
    record = json.loads(RECORD.read_text())
    for target in TARGETS:
        if target.kind == kind:
            for version in set(record) - set(target.absent):
                assert record[version][target.at(version)]["is"] == kind, target


def test_a_name_that_a_release_lacks_is_seen(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "pool.py").write_text(
        "if True:\n    class Pool(Base):\n        def take(self, n: int = 1, *, wait=False): ...\n"
        "try:\n    import fast\nexcept ImportError:\n    fast = None\nTABLE = {}\nflag: bool = True\n"
    )
    read = static.reader(tmp_path)
    assert static.definition(read, "sglang.pool:Pool") == {
        "is": "class",
        "bases": "Base",
        "methods": {"take": "self, n=1, *, wait=False"},
    }
    assert static.definition(read, "sglang.pool:Pool.take") == {
        "is": "function",
        "arguments": "self, n=1, *, wait=False",
    }
    for name in ("sglang.pool:fast", "sglang.pool:TABLE[cpu]", "sglang.pool:flag"):
        assert static.definition(read, name) is not None
    for name in ("sglang.pool:Gone", "sglang.gone:Pool", "sglang.pool:Pool.gone"):
        assert static.definition(read, name) is None


def test_changes_between_releases_are_told() -> None:
    before = {"is": "class", "bases": "A", "methods": {"take": "self", "give": "self", "same": "self"}}
    after = {"is": "class", "bases": "B", "methods": {"take": "self, n", "look": "self", "same": "self"}}
    assert static.differences(before, after) == [
        "bases: A -> B",
        "without give",
        "new look",
        "take(self) -> (self, n)",
    ]
    assert static.differences(before, before) == []
