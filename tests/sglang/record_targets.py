"""Renews targets_by_release.json: ``python -m tests.sglang.record_targets WHEEL...``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dsv4_npu.sglang import static
from tests.sglang.test_versions import RECORD, resolved


def main(wheels: list[str]) -> None:
    record = {}
    for wheel in map(Path, wheels):
        version = wheel.name.split("-")[1]
        record[version] = resolved(static.reader(wheel), version)
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
