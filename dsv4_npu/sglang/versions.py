"""The SGLang releases that this room knows, and what happens with another one.

The replaced classes are SGLang's inner ones, which no release promises to keep, so an unknown release is refused. The
one way round is a file that belongs to the Python environment, ``<sys.prefix>/etc/dsv4_npu_sglang.json``::

    {"accept_sglang": "0.5.24"}

It accepts exactly that release; every target must still be found and replaced, else the server does not start.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

from dsv4_npu.errors import ConfigError, UnavailableError

#: Release: what is known of it.
KNOWN = {
    "0.5.23": "proved by running its engine on a CPU",
    "0.5.22": "every target found and replaced in a process; its engine was not run",
}


def override_file() -> Path:
    """Where the environment's override lies."""
    return Path(sys.prefix) / "etc" / "dsv4_npu_sglang.json"


def installed() -> str | None:
    """The version of the installed SGLang, None without one. SGLang is not imported."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def accepted() -> str | None:
    """The release that the override accepts, None without the file.

    Raises ConfigError if the file does not hold the one entry ``accept_sglang`` with a version.
    """
    path = override_file()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); mend or remove it") from error
    if not (isinstance(content, dict) and list(content) == ["accept_sglang"]):
        raise ConfigError(f'{path} holds {content!r}; allowed: one entry, {{"accept_sglang": "<version>"}}')
    version = content["accept_sglang"]
    if not (isinstance(version, str) and version):
        raise ConfigError(f"{path}: accept_sglang is {version!r}; allowed: a version such as '0.5.24'")
    return version


def check(version: str | None = None) -> str:
    """What is known of ``version`` (default: the installed one).

    Raises UnavailableError without SGLang and for a release that is neither known nor accepted.
    """
    version = installed() if version is None else version
    known = ", ".join(KNOWN)
    if version is None:
        raise UnavailableError(
            f"SGLang is not installed here; known releases: {known} (pip install --no-deps sglang==0.5.23)"
        )
    if version in KNOWN:
        return KNOWN[version]
    if accepted() == version:
        return f"accepted by {override_file()}; not tested"
    raise UnavailableError(
        f"SGLang {version} is unknown to this dsv4_npu; known: {known}. Install one of these, or, to try {version} at "
        f'your own risk, write {{"accept_sglang": "{version}"}} to {override_file()} (docs/sglang.md)'
    )
