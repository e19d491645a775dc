"""An audit of the page ledger while it serves: off by default, sampled, and it only logs.

It is turned on by a file of the Python environment, ``<sys.prefix>/etc/dsv4_npu_audit.json``::

    {"every": 1000}

Every N-th call of the allocator then compares free lists, states, mappings and C128 counts with what the request rows
and the prefix tree name. All of it lies on the host: nothing waits for the device. What one audit costs grows with the
pages of the pools; docs/sglang.md has a measurement. Violations are logged as errors; the server goes on.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsv4_npu.errors import ConfigError
from dsv4_npu.reading import parse_json, shown

logger = logging.getLogger(__name__)
#: Violations that one audit spells out.
SHOWN = 5


def settings_file() -> Path:
    """Where the environment's setting lies."""
    return Path(sys.prefix) / "etc" / "dsv4_npu_audit.json"


def configured_every() -> int:
    """The N of the settings file, 0 without one. Raises ConfigError for other content."""
    path = settings_file()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); mend or remove it") from error
    content = parse_json(text, str(path), ConfigError)
    if not (isinstance(content, dict) and list(content) == ["every"]):
        raise ConfigError(f'{path} holds {shown(content)}; allowed: one entry, {{"every": <calls>}}')
    return _checked(content["every"], f"{path}: every")


def _checked(every: object, name: str) -> int:
    if type(every) is not int or every < 0:
        raise ConfigError(f"{name} = {shown(every)}: a number of calls of at least 1, or 0 for no audit, is needed")
    return every


@dataclass
class ShadowAudit:
    """Runs ``check`` in every ``every``-th :meth:`step`; 0 never does.

    ``check`` returns violations, each with a text. ``audits``, ``violations`` and ``seconds`` say what was done.
    """

    check: Callable[[], Sequence[object]]
    every: int = 0
    audits: int = 0
    violations: int = 0
    seconds: float = 0.0
    _steps: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        _checked(self.every, "every")

    def step(self) -> int:
        """Count one call of the allocator; how many violations the audit found if it was its turn, else 0."""
        if not self.every:
            return 0
        self._steps += 1
        if self._steps % self.every:
            return 0
        began = time.perf_counter()
        found = self.check()
        self.seconds += time.perf_counter() - began
        self.audits += 1
        self.violations += len(found)
        for violation in found[:SHOWN]:
            logger.error("shadow audit in call %d: %s", self._steps, violation)
        if len(found) > SHOWN:
            logger.error("shadow audit in call %d: %d violations more", self._steps, len(found) - SHOWN)
        return len(found)
