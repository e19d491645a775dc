"""``dsv4-npu selftest``: every op on a device against its oracle, and one JSON file to send back."""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dsv4_npu import __version__
from dsv4_npu.budget import sizes_for_tokens
from dsv4_npu.compressor.fused import fused_operator, installed_compressor
from dsv4_npu.compressor.probe import Operator, reference_operator
from dsv4_npu.config import CacheConfig, PlatformSpec, SpeculationSpec
from dsv4_npu.doctor.facts import installed, toolkit
from dsv4_npu.doctor.rules import kind_of
from dsv4_npu.emulation import device as emulated
from dsv4_npu.errors import InputError, UnavailableError
from dsv4_npu.options import (
    DEFAULT_DRAFTS,
    MOST_TOKENS,
    check_outputs,
    drafts_for,
    file_name,
    model_for,
    options_named,
    share_above_zero,
    whole,
    widened,
    writing,
)
from dsv4_npu.selftest.checks import (
    FAILED,
    PASSED,
    SKIPPED,
    Result,
    as_data,
    build_pools,
    probe_compressors,
    run_cases,
    table,
)
from dsv4_npu.selftest.timing import Timing, copy_bandwidth, timings

SCHEMA = "dsv4_npu.selftest/1"
EMULATED = "EMULATED on a CPU: no NPU was used"
#: Share of the planned tokens that are allocated where nothing is said: all on an NPU, few elsewhere.
_FRACTION = {True: 1.0, False: 0.01}


@dataclass(frozen=True)
class Target:
    """What is tested. ``hardware``: a real NPU; ``emulated``: the npu device of the emulation; ``kind``: a platform."""

    device: torch.device
    hardware: bool = False
    emulated: bool = False
    kind: str = "a3"

    @property
    def words(self) -> str:
        """The name that every output gives it."""
        return f"{self.device} ({EMULATED})" if self.emulated else str(self.device)


