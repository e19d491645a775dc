"""Pages freed in flight, and the mirrors: one copy per flush, staging that is left alone, no read back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.alloc.epochs import Epochs
from dsv4_npu.alloc.state import FREE, FULL, QUARANTINED, ROW
from dsv4_npu.errors import CapacityError, InputError


def make(backend: str, device: str = "cpu", **sizes: Any) -> KVAllocator:
    base = {
        "page_size": 128,
        "c128_page_size": 1,
        "full_pages": 32,
        "swa_pages": 32,
        "c128_pages": 32,
        "request_rows": 4,
        "row_width": 1024,
    }
    return KVAllocator(AllocSpec(**{**base, **sizes}), device=device, backend=backend)  # type: ignore[arg-type]


def fill(alloc: KVAllocator, rid: object, length: int) -> int:
    row = alloc.open(rid)
    with alloc.transaction() as tx:
        tx.extend(row, length)
        tx.commit()
    alloc.commit(row, length)
    return row


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_page_waits_for_every_epoch_before_it(backend: str, data: st.DataObject) -> None:
    """Against a model that keeps, per freed page, the set of epochs that were in flight."""
    alloc = make(backend)
    flying: set[int] = set()
    waits: dict[int, set[int]] = {}
    rid = 0
    for _ in range(data.draw(st.integers(5, 40))):
        event = data.draw(st.sampled_from(["launch", "done", "open", "close"]))
        if event == "launch":
            flying.add(alloc.launch())
        elif event == "done" and flying:
            epoch = data.draw(st.sampled_from(sorted(flying)))
            flying.discard(epoch)
            alloc.done(epoch)
        elif event == "open":
            try:
                fill(alloc, rid, data.draw(st.integers(1, 400)))
            except CapacityError:
                continue
            rid += 1
        elif event == "close" and alloc.rows():
            row = data.draw(st.sampled_from(alloc.rows()))
            pages = alloc.state.block_table[row]
            for page in pages[pages > 0].tolist():
                waits[page] = set(flying)
            alloc.close(row)
        for page, epochs in waits.items():
            epochs &= flying
            state = alloc.state.page_state[FULL][page]
            if epochs:
                assert state == QUARANTINED
            elif not flying:
                assert state != QUARANTINED
        alloc.audit()


def test_pages_and_rows_come_back_after_the_epoch(backend: str) -> None:
    alloc = make(backend, full_pages=4, request_rows=1)
    row = fill(alloc, "a", 512)
    first, second = alloc.launch(), alloc.launch()
    alloc.close(row)
    with pytest.raises(CapacityError, match="request rows: need 1, free 0 of 1, waiting for an epoch 1"):
        alloc.open("b")
    alloc.done(second)
    assert alloc.state.page_state[ROW][row] == QUARANTINED
    alloc.done(first)
    assert alloc.state.page_state[ROW][row] == FREE
    fill(alloc, "b", 512)
    alloc.audit()


def test_with_nothing_in_flight_pages_return_at_once(backend: str) -> None:
    alloc = make(backend)
    alloc.done(alloc.launch())
    alloc.close(fill(alloc, "a", 512))
    assert alloc.usage()["FULL"][0] == 0


def test_epochs_are_ended_once() -> None:
    epochs = Epochs()
    epoch = epochs.launch()
    epochs.done(epoch)
    for wrong in (epoch, 7):
        with pytest.raises(InputError, match=f"epoch {wrong} is not in flight"):
            epochs.done(wrong)


class Crossings(TorchDispatchMode):
    """Counts operations whose input and output lie on different devices."""

    def __init__(self) -> None:
        super().__init__()
        self.to_device = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [one for one in (*args, out) if isinstance(one, torch.Tensor)]
        if {one.device.type for one in tensors} == {"cpu", "meta"}:
            assert out.device.type == "meta", f"{func} reads from the device"
            self.to_device += 1
        return out


def test_no_reads_and_one_copy_per_flush(backend: str) -> None:
    alloc = make(backend, "meta")
    rows = [fill(alloc, i, 300) for i in range(3)]
    with Crossings() as seen:
        alloc.flush()
        assert seen.to_device == 1
        batch = np.array(rows)
        alloc.decode_step(batch, 8, 4)
        alloc.flush()
        for _ in range(60):
            before, pages = seen.to_device, alloc.usage()["FULL"][0]
            alloc.decode_step(batch, 8, 4)
            alloc.commit_batch(batch, alloc.state.committed[batch] + 2)
            sent = alloc.flush()
            alloc.done(alloc.launch())
            assert seen.to_device - before == (sent > 0)
            assert (sent > 0) == (alloc.usage()["FULL"][0] > pages)
        for row in rows:
            alloc.evict_window(row)
            alloc.close(row)
        alloc.flush()
        alloc.flush()
    alloc.audit()
    assert alloc.mirrors.copies == seen.to_device


def test_steady_decode_sends_nothing(backend: str) -> None:
    alloc = make(backend)
    row = fill(alloc, "a", 200)
    alloc.decode_step(np.array([row]), 8, 4)
    alloc.flush()
    for _ in range(20):
        alloc.decode_step(np.array([row]), 8, 4)
        alloc.commit(row, alloc.committed(row) + 1)
        assert alloc.flush() == 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_staging_is_left_alone_until_its_epoch_is_done(backend: str, data: st.DataObject) -> None:
    alloc = make(backend, row_width=2048, full_pages=64, swa_pages=64, c128_pages=64)
    kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    flying: list[int] = []
    rid = 0
    for _ in range(data.draw(st.integers(3, 25))):
        event = data.draw(st.sampled_from(["change", "flush", "launch", "done"]))
        if event == "change":
            if len(alloc.rows()) < 3 and alloc.state.free(ROW):
                fill(alloc, rid, data.draw(st.integers(1, 1500)))
                rid += 1
            elif alloc.rows():
                alloc.close(alloc.rows()[0])
        elif event == "flush" and alloc.flush():
            buffer = alloc.mirrors._rotation[-1].buffer
            kept.setdefault(alloc.epochs.launched + 1, []).append((buffer, buffer.clone()))
        elif event == "launch":
            flying.append(alloc.launch())
        elif event == "done" and flying:
            alloc.done(flying.pop(data.draw(st.integers(0, len(flying) - 1))))
        horizon = alloc.epochs.horizon
        for epoch, buffers in kept.items():
            if epoch >= horizon:
                for buffer, content in buffers:
                    assert torch.equal(buffer, content)
        alloc.audit()


def test_mirrors_have_the_host_content(backend: str) -> None:
    alloc = make(backend)
    row = fill(alloc, "a", 700)
    alloc.evict_window(row)
    assert not torch.equal(alloc.mirrors.block_table, torch.from_numpy(alloc.state.block_table))
    alloc.flush()
    for mirror, table in (
        (alloc.mirrors.block_table, alloc.state.block_table),
        (alloc.mirrors.full_to_swa, alloc.state.full_to_swa),
        (alloc.mirrors.c128_table, alloc.state.c128_table),
    ):
        assert mirror.dtype == torch.int32
        assert torch.equal(mirror, torch.from_numpy(table))


def test_buffers_do_not_grow_without_bound(backend: str) -> None:
    alloc = make(backend)
    for i in range(300):
        alloc.close(fill(alloc, i, 200))
        alloc.flush()
    assert len(alloc.mirrors._rotation) <= 64
    alloc.audit()
