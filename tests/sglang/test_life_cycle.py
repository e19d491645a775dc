"""SGLang's requests, radix cache, release, retraction and eviction on our classes, beside the same on its own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.sglang.serving import Server
from tests.sglang.sides import GROUP, PAGE, Renaming, prepare

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def _prepared() -> None:
    prepare()


class Twins:
    """Two servers in step; each request lives on both."""

    def __init__(self, **sizes: Any) -> None:
        self.servers = (Server(False, **sizes), Server(True, **sizes))
        self.running: list[tuple[Any, Any]] = []

    def each(self, call: Any, pair: tuple[Any, Any]) -> list[Any]:
        return [call(server, req) for server, req in zip(self.servers, pair, strict=True)]

    def check(self) -> None:
        theirs, ours = self.servers
        assert theirs.counts() == ours.counts()
        assert theirs.tree() == ours.tree()
        full, swa, c128 = Renaming(), Renaming(), Renaming()
        for pair in self.running:
            lengths = {req.kv.kv_allocated_len for req in pair}
            assert len(lengths) == 1
            (length,) = lengths
            rows = self.each(lambda s, r, n=length: s.table.req_to_token[r.kv.req_pool_idx, :n].long(), pair)
            full.check(*rows, PAGE)
            mapped = [s.alloc.translate_loc_from_full_to_swa(row) for s, row in zip(self.servers, rows, strict=True)]
            swa.check(*mapped, PAGE)
            c128.check(*self.each(lambda s, r: s.table.req_to_c128_sidecar[r.kv.req_pool_idx], pair), 1)
        assert ours.alloc.verify_byte_accounting() == []


@pytest.mark.parametrize("seed", range(4))
def test_random_lives_agree(seed: int) -> None:
    rng = random.Random(seed)
    twins = Twins(full_pages=192, rows=6, context=16384)
    start = twins.servers[1].counts()
    texts = [[rng.randrange(1000) for _ in range(7000)] for _ in range(2)]
    waiting: list[tuple[Any, Any]] = []
    hits = retracted = 0
    for number in range(60):
        call = rng.random()
        if call < 0.35 and len(twins.running) < 4:
            ids = rng.choice(texts)[: rng.choice((50, 300, 2100, 4200, 5000))] + [number] * rng.randrange(300)
            if waiting:
                pair = waiting.pop()
                twins.each(lambda s, r: s.readmit(r), pair)
            else:
                pair = tuple(server.request(str(number), ids) for server in twins.servers)
            assert pair[0].prefix_len == pair[1].prefix_len
            hits += pair[0].prefix_len > 0
            whole = len(pair[0].full_untruncated_fill_ids)
            for end in [*range(pair[0].prefix_len + 2048, whole, 2048), whole]:
                twins.each(lambda s, r, end=end: s.prefill(r, end), pair)
            twins.running.append(pair)
        elif call < 0.75 and twins.running:
            for _ in range(rng.choice((1, 5, 130))):
                for i, server in enumerate(twins.servers):
                    server.step([pair[i] for pair in twins.running])
        elif call < 0.85 and twins.running:
            twins.each(lambda s, r: s.evict_swa(r), rng.choice(twins.running))
        elif call < 0.9:
            amount = rng.choice((128, 4096))
            assert twins.servers[0].evict(amount) == twins.servers[1].evict(amount)
        elif call < 0.94 and twins.running:
            pair = twins.running.pop(rng.randrange(len(twins.running)))
            twins.each(lambda s, r: s.retract(r), pair)
            waiting.append(pair)
            retracted += 1
        elif twins.running:
            pair = twins.running.pop(rng.randrange(len(twins.running)))
            keep = rng.random() < 0.7
            twins.each(lambda s, r, keep=keep: s.end(r, keep), pair)
        twins.check()
    assert hits
    for pair in twins.running:
        twins.each(lambda s, r: s.end(r), pair)
    twins.running.clear()
    assert twins.servers[0].evict() == twins.servers[1].evict()
    twins.check()
    assert twins.servers[1].counts() == start


def test_a_prefix_is_shared_by_complete_c128_pages() -> None:
    server = Server(True, full_pages=192, rows=6)
    ids = list(range(5000))
    first = server.request("a", ids)
    server.prefill(first)
    server.end(first)
    second = server.request("b", ids[:4500] + [1] * 500)
    assert second.prefix_len == 2 * GROUP
    server.prefill(second)
    counts = server.alloc.c128_page_refcount
    row = server.table.sidecar.table[second.kv.req_pool_idx]
    assert counts[row[:2].tolist()].tolist() == [2, 2]
    assert counts[row[2]] == 1
    server.end(second, checkpoint=False)
    assert server.evict() == 2 * GROUP
    assert server.alloc.verify_byte_accounting() == []


def test_a_retracted_request_comes_back_and_ends_with_nothing_held() -> None:
    server = Server(True, full_pages=96, rows=4)
    start = server.counts()
    req = server.request("a", list(range(3000)))
    server.prefill(req)
    for _ in range(40):
        server.step([req])
    server.retract(req)
    assert server.counts() == start
    server.readmit(req)
    server.prefill(req)
    assert req.kv.kv_allocated_len == 3040
    server.end(req)
    server.evict()
    assert server.counts() == start


def test_a_flush_frees_everything_in_either_order() -> None:
    for first in ("table", "alloc"):
        server = Server(True, full_pages=96, rows=4)
        start = server.counts()
        server.prefill(server.request("a", list(range(3000))))
        server.cache.reset()
        for part in ("table", "alloc") if first == "table" else ("alloc", "table"):
            getattr(server, part).clear()
        assert server.counts() == start
        assert server.alloc.verify_byte_accounting() == []
        assert not server.table.req_to_c128_sidecar.any()


def test_the_request_pool_of_a_decode_node_holds_preallocated_requests() -> None:
    """Rows beyond the running ones, prefix pages that a request carries, and a release of everything."""
    import types

    from sglang.srt.managers.schedule_batch import ReqKvInfo

    from dsv4_npu.sglang.req_pool import DecodeRequestPool

    server = Server(True, full_pages=96, rows=6)
    cached = server.request("cached", list(range(GROUP + 1)))
    server.prefill(cached)
    server.end(cached)
    start = server.counts()["c128"]
    table = DecodeRequestPool(size=3, max_context_len=8192, device="cpu", enable_memory_saver=False, pre_alloc_size=2)
    table.register_dsv4_allocator(server.alloc)
    held = torch.from_numpy(server.cache.components[3].held_pages())
    reqs = [types.SimpleNamespace(kv=ReqKvInfo(), c128_prefix_page_ids=held if i else None) for i in range(5)]
    rows = table.alloc(reqs)
    assert sorted(rows) == [1, 2, 3, 4, 5]
    assert table.alloc([types.SimpleNamespace(kv=ReqKvInfo())]) is None
    assert server.alloc.c128_page_refcount[held.tolist()].tolist() == [5]
    row = torch.tensor([rows[0]])
    zero, end = torch.tensor([0]), torch.tensor([300])
    kwargs = server.parts.hooks["dsv4_prealloc_kwargs"](server.alloc, reqs[0], 300, table, device="cpu")
    bundle = server.alloc.alloc_extend(zero, zero, end, end, torch.tensor([-1]), 300, **kwargs)
    slots = server.parts.hooks["dsv4_unwrap_prealloc"](bundle, table, reqs[0], 0, 300)
    assert table.req_to_c128_sidecar[row, 0] > 0
    assert server.alloc.verify_byte_accounting() == []
    server.alloc.free_segment(slots, start_pos=0)
    for req in reqs:
        table.free(req)
    assert server.counts()["c128"] == start
    assert server.alloc.verify_byte_accounting() == []


def test_a_session_keeps_its_row_between_turns_and_returns_it() -> None:
    from sglang.srt.session.session_controller import Session

    server = Server(True, full_pages=96, rows=4)
    start = server.counts()
    session = Session(4096, "s", streaming=True)
    first = server.request("a", list(range(2500)), session)
    server.prefill(first)
    for _ in range(10):
        server.step([first])
    server.end(first)
    held = server.counts()
    assert held["rows"] == start["rows"] - 1
    second = server.request("b", list(range(2500)) + [7] * 11 + [9] * 300, session)
    assert second.prefix_len > 2048
    server.prefill(second)
    for _ in range(200):
        server.step([second])
    assert server.alloc.verify_byte_accounting() == []
    server.end(second)
    server.cache.session.release_session("s")
    server.evict()
    assert server.counts() == start
    assert server.alloc.verify_byte_accounting() == []


def test_a_chunk_waits_where_no_c128_page_can_be_had() -> None:
    server = Server(True, full_pages=96, c128_pages=2, rows=4)

    def longest() -> int | None:
        return server.alloc.create_prefill_budget(server.cache).available_chunk_tokens(4096)

    assert longest() == 4096
    first = server.request("a", [1] * 4096)
    server.prefill(first, GROUP - 128)
    assert longest() == GROUP + 128
    server.prefill(first)
    assert longest() is None
    server.end(first)
    assert longest() == 4096


def test_a_chunk_does_not_count_on_the_pages_of_other_rows() -> None:
    server = Server(True, full_pages=96, c128_pages=2, rows=4)
    short = server.request("a", [1] * 200)
    server.prefill(short)
    long = server.request("b", [2] * 4096)
    server.prefill(long, GROUP)
    # The short request's page has room for 15 entries, and the long one cannot use it.
    assert server.alloc.create_prefill_budget(server.cache).available_chunk_tokens(4096) is None
    server.end(short)
    assert server.alloc.create_prefill_budget(server.cache).available_chunk_tokens(4096) == GROUP
    server.prefill(long)


def test_the_accounting_notices_a_c128_page_that_a_node_lost() -> None:
    server = Server(True, full_pages=96, rows=4)
    req = server.request("a", list(range(5000)))
    server.prefill(req)
    server.end(req)
    component = next(c for c in server.cache._components_tuple if hasattr(c, "held_pages"))
    pages = component.held_pages()
    assert len(pages) == 2
    server.alloc.retain_c128_pages(torch.from_numpy(pages[:1]))
    assert server.alloc.verify_byte_accounting() == [f"C128 page {pages[0]}: count 2, 1 holders name it"]
