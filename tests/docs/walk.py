"""One accept_lens and one C128 page id on their way through the package: a real run that notes what it sees.

Prompts go through the engine on the tiny model (platform a3, D = 4, one C128 entry per page). The numbers of
docs/walkthrough.md are those of :func:`walk`, which asserts what the page says about them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from dsv4_npu import addressing, ops
from dsv4_npu.alloc import FamilyCounts
from dsv4_npu.alloc.state import C128
from dsv4_npu.emulation.engine import Engine, RequestRun
from dsv4_npu.spec import accepted_rows, accepted_tokens, plan_commit
from tests.docs.page_life import PageLife, through_the_cache
from tests.docs.pages import block, table
from tests.docs.recorder import NEIGHBOUR, PROMPT, SETTING, WIDTH, Recorder
from tests.emulation.harness import Bench


@dataclass
class Walk:
    """Blocks and values of the page."""

    blocks: dict[str, str] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)


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
    life_of_page = PageLife(engine, int(alloc.state.free_list[C128][alloc.state.free(C128) - 1]))
    page = life_of_page.page
    _transaction(out, engine, run, life_of_page)
    _verify(out, recorder, run, page)
    life_of_page.note("take-over")
    _next_round(out, recorder, run)
    through_the_cache(recorder, run, neighbour, life_of_page)
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


def _transaction(out: Walk, engine: Engine, run: RequestRun, page: PageLife) -> None:
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
