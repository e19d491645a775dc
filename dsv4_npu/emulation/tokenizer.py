"""Bytes as tokens: text in, text out, no vocabulary file."""

from __future__ import annotations

from pathlib import Path

from dsv4_npu.errors import InputError

BYTES = 256


def encode(text: str) -> list[int]:
    """UTF-8 bytes of ``text`` as token ids 0..255."""
    return list(text.encode("utf-8"))


def decode(tokens: list[int]) -> str:
    """Text of ``tokens``: printable ASCII as itself, every other id as ``<id>``.

    A randomly initialised model does not write UTF-8, so ids are shown rather than replaced.
    """
    return "".join(chr(t) if 32 <= t < 127 else f"<{t}>" for t in tokens)


def read_prompts(path: str | Path, name: str = "prompts file") -> list[str]:
    """Prompts of a text file: one per paragraph (separated by blank lines). Errors begin with ``name``.

    Raises:
        InputError: the file cannot be read or holds no text.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"{error.reason} at byte {error.start}"
        raise InputError(f"{name} {path}: {why}; a readable UTF-8 text file is needed") from error
    prompts = [part.strip() for part in text.split("\n\n") if part.strip()]
    if not prompts:
        raise InputError(f"{name} {path} holds no text; paragraphs separated by blank lines are needed")
    return prompts
