"""Parsing of traces, tokens of prompts, and the simulated acceptance."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu.errors import ConfigError, InputError
from dsv4_npu.replay.acceptance import SimulatedAcceptance
from dsv4_npu.replay.trace import BLOCK, load_trace, output_tokens, parse_trace, prompt_tokens

GOOD: dict[str, Any] = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [7, 8]}


def line(**changes: Any) -> str:
    data = {**GOOD, **changes}
    return json.dumps({key: value for key, value in data.items() if value is not ...})


def test_requests_come_in_arrival_order_and_ties_keep_the_order_of_the_file() -> None:
    trace = parse_trace(
        [line(timestamp=9, hash_ids=[1, 2]), "\n", line(timestamp=2, hash_ids=[3, 4]), line(timestamp=2)]
    )
    assert [(one.index, one.timestamp, one.hash_ids.tolist()) for one in trace] == [
        (0, 2, [3, 4]),
        (1, 2, [7, 8]),
        (2, 9, [1, 2]),
    ]


def test_a_limit_reads_no_further() -> None:
    def lines() -> Iterator[str]:
        yield line(timestamp=9)
        yield line(timestamp=2)
        raise AssertionError("the third line was read")

    assert [one.timestamp for one in parse_trace(lines(), limit=2)] == [2, 9]
    assert [one.timestamp for one in parse_trace([line(timestamp=9), "{"], limit=1)] == [9]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ("{", "not valid JSON: Expecting property name enclosed in double quotes (column 2)"),
        ("[" * 100000, "nested too deeply"),
        ("[" + "9" * 5000 + "]", "a number has too many digits"),
        (line(timestamp=10**400), "timestamp = a number of 400 digits"),
        (line(timestamp=1e300), "timestamp = 1e+300: a number of milliseconds from 0 to 2**53"),
        (line(output_length=10**400), "output_length = a number of 400 digits"),
        ("[1]", "a list; a JSON object is needed"),
        *((line(**{key: ...}), f"{key} is missing") for key in GOOD),
        (line(timestamp=-1), "timestamp = -1"),
        (line(timestamp="now"), "timestamp = 'now'"),
        (line(timestamp=True), "timestamp = True"),
        (line(input_length=0), "input_length = 0"),
        (line(input_length=7.5), "input_length = 7.5"),
        (line(output_length=-3), "output_length = -3"),
        (line(output_length=None), "output_length = None"),
        (line(hash_ids=7), "hash_ids = 7"),
        (line(hash_ids=[7, "x"]), "hash_ids[1] = 'x'"),
        (line(hash_ids=[-7, 1]), "hash_ids[0] = -7"),
        (line(hash_ids=[7, True]), "hash_ids[1] = True"),
        (line(hash_ids=[7]), "hash_ids has 1 entries: input_length = 700 in blocks of 512 tokens needs 2"),
        (line(session_id=[1]), "session_id = [1]"),
    ],
)
def test_a_malformed_line_is_named_with_its_field(bad: str, field: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_trace([line(), bad], name="some.jsonl")
    assert str(caught.value).startswith("some.jsonl, line 2: ")
    assert str(caught.value).count("line ") - str(caught.value).count("the line has") == 1
    assert field in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.jsonl: cannot be read"):
        load_trace(tmp_path / "nothing.jsonl")
    good = (line() + "\n").encode()
    (tmp_path / "bytes.jsonl").write_bytes(3000 * good + b"\xff\xfe{}")
    with pytest.raises(InputError, match=r"bytes\.jsonl, line 3001: not UTF-8 text: .* at byte 0 of the line"):
        load_trace(tmp_path / "bytes.jsonl")
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + good)
    with pytest.raises(InputError, match=r"bom\.jsonl, line 1: starts with a UTF-8 byte order mark .* without it"):
        load_trace(tmp_path / "bom.jsonl")


@given(
    shared=st.integers(0, 4),
    tails=st.tuples(st.integers(1, 1000), st.integers(1, 1000)),
    vocab=st.integers(64, 2**31 - 1),
)
@settings(max_examples=50, deadline=None)
def test_prompts_share_exactly_the_blocks_with_equal_hashes(shared: int, tails: tuple[int, int], vocab: int) -> None:
    prompts = []
    for which, tail in enumerate(tails):
        length = shared * BLOCK + tail
        ids = [*range(shared), *(100 * (which + 1) + i for i in range(-(-tail // BLOCK)))]
        (request,) = parse_trace([line(input_length=length, hash_ids=ids)])
        tokens = prompt_tokens(request, vocab)
        assert tokens.dtype == np.int32
        assert len(tokens) == length
        assert tokens.min() >= 0
        assert tokens.max() < vocab
        prompts.append(tokens)
    end = shared * BLOCK
    assert np.array_equal(prompts[0][:end], prompts[1][:end])
    both = min(tails)
    if both >= 16:
        assert not np.array_equal(prompts[0][end : end + both], prompts[1][end : end + both])


def test_outputs_differ_between_requests_and_do_not_depend_on_the_chunk() -> None:
    first, second = parse_trace([line(), line()])
    whole = output_tokens(first, 0, 100, 129280)
    assert np.array_equal(whole[30:50], output_tokens(first, 30, 50, 129280))
    assert (whole == output_tokens(second, 0, 100, 129280)).sum() < 5


def test_acceptance_has_the_distribution_it_names_and_ignores_the_batch() -> None:
    model = SimulatedAcceptance(seed=3, rate=0.7, width=4)
    requests, positions = np.arange(40000) % 200, np.arange(40000) // 200 * 7
    lens = model.lengths(requests, positions)
    counts = np.bincount(lens, minlength=5)[1:] / len(lens)
    assert counts == pytest.approx([0.3, 0.21, 0.147, 0.343], abs=0.012)
    order = np.random.default_rng(0).permutation(len(lens))[:500]
    assert np.array_equal(lens[order], model.lengths(requests[order], positions[order]))
    other = SimulatedAcceptance(seed=4, rate=0.7, width=4).lengths(requests, positions)
    assert (other == lens).mean() < 0.5


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 1), (1.0, 6)])
def test_acceptance_at_its_ends(rate: float, expected: int) -> None:
    model = SimulatedAcceptance(0, rate, 6)
    assert set(model.lengths(np.arange(1000), np.arange(1000)).tolist()) == {expected}
    assert "SIMULATED" in model.text


def test_acceptance_refuses_what_is_no_probability() -> None:
    with pytest.raises(ConfigError, match=r"acceptance rate = 1\.5"):
        SimulatedAcceptance(0, 1.5, 4)
    assert "no speculation" in SimulatedAcceptance(0, 0.7, 1).text
