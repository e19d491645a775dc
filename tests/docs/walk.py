"""One accept_lens and one C128 page id on their way through the package: a real run that notes what it sees.

Three prompts go through the engine on the tiny model (platform a3, D = 4, one C128 entry per page). The numbers of
docs/walkthrough.md are those of :func:`walk`, which asserts what the page says about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from dsv4_npu import addressing, ops
from dsv4_npu.alloc import FamilyCounts
from dsv4_npu.alloc.audit_view import AuditView
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.request import Step
from dsv4_npu.alloc.state import C128, STATE_NAMES
from dsv4_npu.emulation.cache import PooledModel
from dsv4_npu.emulation.drafters import ScriptedDrafter
from dsv4_npu.emulation.engine import Engine, RequestRun
from dsv4_npu.emulation.states import StateKeeper
from dsv4_npu.spec import VerifyResult, accepted_rows, accepted_tokens, plan_commit, verify
from tests.docs.pages import block, table
from tests.emulation.harness import Bench, Setting

WIDTH = 4
SETTING = Setting(platform="a3", width=WIDTH, c128_page=1, chunk=256, batch=5, context=640)
#: Drafts that the target accepts in the round that is followed (the history is the prompt and R then), and in others.
FOLLOWED, OTHERS, PROMPT = 2, 1, 126
#: The neighbour needs a new page in the round that is followed, so the pages of the two requests alternate.
NEIGHBOUR = 504


@dataclass
class Walk:
    """Blocks and values of the page."""

    blocks: dict[str, str] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)


@dataclass
class Round:
    """What a verify round left to look at."""

    step: Step
    candidates: torch.Tensor
    result: VerifyResult
    before_clear: torch.Tensor


class Recorder:
    """An engine whose last verify round can be looked at; use it as a context manager."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.prompts: list[list[int]] = []
        drafter = ScriptedDrafter(
            self._continuation, lambda b, length: FOLLOWED if length == PROMPT + 1 else OTHERS, bench.spec.vocab_size
        )
        self.engine: Engine = bench.engine(SETTING, drafter)
        self._seen: dict[str, Any] = {}
        self._patches = ExitStack()

    def __enter__(self) -> Recorder:
        accept, plan, clear = verify.verify_tree_greedy, Lifecycle.decode_plan, StateKeeper.clear_rejected

        def accepting(predict: Any, index: Any, drafts: Any, candidates: Any, *rest: Any) -> None:
            accept(predict, index, drafts, candidates, *rest)
            self._seen |= {"candidates": candidates, "result": VerifyResult(predict, index, drafts + 1)}

        def planning(life: Lifecycle, *args: Any) -> Step:
            self._seen["step"] = plan(life, *args)
            return self._seen["step"]

        def clearing(states: StateKeeper, *args: Any) -> None:
            self._seen["before_clear"] = states.pools.c128_state.data.clone()
            clear(states, *args)

        for where, name, hook in (
            (verify, "verify_tree_greedy", accepting),
            (Lifecycle, "decode_plan", planning),
            (StateKeeper, "clear_rejected", clearing),
        ):
            self._patches.enter_context(mock.patch.object(where, name, hook))
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()

    @property
    def round(self) -> Round:
        return Round(**self._seen)

    def submit(self, prompt: list[int], new_tokens: int) -> RequestRun:
        self.prompts.append(prompt)
        return self.engine.submit(prompt, new_tokens)

    def step(self) -> None:
        assert self.engine.step()
        self.engine.alloc.audit()

    def _continuation(self, history: Sequence[int], count: int) -> list[int]:
        prompt = max((p for p in self.prompts if list(history[: len(p)]) == p), key=len)
        done = len(history) - len(prompt)
        return self.bench.oracle.greedy(prompt, done + count).tokens[done:]


def walk(bench: Bench) -> Walk:
    """Run everything, check it, and return what the page quotes."""
    with Recorder(bench) as recorder:
        return _walk(recorder)


