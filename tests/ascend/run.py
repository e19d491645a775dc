"""``make ascend``: prove the kernels whose sources changed, write docs/ascend.{json,md}; ``--all`` proves every one.

Exit status 0 when every Triton kernel of dsv4_npu/ops is proven, 1 when one is not, 2 when a tool is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from . import keys, report
from .toolchain import missing, versions

LIMIT_S = 3600
MESSAGE = 1000  # characters of a failure that are worth reading


def prove(op: str) -> dict[str, Any]:
    """The result of one op's proofs, made in a process of its own: a wild kernel cannot take the others along."""
    with tempfile.TemporaryDirectory(prefix="ascend-") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-X", "faulthandler", "-m", f"{__package__}.prove", op, str(result)]
        try:
            run = subprocess.run(command, cwd=keys.ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"failures": [f"{op}: not done after {LIMIT_S} s"]}
        if not result.is_file():
            return {"failures": [f"{op}: the process ended with {run.returncode}: {run.stderr[-3000:]}"]}
        outcome: dict[str, Any] = json.loads(result.read_text())
        if outcome["failures"] and run.stderr:
            outcome["failures"].append(run.stderr[-3000:])
        return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="prove every kernel, whether or not its source changed")
    parser.add_argument("ops", nargs="*", help="only these ops (folders of dsv4_npu/ops); default: all")
    options = parser.parse_args()
    if gaps := missing():
        print("make ascend cannot run; missing:", *gaps, sep="\n  ")
        return 2
    results = report.load()
    known = keys.kernel_ops()
    if unknown := [op for op in options.ops if op not in known]:
        print(f"no Triton kernel of that name: {', '.join(unknown)}; there are: {', '.join(known)}")
        return 2
    current = {op: keys.op_key(op) for op in known}
    wanted = options.ops or [op for op in known if options.all or results["ops"].get(op, {}).get("key") != current[op]]
    results["ops"] = {op: entry for op, entry in results["ops"].items() if op in known}
    failures: list[str] = []
    started = time.monotonic()
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        futures = {pool.submit(prove, op): op for op in wanted}
        for number, future in enumerate(as_completed(futures), 1):
            op, outcome = futures[future], future.result()
            verdict = "FAILED" if outcome["failures"] else f"{outcome['points']} points equal"
            print(f"[{number}/{len(wanted)}] {op}: {verdict} ({time.monotonic() - started:.0f} s)", flush=True)
            failures += outcome.pop("failures")
            results["ops"].pop(op, None)
            if verdict != "FAILED":
                results["ops"][op] = {"key": current[op], **outcome}
                results["tools"] = versions()
    report.save(results)
    print(f"{len(known) - len(wanted)} of {len(known)} ops unchanged since their proof\n")
    for op, entry in sorted(results["ops"].items()):
        print(*report.kernel_lines(op, entry), sep="\n")
    if not options.ops:
        failures += keys.stale()
    if failures:
        print("\nFAILED:", *(failure[:MESSAGE] for failure in failures), sep="\n  ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
