"""JSON that comes from outside: what cannot be read is refused by name, with where it stands."""

from __future__ import annotations

import json
from typing import Any

from dsv4_npu.errors import Dsv4NpuError

#: Integers from files and options stay below this: what is computed from them fits 64 bits.
LARGEST = 2**53


def parse_json(text: str, where: str, error: type[Dsv4NpuError]) -> Any:
    """The value of one JSON text. ``where`` begins the message of ``error``, which gives the place inside the text.

    Raises ``error``: no JSON, nested too deeply, or a number of more digits than Python converts.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as found:
        line = f"line {found.lineno}, " if "\n" in text.strip() else ""
        raise error(f"{where}: not valid JSON: {found.msg} ({line}column {found.colno})") from found
    except ValueError as found:
        raise error(f"{where}: a number has too many digits; integers up to 2**53 are read") from found
    except RecursionError as found:
        raise error(f"{where}: lists or objects are nested too deeply to be read") from found


def shown(value: object, longest: int = 60) -> str:
    """``repr`` for a message: cut after ``longest`` characters; never an error itself, however large a number is."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**longest:
        return f"a number of {int(value.bit_length() * 0.30103)} digits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= longest else text[: longest - 1] + "…"
