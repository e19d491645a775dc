"""What is true of a request, whatever the host knows of it, and what plain decoding would give."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.lifecycle.device import chain, next_token


@dataclass(frozen=True)
class Shape:
    """Sizes of a world."""

    owner: str = "swa_page"
    c128_page: int = 1
    width: int = 4
    full: int = 40
    swa: int = 26
    c128: int = 40
    rows: int = 4
    row_width: int = 1024
    capture: bool = True
    cache: bool = True
    backend: str = "python"


@dataclass
class Truth:
    """What the device knows of a request: all tokens, their tags, and the next position."""

    tokens: list[int]
    tags: list[int] = field(default_factory=list)
    length: int = 0
    done: bool = False
    results: dict[int, list[int]] = field(default_factory=dict)

    def tag_array(self, tokens: list[int]) -> np.ndarray:
        """Tags of ``tokens``, which begin like the known ones as far as these are valid."""
        tags = self.tags
        for token in tokens[len(tags) :]:
            tags.append(chain(tags[-1] if tags else 1, token))
        return np.array(tags[: len(tokens)], np.int64)


def oracle(prompt: list[int], limit: int, stops: frozenset[int]) -> list[int]:
    """What plain decoding gives."""
    tag = 1
    for token in prompt:
        tag = chain(tag, token)
    out: list[int] = []
    while len(out) < limit:
        out.append(next_token(tag))
        if out[-1] in stops:
            break
        tag = chain(tag, out[-1])
    return out
