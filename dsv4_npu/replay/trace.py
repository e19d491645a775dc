"""Request traces in the Mooncake format: one JSON object a line, prompts given as hashes of 512-token blocks.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, ..., 13]}

Equal hash ids stand for equal blocks, so requests that begin with the same ids share a prefix. An optional
``session_id`` (string or integer) marks the turns of one conversation.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dsv4_npu.errors import InputError
from dsv4_npu.reading import LARGEST, parse_json, shown

#: Tokens of a hashed block.
BLOCK: Final = 512
#: Largest hash id: the tokens of a block are derived from it in 64 bits.
MAX_HASH: Final = 2**53

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class TraceRequest:
    """One line of a trace. ``index`` counts requests in arrival order from 0; lengths count tokens, time is in ms."""

    index: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: I64
    session_id: Hashable = None


def load_trace(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """The first ``limit`` requests of a file, in arrival order; InputError names the line and the field.

    Nothing behind them is read.
    """
    try:
        with open(path, "rb") as lines:
            return parse_trace(_decoded(lines, str(path)), str(path), limit)
    except OSError as error:
        raise InputError(f"trace {path}: cannot be read: {error.strerror}") from error


def _decoded(lines: Iterable[bytes], name: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if line.startswith(codecs.BOM_UTF8):
            raise InputError(
                f"{name}, line {number}: starts with a UTF-8 byte order mark (EF BB BF); save the file as UTF-8 "
                "without it"
            )
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            where = f"{name}, line {number}"
            raise InputError(f"{where}: not UTF-8 text: {error.reason} at byte {error.start} of the line") from error


def parse_trace(lines: Iterable[str], name: str = "trace", limit: int | None = None) -> list[TraceRequest]:
    """Parse lines up to ``limit`` requests; those with equal timestamps keep their order. Blank lines are skipped."""
    found = sorted(itertools.islice(_parsed(lines, name), limit), key=lambda one: one[0])
    return [TraceRequest(index, *fields) for index, fields in enumerate(found)]


def _parsed(lines: Iterable[str], name: str) -> Iterator[tuple[float, int, int, I64, Hashable]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        data = parse_json(line, where, InputError)
        if not isinstance(data, dict):
            raise InputError(f"{where}: a {type(data).__name__}; a JSON object is needed")
        timestamp = _field(data, "timestamp", where)
        if isinstance(timestamp, bool) or not isinstance(timestamp, (int, float)) or not 0 <= timestamp <= LARGEST:
            raise InputError(
                f"{where}: timestamp = {shown(timestamp)}: a number of milliseconds from 0 to 2**53 is needed"
            )
        length = _positive(data, "input_length", where)
        yield (
            timestamp,
            length,
            _positive(data, "output_length", where),
            _hashes(data, length, where),
            _session(data, where),
        )


def _field(data: dict[str, Any], key: str, where: str) -> object:
    if key not in data:
        raise InputError(f"{where}: {key} is missing; the line has {sorted(data)}")
    return data[key]


def _positive(data: dict[str, Any], key: str, where: str) -> int:
    value = _field(data, key, where)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**40:
        raise InputError(f"{where}: {key} = {shown(value)}: an integer number of tokens from 1 to 2**40 is needed")
    return value


def _hashes(data: dict[str, Any], length: int, where: str) -> I64:
    ids = _field(data, "hash_ids", where)
    if not isinstance(ids, list):
        raise InputError(f"{where}: hash_ids = {shown(ids)}: a list of integers is needed")
    for position, value in enumerate(ids):
        if type(value) is not int or not 0 <= value <= MAX_HASH:
            raise InputError(f"{where}: hash_ids[{position}] = {shown(value)}: an integer 0 to 2**53 is needed")
    blocks = -(-length // BLOCK)
    if len(ids) != blocks:
        raise InputError(
            f"{where}: hash_ids has {len(ids)} entries: input_length = {length} in blocks of {BLOCK} tokens "
            f"needs {blocks}"
        )
    return np.array(ids, np.int64)


def _session(data: dict[str, Any], where: str) -> Hashable:
    session = data.get("session_id")
    if session is not None and (isinstance(session, bool) or not isinstance(session, (int, str))):
        raise InputError(f"{where}: session_id = {shown(session)}: a string or an integer is needed")
    return session


def prompt_tokens(request: TraceRequest, vocab: int) -> I32:
    """Token ids of a prompt, a fixed function of its hash ids: int32 ``[input_length]`` in ``[0, vocab)``."""
    places = request.hash_ids[:, None] * BLOCK + np.arange(BLOCK)
    return _tokens(places.ravel()[: request.input_length], vocab)


def output_tokens(request: TraceRequest, start: int, stop: int, vocab: int) -> I32:
    """Token ids of outputs ``[start, stop)`` of a request, which no prompt and no other request shares."""
    first = -((request.index + 1) << 24)
    return _tokens(np.arange(first + start, first + stop, dtype=np.int64), vocab)


def mix(values: U64) -> U64:
    """A fixed 64-bit mixing function (the finalizer of splitmix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _tokens(places: I64, vocab: int) -> I32:
    return (mix(places.view(np.uint64)) % np.uint64(vocab)).astype(np.int32)
