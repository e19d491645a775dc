"""What the doctor asks of SGLang: every replacement, in a process of its own with the platform selected."""

from __future__ import annotations

from dsv4_npu.doctor import facts
from dsv4_npu.doctor.rules import OK, judge


def test_a_fresh_process_has_every_replacement_in_force() -> None:
    answer = facts.ask("", module="dsv4_npu.sglang.applied", arguments=("dsv4_npu_emulated",))
    assert answer.error == ""
    assert answer.data["platform"] == "EmulatedPlatform"
    assert {state for _, _, state, _ in answer.data["targets"]} == {"ours"}
    assert len(answer.data["targets"]) > 15
    host = facts.Facts((3, 11), "", facts.installed(), replaced={"dsv4_npu_emulated": answer})
    (line,) = (one for one in judge(host) if one.name == "replacements by dsv4_npu_emulated")
    assert line.state == OK


def test_a_process_without_the_selection_is_refused() -> None:
    answer = facts.ask("", module="dsv4_npu.sglang.applied", arguments=("dsv4_npu",))
    assert "torch sees no Ascend NPU in this process" in answer.error
