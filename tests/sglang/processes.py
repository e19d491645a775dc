"""Fresh Python processes with SGLang, each of which checks many things and prints them as one JSON object."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(script: str, platform: str | None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` with ``SGLANG_PLATFORM=platform`` (None: unset)."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SGLANG_")}
    if platform is not None:
        environment["SGLANG_PLATFORM"] = platform
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


def answer(script: str, platform: str | None, **variables: str) -> dict[str, Any]:
    """The JSON object that ``script`` prints last."""
    done = run(script, platform, **variables)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
