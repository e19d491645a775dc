"""The start-up probe and the shadow audit of serving, without SGLang's classes."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from dsv4_npu.alloc.slot_pages import SlotPages
from dsv4_npu.alloc.state import FULL
from dsv4_npu.compressor import fused
from dsv4_npu.compressor.probe import reference_operator
from dsv4_npu.errors import ConfigError, UnavailableError
from dsv4_npu.sglang import shadow_audit
from dsv4_npu.sglang.probe import COMPRESSORS, probe_before_serving
from dsv4_npu.sglang.shadow_audit import ShadowAudit
from tests.core.test_probe import Fused, old_rule, pad_rule, saves


def test_every_compressor_is_probed_at_the_servers_width() -> None:
    results = probe_before_serving("cpu", 4, 64, False, reference_operator)
    assert [(one.ratio, one.asked, one.rule, one.ok) for one in results] == [
        (4, 4, "pad", True),
        (4, 4, "pad", True),
        (128, 4, "pad", True),
    ]
    assert len(COMPRESSORS) == 3
    assert probe_before_serving("cpu", 1, 64, False, saves(old_rule)) == ()


def test_the_old_rule_stops_a_speculative_server() -> None:
    with pytest.raises(ConfigError, match="no speculation is safe with it: leave --speculative-algorithm out"):
        probe_before_serving("cpu", 2, 64, False, saves(old_rule))
    with pytest.raises(ConfigError, match=r"C4 compressor, ring 16: old rule, safe up to D = 4 only"):
        probe_before_serving("cpu", 5, 64, False, saves(old_rule))


@pytest.mark.parametrize("by_request", [False, True])
def test_the_installed_operator_is_what_is_probed(by_request: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import dsv4_npu.sglang.probe as module

    asked: list[bool] = []

    def installed(by_request: bool) -> Fused:
        asked.append(by_request)
        return Fused(pad_rule, by_request)

    with pytest.raises(UnavailableError, match="is not there"):
        probe_before_serving("cpu", 2, 32, by_request)
    monkeypatch.setattr(module, "installed_compressor", installed)
    assert all(one.ok for one in probe_before_serving("cpu", 3, 32, by_request))
    assert asked == [by_request]


def test_an_operator_that_refuses_the_probe_says_what_to_do() -> None:
    def refusing(**_: object) -> None:
        raise RuntimeError("no such kernel")

    operator = fused.fused_operator(refusing, 32, False)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match=r"cannot be probed on cpu .*leave --speculative-algorithm out"):
        probe_before_serving("cpu", 2, 32, False, operator)


def test_every_nth_call_is_audited_and_violations_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    pages = SlotPages(128, 16, 8, 8, 8)
    audit = ShadowAudit(lambda: pages.census(np.zeros(0, np.int64)), every=3)
    with caplog.at_level(logging.ERROR):
        assert [audit.step() for _ in range(6)] == [0] * 6
        assert (audit.audits, audit.violations, caplog.records) == (2, 0, [])
        assert audit.seconds > 0
        _, _, c128 = pages.take(2, 2, 1)
        pages.give_back_c128(c128)
        pages.state.page_state[FULL][3] = 0 if pages.state.page_state[FULL][3] else 1
        pages.state.c128_count[5] = 2
        found = [audit.step() for _ in range(3)]
    assert found[:2] == [0, 0]
    assert found[2] >= 2
    assert any("C128 page 5: count 2, 0 holders name it" in record.message for record in caplog.records)
    assert audit.violations == found[2]


def test_it_is_off_unless_a_file_says_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> list[str]:
        raise AssertionError

    assert [ShadowAudit(never).step() for _ in range(10)] == [0] * 10
    path = tmp_path / "audit.json"
    monkeypatch.setattr(shadow_audit, "settings_file", lambda: path)
    assert shadow_audit.configured_every() == 0
    path.write_text('{"every": 500}')
    assert shadow_audit.configured_every() == 500
    for text, words in (('{"every": -1}', "every = -1"), ('{"each": 3}', "one entry"), ("{", "not valid JSON")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            shadow_audit.configured_every()


def test_many_violations_are_counted_and_five_are_told(caplog: pytest.LogCaptureFixture) -> None:
    audit = ShadowAudit(lambda: [f"page {i}" for i in range(9)], every=1)
    with caplog.at_level(logging.ERROR):
        assert audit.step() == 9
    assert len(caplog.records) == 6
    assert "4 violations more" in caplog.records[-1].message
