"""Our classes on the emulated NPU: what a decode costs there; the results of a CPU, though page ids arrive late."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sglang.processes import answer

SCRIPT = """
import json, random, sys
import torch
from sglang.srt.plugins import load_plugins

load_plugins()
torch.set_num_threads(1)
from tests.sglang import sides

sides.prepare()
import dsv4_npu.sglang.allocator
from dsv4_npu.emulation import device
from dsv4_npu.emulation.stream import EVENTS
from dsv4_npu.sglang import sampling_module

stub = sys.modules.pop("torch_npu")  # the stand-in of the emulated platform holds the place of a real one
device.activate()
sys.modules["torch_npu"] = stub
sampling_module.settle = lambda *_: None
out = {}


def events(call):
    before = EVENTS.copy()
    call()
    found = EVENTS.since(before)
    return {"reads": dict(found.reads), "in": found.copies_in, "out": found.copies_out, "waits": found.waits,
            "launches": dict(found.launches)}


side = sides.Side(True, full_pages=64, rows=4, device="npu")
reqs = side.open(3)
out["extend"] = events(lambda: side.extend(reqs, [2100, 125, 301]))
out["steady"] = events(lambda: side.decode(reqs))
out["c4"] = events(lambda: side.decode(reqs))
out["c128"] = events(lambda: side.decode(reqs))
out["page"] = events(lambda: side.decode(reqs))
out["window"] = events(lambda: side.evict_window(reqs[0]))
out["numbers"] = events(lambda: side.counts())
out["finish"] = events(lambda: side.finish(reqs[0]))
out["later"] = len(side.alloc._late)
out["accounting"] = events(lambda: out.setdefault("wrong", side.alloc.verify_byte_accounting()))
bundle = side.decode(reqs[1:])
out["types"] = sorted({str(getattr(bundle, name).dtype) for name in ("out_full_loc", "out_swa_loc", "out_c4_loc")})

pair = (sides.Side(True, full_pages=40, rows=5, context=8192),
        sides.Side(True, full_pages=40, rows=5, context=8192, device="npu"))
start = pair[0].counts()
rng, live, short = random.Random(3), [], 0
before = EVENTS.copy()
for _ in range(120):
    call = rng.random()
    if call < 0.25:
        got = [side.open(1) for side in pair]
        if got[0]:
            both = (got[0][0], got[1][0])
            end = rng.choice((1, 127, 128, 300, 1200))
            done = [side.extend([req], [end]) is not None for side, req in zip(pair, both)]
            assert done[0] == done[1]
            if done[0]:
                live.append(both)
            else:
                short += 1
                for side, req in zip(pair, both):
                    side.finish(req)
    elif call < 0.7 and live:
        done = [side.decode([both[i] for both in live]) is not None for i, side in enumerate(pair)]
        assert done[0] == done[1]
    elif call < 0.8 and live:
        both = rng.choice(live)
        for side, req in zip(pair, both):
            side.evict_window(req)
    elif live:
        both = live.pop(rng.randrange(len(live)))
        for side, req in zip(pair, both):
            side.finish(req)
    assert pair[0].counts() == pair[1].counts()
out["reads of all"] = dict(EVENTS.since(before).reads)
out["short"] = short
for both in live:
    rows = [side.table.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len].cpu()
            for side, req in zip(pair, both)]
    sides.Renaming().check(*rows, sides.PAGE)
    swa = [side.alloc.full_to_swa_index_mapping.cpu()[row.long()] for side, row in zip(pair, rows)]
    sides.Renaming().check(*swa, sides.PAGE)
    tables = [side.table.req_to_c128_sidecar.cpu()[req.kv.req_pool_idx] for side, req in zip(pair, both)]
    sides.Renaming().check(*tables, 1)
    truth = torch.from_numpy(pair[1].table.sidecar.table)
    assert torch.equal(pair[1].table.req_to_c128_sidecar.cpu(), truth)
for side, i in ((pair[0], 0), (pair[1], 1)):
    for both in live:
        side.finish(both[i])
    assert side.alloc.verify_byte_accounting() == []
    assert side.counts() == start
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return answer(SCRIPT, "dsv4_npu_emulated")


@pytest.mark.parametrize("call", ["extend", "steady", "c4", "c128", "page", "window", "numbers", "finish"])
def test_nothing_reads_or_waits_for_the_device(found: dict[str, Any], call: str) -> None:
    assert found[call]["reads"] == {}
    assert found[call]["waits"] == 0


def test_a_steady_decode_launches_no_kernel_of_ours_and_sends_little(found: dict[str, Any]) -> None:
    assert found["steady"]["launches"] == {}
    assert found["steady"]["in"] <= 3  # SGLang's own two (row numbers, lengths) and the requests that close C4
    assert found["page"]["launches"] == {}


def test_ids_of_freed_pages_arrive_when_somebody_asks(found: dict[str, Any]) -> None:
    assert found["finish"]["out"] == 2
    assert found["later"] == 3  # with the window eviction before
    assert found["accounting"]["waits"] == 3
    assert found["wrong"] == []


def test_slots_are_int32_as_npu_kernels_take_them(found: dict[str, Any]) -> None:
    assert found["types"] == ["torch.int32"]


def test_a_random_sequence_gives_what_a_cpu_gives(found: dict[str, Any]) -> None:
    assert found["short"] > 0  # pages ran short, so late ids had to be waited for
    assert set(found["reads of all"]) <= {"synchronize"}