def _walk(recorder: Recorder) -> Walk:
    out, bench = Walk(), recorder.bench
    engine, alloc = recorder.engine, recorder.engine.alloc
    for length in range(3, 3 + SETTING.batch):
        recorder.submit(bench.prompt(length), 1)
    recorder.step()
    neighbour = recorder.submit(bench.prompt(NEIGHBOUR), 32)
    while not neighbour.rounds:
        recorder.step()
    run = recorder.submit(bench.prompt(PROMPT), 10)
    recorder.step()
    with alloc.transaction() as plan:
        plan.reserve_decode(neighbour.row, engine.life.reserve)
        assert plan.need == FamilyCounts(1, 1, 1)
        plan.commit(slots=False)
    _describe_rows(out, engine)
    life_of_page = _PageLife(engine, int(alloc.state.free_list[C128][alloc.state.free(C128) - 1]))
    page = life_of_page.page
    _transaction(out, engine, run, life_of_page)
    _verify(out, recorder, run, page)
    life_of_page.note("take-over")
    _next_round(out, recorder, run)
    _through_the_cache(recorder, run, neighbour, life_of_page)
    out.blocks["page-life"] = life_of_page.table()
    out.blocks["tree"] = _tree()
    out.facts |= {"page": page, "granule": engine.life.cache.granule if engine.life.cache else 0}
    return out


def _describe_rows(out: Walk, engine: Engine) -> None:
    state = engine.alloc.state
    rows = []
    for row, rid in sorted(engine.alloc.requests().items()):
        full = state.block_table[row][state.block_table[row] > 0]
        rows.append(
            [
                rid,
                row,
                int(state.committed[row]),
                int(state.allocated[row]),
                full.tolist(),
                state.full_to_swa[full].tolist(),
                state.c128_table[row][state.c128_table[row] > 0].tolist(),
            ]
        )
    head = ["request", "row", "committed", "allocated", "FULL pages", "their SWA pages", "C128 pages"]
    out.blocks["rows"] = table(head, rows)


class _PageLife:
    """The states of one C128 page, one line a moment."""

    def __init__(self, engine: Engine, page: int) -> None:
        self.engine, self.page = engine, page
        self.rows: list[list[object]] = []
        self.note("before the round")

    def note(self, moment: str) -> None:
        alloc = self.engine.alloc
        alloc.audit()
        state = alloc.state
        self.rows.append(
            [
                len(self.rows) + 1,
                moment,
                STATE_NAMES[state.page_state[C128][self.page]],
                int(state.c128_count[self.page]),
                AuditView(alloc, True).holders_of(C128, self.page),
            ]
        )

    def expect(self, state: str, count: int) -> None:
        assert self.rows[-1][2:4] == [state, count], self.rows[-1]

    def table(self) -> str:
        return table(["", "moment", "state", "count", "named by"], self.rows)


def _transaction(out: Walk, engine: Engine, run: RequestRun, page: _PageLife) -> None:
    """What ``decode_plan`` does in one call, by hand, so that one can look between reserve and commit."""
    alloc, life = engine.alloc, engine.life
    page.expect("free", 0)
    with alloc.transaction() as plan:
        plan.reserve_decode(run.row, life.reserve)
        out.facts |= {f"need.{name}": count for name, count in plan.need._asdict().items()}
        plan.reserve()
        page.note("reserve()")
        page.expect("taken by a transaction", 0)
        plan.commit(slots=False)
    page.note("commit()")
    page.expect("held", 1)
    out.facts |= {
        "reserve": life.reserve,
        "row": run.row,
        "allocated": alloc.allocated(run.row),
        "c128_row": alloc.state.c128_table[run.row][:2].tolist(),
    }
    assert alloc.allocated(run.row) == addressing.ceil_to(PROMPT + life.reserve, SETTING.page)
    assert alloc.state.c128_table[run.row, 0] == page.page