def device_name(text: str) -> str:
    """An argparse type: cpu, npu or npu:N."""
    if not re.fullmatch(r"cpu|npu(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(f"{text!r}: cpu, npu or npu:0 is needed")
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``selftest``."""
    add = parser.add_argument
    add(
        "--device",
        type=device_name,
        default="cpu",
        help="cpu (default), npu or npu:N; without torch_npu an emulated npu, which every output names so",
    )
    add(
        "--json",
        type=file_name,
        metavar="OUT",
        default=Path("dsv4-npu-selftest.json"),
        help="the file to send back (default: dsv4-npu-selftest.json)",
    )
    add("--ops", nargs="+", metavar="OP", help="only cases of ops whose name begins so; no pools, no probe")
    add("--no-timings", action="store_true", help="leave the timings out (the emulated npu has none)")
    add("--model", default="v4_flash", help="model of the pools (default: v4_flash)")
    kinds = "rows and ownership (default: the NPU's kind, else a3)"
    add("--platform", choices=("a2", "a3", "a5", "cpu"), help=kinds)
    add("--spec", default="chain", choices=tuple(DEFAULT_DRAFTS), help="speculation of the pools (default: chain)")
    add("--tokens", type=whole(1, MOST_TOKENS), default=2**20, metavar="N", help="planned tokens (default: 1048576)")
    add("--max-running", type=whole(1, 4096), default=64, metavar="N", help="planned request slots (default: 64)")
    add(
        "--fraction",
        type=share_above_zero,
        metavar="F",
        help="share of the planned pools that is allocated (default: 1 on an NPU, 0.01 elsewhere)",
    )


def run(args: argparse.Namespace) -> int:
    """Test, print what failed, write the file; exit status 0 only if nothing failed."""
    check_outputs(("--json", args.json))
    console = widened(Console(highlight=False))
    target = find_target(args.device)
    args.platform = args.platform or target.kind
    with options_named():
        pools = _planned(args, target.hardware)
    console.print(f"selftest of dsv4-npu {__version__} on {target.words}", soft_wrap=True)
    torch.manual_seed(0)
    with console.status("selftest") as status:
        report = examine(target, pools, args, tell=status.update)
    with writing("--json", args.json):
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _show(console, report)
    console.print(f"every number is in {args.json}: please send it back", soft_wrap=True)
    return 0 if report["verdict"]["failed"] == 0 else 1


def find_target(name: str) -> Target:
    """The device; the emulated one for "npu" only where torch_npu is not installed at all.

    Raises UnavailableError where torch_npu is installed but does not work: a broken set-up must not pass as emulated.
    """
    if name == "cpu":
        return Target(torch.device("cpu"))
    if emulated.is_active() or importlib.util.find_spec("torch_npu") is None:
        if name not in ("npu", "npu:0"):
            raise InputError(f"--device {name}: there is one emulated npu; npu or npu:0 is needed")
        emulated.activate()
        return Target(torch.device("npu", 0), emulated=True)
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        raise UnavailableError(
            f"--device {name}: torch_npu is installed but cannot be imported ({type(error).__name__}: {error}); "
            "`dsv4-npu doctor --for serving` says what mends it"
        ) from error
    backend = getattr(torch, "npu", None)
    if backend is None or not backend.is_available():
        raise UnavailableError(f"--device {name}: torch_npu sees no device; check `npu-smi info`")
    device = torch.device(name)
    backend.set_device(device)
    return Target(device, hardware=True, kind=kind_of(backend.get_device_name(device)) or "a3")


def examine(
    target: Target,
    pools: Sequence[tuple[CacheConfig, float]],
    args: argparse.Namespace,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The whole report as plain data. ``tell`` hears what runs: a kernel's first call may compile for a minute."""
    cases = [one for one in table() if not args.ops or one.op.removeprefix("sampling.").startswith(tuple(args.ops))]
    if not cases:
        raise InputError(f"--ops {' '.join(args.ops)}: no op begins so; {', '.join(sorted({c.op for c in table()}))}")
    results: list[Result] = []
    for number, case in enumerate(cases, 1):
        tell(f"{number} of {len(cases)}: {case.op}: {case.name}")
        results += run_cases(target.device, target.emulated, None, [case])
    if not args.ops:
        tell("the compressor and the pools")
        results += probe_compressors(_operator(target, args.platform), target.device)
        results += [_build(config, share, target, args.tokens) for config, share in pools]
    measured: list[Timing] = []
    bandwidth = None
    if not (args.no_timings or args.ops or target.emulated):
        tell("timings")
        bandwidth = copy_bandwidth(target.device)
        measured = list(timings(target.device, bandwidth))
    count = {outcome: sum(one.outcome == outcome for one in results) for outcome in (PASSED, FAILED, SKIPPED)}
    return {
        "schema": SCHEMA,
        "device": target.words,
        "hardware": target.hardware,
        "emulated": target.emulated,
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(target),
        "versions": {"python": platform.python_version(), "dsv4-npu": __version__, "CANN": toolkit()[1], **installed()},
        "verdict": {"cases": len(results), **count},
        "results": as_data(results),
        "copy_bandwidth_bytes_per_s": bandwidth,
        "timings": [asdict(one) for one in measured],
    }


def machine(target: Target) -> dict[str, Any]:
    """The host and the device."""
    found: dict[str, Any] = {"system": platform.platform(), "processor": platform.machine()}
    if target.hardware:
        found["npu"] = torch.npu.get_device_name(target.device)  # type: ignore[attr-defined]
        found["npus"] = torch.npu.device_count()  # type: ignore[attr-defined]
    return found


def _planned(args: argparse.Namespace, hardware: bool = False) -> list[tuple[CacheConfig, float]]:
    """The configuration at full size (checked without memory) and at the share that is allocated."""
    model, _ = model_for(args.model, args.spec, "tested with")
    config = CacheConfig(
        model,
        PlatformSpec.load(args.platform),
        SpeculationSpec(args.spec, drafts_for(args.spec, None, model)),
        context_len=min(131072, model.max_positions),
        request_rows=args.max_running,
    )
    sizes_for_tokens(config, args.tokens)
    return [(config, 0.0), (config, args.fraction or _FRACTION[hardware])]


def _build(config: CacheConfig, share: float, target: Target, tokens: int) -> Result:
    """The planned pools without memory (``share`` 0), or a share of them on the device."""
    if not share:
        return build_pools(config, sizes_for_tokens(config, tokens), "meta")
    rows = max(1, int(config.request_rows * share))
    part = CacheConfig(
        config.model,
        config.platform,
        config.speculation,
        context_len=config.context_len,
        request_rows=rows,
    )
    return build_pools(part, sizes_for_tokens(part, max(config.page, int(tokens * share))), target.device)


def _operator(target: Target, kind: str) -> Operator:
    """The fused compressor on an NPU, this package's own elsewhere."""
    if not target.hardware:
        return reference_operator
    by_request = PlatformSpec.load(kind).c4_state_owner == "request"
    try:
        return fused_operator(installed_compressor(by_request), 4096, by_request)
    except UnavailableError as error:
        message = str(error)

    def missing(batch: object) -> None:
        raise UnavailableError(message)

    return missing


def _show(console: Console, report: Mapping[str, Any]) -> None:
    by_op: dict[str, list[Mapping[str, Any]]] = {}
    for one in report["results"]:
        by_op.setdefault(one["op"], []).append(one)
    for op, results in by_op.items():
        passed = sum(one["outcome"] == PASSED for one in results)
        skipped = sum(one["outcome"] == SKIPPED for one in results)
        text = f"{op:<46} {passed} of {len(results) - skipped} passed" + (f", {skipped} skipped" if skipped else "")
        console.print(text, soft_wrap=True)
    for one in report["results"]:
        if one["outcome"] == FAILED:
            console.print(f"[red]FAILED[/red] {one['op']}: {one['case']}: {one['detail']}", soft_wrap=True)
        elif one["op"] in ("compressor", "pools"):
            console.print(f"{one['case']}: {one['detail']}", soft_wrap=True)
    if report["timings"]:
        speed = report["copy_bandwidth_bytes_per_s"] / 1e9
        console.print(f"µs per call on {report['device']}, and the floor of its bytes at {speed:.1f} GB/s (a copy)")
        for one in report["timings"]:
            line = f"{one['op']:<40} {one['call_us']:>10.1f} {one['floor_us']:>9.1f}  {one['size']}"
            console.print(line, soft_wrap=True)
    verdict = report["verdict"]
    counts = (
        f"{verdict['passed']} of {verdict['cases']} passed, {verdict['failed']} failed, {verdict['skipped']} skipped"
    )
    console.print(f"{counts} on {report['device']}", soft_wrap=True)
