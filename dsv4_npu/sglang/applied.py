"""``python -m dsv4_npu.sglang.applied NAME``: what the plugin replaces in a process with that platform selected.

Prints one line, ``answer`` and JSON: the platform's class, and the state of every target.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def report(name: str) -> dict[str, Any]:
    """Load SGLang's plugins with platform ``name`` selected, and look at every target. Once per process."""
    before = os.environ.get("SGLANG_PLATFORM", "")
    os.environ["SGLANG_PLATFORM"] = name
    from sglang.srt.platforms import current_platform
    from sglang.srt.plugins import load_plugins

    from dsv4_npu.sglang.verify import targets_report

    load_plugins()
    states = [[one.target.purpose, one.target.theirs, one.state, one.detail] for one in targets_report()]
    return {"selected before": before, "platform": type(current_platform).__name__, "targets": states}


if __name__ == "__main__":
    print("\nanswer " + json.dumps(report(sys.argv[1])))
