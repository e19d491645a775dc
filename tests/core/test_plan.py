"""``dsv4-npu plan`` as a user runs it: the answer, its table against built pools, comparisons, and wrong input."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4_npu.budget import GIB, Budget, PoolSizes, budget_of, group_swa_floor
from dsv4_npu.cli import main
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec, configs_dir
from dsv4_npu.planning import plan as planning
from dsv4_npu.pools import DSV4Pools
from tests.core.budget_tables import EXAMPLE

SMALL = "--hbm-gib 64 --weights-gib 40"


def plan(capsys: pytest.CaptureFixture[str], line: str) -> str:
    assert main(["plan", *line.split()]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def numbers(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(capsys, f"{line} --json"))
    return found


def refused(capsys: pytest.CaptureFixture[str], line: str) -> str:
    try:
        status = main(["plan", *line.split()])
    except SystemExit as error:
        status = int(str(error.code))
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    return err.splitlines()[-1]


def meta_pools(found: dict[str, Any]) -> DSV4Pools:
    speculation = SpeculationSpec(found["speculation"], found["verify_width"] - 1)
    config = CacheConfig(
        ModelSpec.load(found["model"]),
        PlatformSpec.load(found["platform"]),
        speculation,
        c128_page_size=found["c128_page_size"],
        context_len=found["context"],
        request_rows=found["request_slots"],
    )
    return DSV4Pools(config, PoolSizes(**found["sizes"]), device="meta", draft_stages=speculation.speculative)


# -- the answer -------------------------------------------------------------------------------------------------------


def test_the_answer_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    found, text = numbers(capsys, EXAMPLE), plan(capsys, EXAMPLE)
    lines = text.splitlines()
    assert lines[0] == found["summary"] == f"{found['tokens']:,} tokens, {found['requests']} requests of full context"
    assert "3 draft stages" in text
    assert "each of the 16 ranks holds all of these bytes" in text
    assert re.search(r"binding: tokens \(FULL pages\);.*FULL 9,", text)
    assert max(map(len, (line for line in lines if line.startswith(("swa", "c4", "c128", "total"))))) <= 80


@pytest.mark.parametrize(
    "line",
    [EXAMPLE, f"{SMALL} --platform a5 --spec none", "--tokens 1048576 --platform a5", f"{SMALL} --swa-tokens 8192"],
)
def test_the_table_is_what_is_built(capsys: pytest.CaptureFixture[str], line: str) -> None:
    found, text = numbers(capsys, line), plan(capsys, line)
    built = {name: slab.nbytes for name, slab in meta_pools(found).families().items()}
    assert {name: family["bytes"] for name, family in found["families"].items()} == built
    assert found["total_bytes"] == sum(built.values()) + found["table_bytes"]
    # The lines of the table add up to the total, and layers · rows · row are the bytes of each.
    table = re.findall(
        r"^([a-z].*?)  +(\d+|-)  +([\d,]+|-)  +([\d,]+|-)  +([\d,]+|-)  +([\d,]+)  +[\d.]+ %$", text, re.M
    )
    cells = [[int(cell.replace(",", "")) for cell in row[1:] if cell != "-"] for row in table]
    assert sum(row[-1] for row in cells) == found["total_bytes"]
    products = [row for row in cells if len(row) == 5]
    assert len(products) == len(built) + (found["draft_stages"] > 0)
    assert all(layers * rows * row == nbytes for layers, _, rows, row, nbytes in products)


def test_memory_is_used_up_to_less_than_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (EXAMPLE, f"{SMALL} --platform a5", f"{SMALL} --swa-tokens 8192", f"{SMALL} --reserve-gib 2.5"):
        found = numbers(capsys, line)
        assert found["memory_bytes"] == int((24 - found["reserve_gib"]) * GIB)
        assert 0 <= found["free_bytes"] < found["next_page_bytes"]
        assert found["free_bytes"] == found["memory_bytes"] - found["total_bytes"]
        assert found["bytes_per_token"] * found["tokens"] + found["fixed_bytes"] == pytest.approx(found["total_bytes"])


def test_gib_are_exact(capsys: pytest.CaptureFixture[str]) -> None:
    found = numbers(capsys, "--hbm-gib 64.1 --weights-gib 40.3 --reserve-gib 0.1")
    assert found["memory_bytes"] == 237 * GIB // 10


def test_tp_divides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    one, sixteen = numbers(capsys, f"{SMALL} --tp 1"), numbers(capsys, f"{SMALL} --tp 16")
    assert (sixteen.pop("tp"), one.pop("tp")) == (16, 1)
    assert "16 ranks" in "".join(sixteen.pop("notes"))
    one.pop("notes")
    assert one == sixteen


def test_tokens_that_fit_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert numbers(capsys, f"{SMALL} --tokens 1048576")["tokens"] == 2**20
    assert numbers(capsys, "--tokens 1048576")["tokens"] == 2**20
    told = refused(capsys, f"{SMALL} --tokens 9000000")
    most = int(re.findall(r"lower --tokens to ([\d,]+)", told)[0].replace(",", ""))
    assert numbers(capsys, f"{SMALL} --tokens {most}")["tokens"] == numbers(capsys, SMALL)["tokens"] == most
    assert "lower --tokens" in refused(capsys, f"{SMALL} --tokens {most + 128}")


@pytest.mark.parametrize(
    ("options", "binding"),
    [
        ("--context 131072", "FULL"),
        ("--context 131072 --max-running 4", "request slots"),
        ("--context 600 --max-running 1000 --spec none", "SWA"),
    ],
)
def test_what_binds(capsys: pytest.CaptureFixture[str], options: str, binding: str) -> None:
    found = numbers(capsys, f"{SMALL} {options}")
    assert found["binding"] == binding
    assert found["requests"] == found["requests_by_family"][binding] == min(found["requests_by_family"].values())
    short = any("fewer than the" in note and "--swa-ratio" in note for note in found["notes"])
    assert short == (found["requests_by_family"]["SWA"] < found["request_slots"])


def test_dspark_of_a_model_without_such_stages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert numbers(capsys, f"{SMALL} --model v4_flash --spec dspark")["model"] == "v4_flash_dspark"
    assert numbers(capsys, f"{SMALL} --model v4_flash --spec chain")["model"] == "v4_flash"
    mine = tmp_path / "mine.json"
    mine.write_text((configs_dir() / "models" / "v4_flash.json").read_text())
    assert "--spec dspark: model mine has no dspark_block_size" in refused(
        capsys, f"{SMALL} --model {mine} --spec dspark"
    )
    data = json.loads(mine.read_text())
    mine.write_text(json.dumps({**data, "dspark_block_size": 4, "compress_ratios": [*data["compress_ratios"], 0, 0]}))
    found = numbers(capsys, f"{SMALL} --model {mine} --spec dspark")
    assert (found["draft_stages"], found["verify_width"]) == (3, 5)


# -- changes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [EXAMPLE, f"{SMALL} --platform a5 --spec none --c128-page-size 32"])
def test_changes_are_what_planning_them_gives(capsys: pytest.CaptureFixture[str], line: str) -> None:
    found = numbers(capsys, line)
    changes = {change["what"]: change for change in found["changes"]}
    page, slots = found["c128_page_size"], found["request_slots"]
    for what, options in (
        ("one more request slot", f"--max-running {slots + 1}"),
        (f"C128 page {2 * page} (now {page})", f"--c128-page-size {2 * page}"),
        ("SWA share 0.05 (now 0.1)", "--swa-ratio 0.05"),
    ):
        assert changes[what]["tokens"] == numbers(capsys, f"{line} {options}")["tokens"]
        without_memory = re.sub(r"--(hbm|weights)-gib \S+", "", line)
        same = numbers(capsys, f"{without_memory} {options} --tokens {found['tokens']}")
        assert changes[what]["more_bytes"] == same["total_bytes"] - found["total_bytes"]
    smaller = changes[f"C128 page {page // 2} (now {page})"]
    assert smaller["more_bytes"] < 0 <= smaller["tokens"] - found["tokens"]
    assert (smaller["note"] == "not on an NPU") == (page == 16)


def test_a_slot_too_many_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "--hbm-gib 1 --context 1000")
    most = int(re.findall(r"at most (\d+) fit", told)[0])
    (slot, *_) = numbers(capsys, f"--hbm-gib 1 --context 100 --max-running {most}")["changes"]
    assert (slot["tokens"], slot["note"]) == (None, "does not fit")
    assert "--max-running" in refused(capsys, f"--hbm-gib 1 --context 100 --max-running {most + 1}")


# -- comparison and files ---------------------------------------------------------------------------------------------


def test_compare_two(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{EXAMPLE} --compare platform=a5,spec=chain"
    both = numbers(capsys, line)["plans"]
    assert both[0] == numbers(capsys, EXAMPLE)
    assert both[1] == numbers(capsys, EXAMPLE.replace("a3", "a5").replace("dspark", "chain"))
    text = plan(capsys, line)
    for one in both:
        assert one["summary"] in text
        assert f"{one['families']['c128']['bytes']:,}" in text
    assert f"{both[1]['tokens'] / both[0]['tokens']:.2f}" in text


@pytest.mark.parametrize(
    ("given", "changed", "same"),
    [
        ("--draft-tokens 7", "spec=dspark", "--spec dspark"),
        ("--draft-tokens 7", "spec=dspark,draft-tokens=2", "--spec dspark --draft-tokens 2"),
        ("--draft-tokens 7", "spec=none", "--spec none"),
        ("--swa-tokens 8192", "swa-ratio=0.2", "--swa-ratio 0.2"),
        ("--swa-ratio 0.2", "swa_tokens=8192", "--swa-tokens 8192"),
        ("", "--hbm-gib=80, max-running=3", "--hbm-gib 80 --max-running 3"),
    ],
)
def test_what_a_comparison_changes(capsys: pytest.CaptureFixture[str], given: str, changed: str, same: str) -> None:
    assert main(["plan", *f"{SMALL} {given} --json".split(), f"--compare={changed}"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][1] == numbers(capsys, f"{SMALL} {same}")


def test_a_comparison_names_what_changed_where_labels_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\nmax-running=8: " in plan(capsys, f"{SMALL} --compare max-running=8")


def test_numbers_can_go_to_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    text = plan(capsys, f"{SMALL} --json {out}")
    assert "numbers written to" in text
    assert json.loads(out.read_text()) == numbers(capsys, SMALL)


# -- wrong input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", r"give --hbm-gib, .* or --tokens"),
        ("--tokens 200000 --weights-gib 3", r"--weights-gib .* give that too"),
        ("--hbm-gib 40 --weights-gib 64", r"--hbm-gib = 40: nothing is left .* lower --weights-gib"),
        ("--hbm-gib 40 --weights-gib 38 --reserve-gib 2", r"--reserve-gib 2: raise --hbm-gib"),
        ("--hbm-gib 1", r"64 request rows .*raise --hbm-gib or lower --max-running \(at most 47 fit\)"),
        ("--hbm-gib 0.001", r"1,073,741 bytes cannot hold .*\(not even one fits\)"),
        ("--hbm-gib nan", r"--hbm-gib: 'nan': a number of GiB"),
        ("--hbm-gib -3", r"--hbm-gib: "),
        (f"{SMALL} --tp 3", r"--tp = 3: the 64 attention heads"),
        (f"{SMALL} --tp 0", r"--tp: '0': an integer of at least 1"),
        (f"{SMALL} --context 2000000", r"--context = 2000000; 1 to 1048576"),
        ("--tokens 100000", r"--context = 131,072: .*raise --tokens, or lower --context to 99,960"),
        ("--hbm-gib 3 --context 1000000", r"--context = 1,000,000: .*lower --max-running, or lower --context to"),
        ("--hbm-gib 2 --context 1000000 --max-running 1", r"raise --hbm-gib, or lower --context to"),
        ("--tokens 5", r"--tokens = 5; an integer of at least 128"),
        (f"{SMALL} --c128-page-size 8", r"--c128-page-size = 8 on a3; a multiple of 16"),
        (f"{SMALL} --c128-page-size 24", r"--c128-page-size = 24; a power of two"),
        (f"{SMALL} --page-size 100", r"--page-size = 100; a multiple of 128"),
        (f"{SMALL} --page-size 128000000", r"--page-size = 128000000; at most 1048576 \(the model's positions\)"),
        (f"{SMALL} --c128-page-size 1099511627776", r"--c128-page-size = 1099511627776; at most 8192: one page"),
        (f"{SMALL} --max-running 100000000000", r"--max-running: '100000000000': an integer from 1 to 65,536"),
        ("--tokens 1000000000000000", r"--tokens: '1000000000000000': an integer from 1 to 274,877,906,944"),
        ("--hbm-gib 1e300", r"--hbm-gib: '1e300': a number of GiB, 0 to 16,384, is needed"),
        ("--hbm-gib 1e999999999", r"--hbm-gib: '1e999999999': a number of GiB"),
        ("--hbm-gib 4 --page-size 131072", r"lower --max-running .*, or lower --page-size \(131072; usual is 128\)"),
        ("--hbm-gib 4 --c128-page-size 8192", r"lower --c128-page-size \(8192; usual is 16\)"),
        ("--hbm-gib 0", r"--hbm-gib: '0': a number of GiB above 0 is needed"),
        (f"{SMALL} --draft-tokens 12", r"--draft-tokens = 12 .*at most --draft-tokens = 9"),
        (f"{SMALL} --spec none --draft-tokens 3", r"--draft-tokens = 3 without speculation"),
        (f"{SMALL} --swa-ratio 0.1 --swa-tokens 8192", r"--swa-ratio and --swa-tokens: give one"),
        (f"{SMALL} --swa-ratio 2", r"--swa-ratio: '2': a number above 0"),
        (f"{SMALL} --swa-tokens 100", r"--swa-tokens = 100; an integer of at least 2560"),
        (f"{SMALL} --max-running 0", r"--max-running: '0'"),
        (f"{SMALL} --model v5", r"model 'v5' is not known: give one of"),
        (f"{SMALL} --model nope.json", r"cannot read nope.json"),
        (f"{SMALL} --platform a9", r"--platform: invalid choice"),
        (f"{SMALL} --compare platform", r"--compare 'platform': .* not option=value"),
        (f"{SMALL} --compare platform=a9", r"--compare: argument --platform: invalid choice"),
        (f"{SMALL} --compare colour=red", r"--compare: unrecognized arguments: --colour=red"),
        (f"{SMALL} --compare json=x", r"--compare: unrecognized arguments: --json=x"),
        (f"{SMALL} --compare context=2000000", r"--compare 'context=2000000': --context = 2000000; 1 to"),
        (
            f"{SMALL} --json /no/such/folder/x.json",
            r"--json /no/such/folder/x.json: the folder /no/such/folder does not exist",
        ),
    ],
)
def test_wrong_input_names_the_option(capsys: pytest.CaptureFixture[str], line: str, told: str) -> None:
    assert re.search(told, refused(capsys, line))


def test_the_context_that_is_offered_fits(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--hbm-gib 3 --max-running 64"
    offered = re.findall(r"lower --context to ([\d,]+)", refused(capsys, f"{line} --context 1000000"))[0].replace(
        ",", ""
    )
    assert numbers(capsys, f"{line} --context {offered}")["requests"] == 1


def test_swa_holds_a_c128_group_and_a_request_at_least(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "--model tiny --tokens 16384 --context 4000 --swa-ratio 0.01"
    assert numbers(capsys, line)["swa_tokens"] == 2048 + 4 * 128
    assert numbers(capsys, f"{line} --c128-page-size 32")["swa_tokens"] == 4096 + 4 * 128
    monkeypatch.setattr(planning, "group_swa_floor", lambda config: 0)
    assert numbers(capsys, line)["swa_tokens"] < 2048
    assert group_swa_floor(CacheConfig(ModelSpec.load("tiny"), PlatformSpec.load("a3"))) == 2048 + 4 * 128


def test_a_wrong_budget_shows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of the table fail where the plan drops a family's bytes."""

    def less(config: CacheConfig, sizes: PoolSizes) -> Budget:
        real = budget_of(config, sizes)
        return replace(real, families={**real.families, "c128": replace(real.families["c128"], layers=1)})

    monkeypatch.setattr(planning, "budget_of", less)
    with pytest.raises(AssertionError):
        test_the_table_is_what_is_built(capsys, EXAMPLE)