def _verify(out: Walk, recorder: Recorder, run: RequestRun, page: int) -> None:
    alloc, pools = recorder.engine.alloc, recorder.engine.pools
    state, row, layer = alloc.state, run.row, 0
    entry_slot = page * SETTING.c128_page
    entry = pools.c128.data[layer].view(-1, pools.c128.row.width)[entry_slot]
    assert bool(entry.isnan().all()), "nobody wrote the entry yet"
    seq_len, outputs = alloc.committed(row), list(run.outputs)
    assert run.request.log.resident(seq_len), "the ring has the 126 rows that the window reads"
    used = alloc.usage()
    recorder.step()
    seen = recorder.round
    b = seen.step.requests.index(run.request)
    at = slice(b * WIDTH, (b + 1) * WIDTH)
    rows = accepted_rows(seen.result)
    tokens = accepted_tokens(seen.result)[b]
    window = seen.step.loc.out_full.reshape(-1, WIDTH)
    commit = plan_commit(window, seen.step.starts, rows)
    accept_lens = int(seen.result.accept_lens[b])
    names = dict(zip("RACB", seen.candidates[b].tolist(), strict=True)) | {"X": tokens[-1]}
    assert len(set(names.values())) == 5, "the five tokens must be told apart"
    assert (accept_lens, seq_len) == (3, PROMPT)
    assert rows[b] == [b * WIDTH, b * WIDTH + 1, b * WIDTH + 2]
    assert tokens == [names["A"], names["C"], names["X"]]
    assert run.outputs == [*outputs, *tokens]
    assert outputs[-1] == names["R"]
    assert int(commit.new_lens[b]) == alloc.committed(row) == seq_len + accept_lens == PROMPT + len(run.outputs) - 1
    assert commit.moves[0].size == 0
    assert alloc.usage() == used, "neither the accept nor the reject takes or frees a page"
    assert not entry.isnan().any(), "the window that closed at position 127 has its entry"
    ring = pools.c128_state
    bank = [int(addressing.request_state_rows(row, seq_len + j, ring.ring)) for j in range(WIDTH)]
    verify_rows = []
    for j, name in enumerate("RACB"):
        position, full = seq_len + j, int(seen.step.loc.out_full[at][j])
        swa = int(seen.step.loc.out_swa[at][j])
        assert full == int(state.block_table[row, position // SETTING.page]) * SETTING.page + position % SETTING.page
        closes = position % addressing.C128_RATIO == addressing.C128_RATIO - 1
        verify_rows.append(
            [
                name,
                names[name],
                j,
                b * WIDTH + j,
                position,
                full,
                swa,
                int(addressing.c4_slots(full)) if position % 4 == 3 else "–",
                entry_slot if closes else "–",
                bank[j],
                "yes" if j < accept_lens else "no",
            ]
        )
        before, after = _empty(seen.before_clear[:, bank[j]]), _empty(ring.data[:, bank[j]])
        assert (before, after) == (False, j >= accept_lens), f"state row {bank[j]}: empty {before}, then {after}"
    head = ["input", "token", "j", "verify row", "position", "FULL slot", "SWA slot", "C4 slot", "C128 slot"]
    out.blocks["window"] = table([*head, "C128 ring row", "accepted"], verify_rows)
    index = seen.result.accept_index[b].tolist()
    predict = seen.result.predict[rows[b]].tolist()
    assert index[accept_lens:] == [-1] * (WIDTH - accept_lens)
    lines = {
        f"accept_lens[{b}]": f"{accept_lens}",
        f"accept_index[{b}]": f"{index}",
        f"predict[accept_index[{b}, :{accept_lens}]]": f"{predict}  = A, C, X",
        f"out_full[accept_index[{b}, :{accept_lens}]]": f"{commit.sources[-accept_lens:].tolist()}  = slots of R, A, C",
        f"slots of positions {seq_len}..{seq_len + accept_lens - 1}": f"{commit.targets[-accept_lens:].tolist()}",
    }
    out.blocks["accept"] = block([f"{name:32} {value}" for name, value in lines.items()])
    out.blocks["lengths"] = table(
        ["", "before", "after"],
        [
            ["outputs", str(outputs), str(run.outputs)],
            ["prompt + outputs", PROMPT + len(outputs), PROMPT + len(run.outputs)],
            ["committed", seq_len, alloc.committed(row)],
            ["allocated", alloc.allocated(row), alloc.allocated(row)],
        ],
    )
    out.blocks["ring"] = table(
        ["position", "C128 ring row", "before the clear", "after the clear"],
        [
            [seq_len + j, bank[j], _word(seen.before_clear[:, bank[j]]), _word(ring.data[:, bank[j]])]
            for j in range(WIDTH)
        ],
    )
    out.facts |= {
        "b": b,
        "D": WIDTH,
        "seq_len": seq_len,
        "accept_lens": accept_lens,
        "new_seq_len": alloc.committed(row),
        "entry_slot": entry_slot,
        "ring": ring.ring,
        "rejected_position": seq_len + accept_lens,
        **{f"token.{name}": token for name, token in names.items()},
    }


def _empty(rows: torch.Tensor) -> bool:
    half = rows.shape[-1] // 2
    return bool((rows[:, :half] == 0).all() and torch.isneginf(rows[:, half:]).all())


def _word(rows: torch.Tensor) -> str:
    return "empty row" if _empty(rows) else "written"


def _next_round(out: Walk, recorder: Recorder, run: RequestRun) -> None:
    """X is the root of the next round, in the slot that the rejected draft had written."""
    engine, alloc, pools = recorder.engine, recorder.engine.alloc, recorder.engine.pools
    position = alloc.committed(run.row)
    slots = alloc.slots(run.row, position, position + 1)
    rejected = int(recorder.round.step.loc.out_full.reshape(-1, WIDTH)[int(out.facts["b"])][WIDTH - 1])  # type: ignore[call-overload]
    assert int(slots.out_full[0]) == rejected
    stored = pools.swa.data.flatten(1, 2)[:, int(slots.out_swa[0])]
    before = stored.clone()
    recorder.step()
    seen = recorder.round
    b = seen.step.requests.index(run.request)
    assert int(seen.candidates[b, 0]) == out.facts["token.X"]
    assert int(seen.step.loc.out_full.reshape(-1, WIDTH)[b, 0]) == rejected
    assert bool((stored != before).flatten(1).any(dim=1).all()), "every layer's row was written again"
    assert not _empty(pools.c128_state.data[:, int(addressing.request_state_rows(run.row, position, 256))])
    out.facts |= {"next_root": int(seen.candidates[b, 0]), "next_slot": rejected}
    assert engine.life.cache is not None


def _through_the_cache(recorder: Recorder, run: RequestRun, neighbour: RequestRun, page: _PageLife) -> None:
    engine, alloc, bench = recorder.engine, recorder.engine.alloc, recorder.bench
    cache = engine.life.cache
    assert cache is not None
    page.expect("held", 2)
    shared = [*run.prompt, *run.outputs[:2]]
    second = recorder.submit([*shared, *bench.prompt(20)], 12)
    recorder.step()
    assert second.cached == len(shared) == cache.granule
    assert alloc.state.c128_table[second.row, 0] == page.page
    page.note("prefix hit")
    page.expect("held", 3)
    while not run.finish:
        recorder.step()
    page.note("first finish")
    page.expect("held", 2)
    while not second.finish:
        recorder.step()
    page.note("second finish")
    page.expect("held", 1)
    assert not neighbour.finish
    forward = PooledModel.forward

    def evicting(model: PooledModel, *args: Any) -> torch.Tensor:
        assert alloc.epochs.in_flight == 1
        while alloc.state.c128_count[page.page]:
            assert cache.evict(FamilyCounts(0, 0, 1))
        page.note("eviction")
        page.expect("quarantined", 0)
        assert page.page not in alloc.state.free_list[C128][: alloc.state.free(C128)]
        return forward(model, *args)

    with mock.patch.object(PooledModel, "forward", evicting):
        recorder.step()
    page.note("forward done")
    page.expect("free", 0)
    third = recorder.submit(bench.prompt(PROMPT), 5)
    while not third.rounds:
        recorder.step()
    page.note("third request")
    page.expect("held", 2)
    assert page.page in alloc.state.c128_table[third.row]
    for one in engine.run():
        bench.check(one)
    cache.clear()
    alloc.audit()
    assert not any(used for used, _, _ in alloc.usage().values())


def _tree() -> str:
    """The same accept on a plain pool, where the three accepted rows are not side by side."""
    window = np.array([[42080, 42081, 42082, 42083]])
    commit = plan_commit(window, np.array([4096]), [[0, 1, 3]])
    targets, sources = commit.moves
    slab = torch.empty(1, 42112 // 128, 128, 1, 1)
    flat = slab.view(-1)
    for slot, name in zip(window[0].tolist(), "RABC", strict=True):
        flat[slot] = ord(name)
    ops.move_kv_(slab, torch.from_numpy(targets), torch.from_numpy(sources))
    held = "".join(chr(int(flat[slot])) for slot in commit.targets.tolist())
    assert (held, chr(int(flat[42083]))) == ("RAC", "C")
    predict = torch.tensor([1, 3, 0, 24], dtype=torch.int32)
    ops.compact_accept_(predict, None, torch.tensor([[0, 1, 3]]), torch.tensor([3]))
    assert predict[:3].tolist() == [1, 3, 24]
    return block(
        [
            f"slots of verify rows 0..3 (R, A, B, C)        {window[0].tolist()}",
            "accepted verify rows                          [0, 1, 3]",
            f"sources, the slots of R, A, C                 {commit.sources.tolist()}",
            f"targets, positions 4096..4098                 {commit.targets.tolist()}",
            f"moves that are left: KV[target] <- KV[source] {targets.tolist()} <- {sources.tolist()}",
            f"committed length                              4096 -> {int(commit.new_lens[0])}",
        ]
    )
