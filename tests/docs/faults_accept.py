"""Faults around an accept: rows, slots, positions and lengths taken for each other."""

from __future__ import annotations

import numpy as np
import torch

from dsv4_npu import ops
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec
from dsv4_npu.spec import VerifyResult, accepted_rows, plan_commit
from tests.docs.faults import allocator, fault, filled, life_on, refused, serve

#: Slots of the verify rows of two requests of D = 4, and their lengths before it.
WINDOW = np.array([[42080, 42081, 42082, 42083], [768, 769, 770, 771]])
SEQ_LENS = np.array([4096, 512])


def committed(rows: list[list[int]]) -> list[str]:
    return refused(lambda: plan_commit(WINDOW, SEQ_LENS, rows))


@fault("slots-for-rows")
def _(planted: bool, backend: str) -> list[str]:
    rows = [0, 1, 2]
    return committed([WINDOW[0, rows].tolist() if planted else rows, [4]])


@fault("rows-without-request")
def _(planted: bool, backend: str) -> list[str]:
    return committed([[0, 1, 2], [0, 1] if planted else [4, 5]])


@fault("index-by-width")
def _(planted: bool, backend: str) -> list[str]:
    accept_index = [0, 1, 2, -1]
    return committed([accept_index if planted else accept_index[:3], [4]])


@fault("drafts-for-length")
def _(planted: bool, backend: str) -> list[str]:
    accept_token_num = torch.tensor([2, 0], dtype=torch.int32)
    index = torch.tensor([[0, 1, 2, -1], [4, -1, -1, -1]], dtype=torch.int32)
    lens = accept_token_num if planted else accept_token_num + 1
    return refused(lambda: accepted_rows(VerifyResult(torch.zeros(8, dtype=torch.int32), index, lens)))


@fault("run-too-long")
def _(planted: bool, backend: str) -> list[str]:
    life = life_on(allocator(backend, verify_width=4))
    request = serve(life, life.admit("chat", [1] * 200, 40))
    return refused(lambda: serve(life, request, runs=[[1, 2, 3, 4, 5] if planted else [1, 2, 3, 4]]))


@fault("slot-for-position")
def _(planted: bool, backend: str) -> list[str]:
    alloc = allocator(backend)
    filled(alloc, "mail", 300)
    row = filled(alloc, "chat", 200, allocated=256)
    slots = alloc.slots(row, 200, 203).out_full
    return refused(lambda: alloc.commit(row, int(slots[-1]) + 1 if planted else 203))


@fault("clear-too-wide")
def _(planted: bool, backend: str) -> list[str]:
    state, one = torch.zeros(1, 2 * 256, 8), torch.ones(1, dtype=torch.int64)
    ring = 128 if planted else 256
    return refused(lambda: ops.clear_c128_draft_states_(state, one, 127 * one, one, ring, 4, backend="ref"))


@fault("verify-too-wide")
def _(planted: bool, backend: str) -> list[str]:
    speculation = SpeculationSpec("chain", 10 if planted else 9)
    return refused(lambda: CacheConfig(ModelSpec.load("v4_flash"), PlatformSpec.load("a3"), speculation))


@fault("row-too-narrow")
def _(planted: bool, backend: str) -> list[str]:
    model, platform = ModelSpec.load("v4_flash"), PlatformSpec.load("a3")
    width = 2048 if planted else 2176
    speculation = SpeculationSpec("chain", 3)
    return refused(lambda: CacheConfig(model, platform, speculation, context_len=2048, row_width=width))
