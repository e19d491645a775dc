"""Over native rows a speculative decode sees the bytes of a plain one; what the rows do not settle is reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_npu.compressor import CompressorWeights, compress_batch, plan_ring, reference
from dsv4_npu.emulation import native
from dsv4_npu.emulation.drafters import Drafter, ScriptedDrafter, make_drafter
from dsv4_npu.emulation.engine import Engine
from dsv4_npu.emulation.native import NativeComparison, PlainDecode, compare_native
from dsv4_npu.emulation.oracle import OracleRun
from dsv4_npu.emulation.result import LOGIT_TOLERANCE, compare
from dsv4_npu.movement.rows import read_rows
from dsv4_npu.pools import RowSlab
from tests.emulation.harness import Bench, Setting, varied

LENGTHS = [3, 125, 300]
FORMATS = {"a3": ("bf16", "int8_fp16", torch.float16), "a5": ("fp8_packed", "fp8_fp32", torch.float32)}


def setting_of(platform: str, kind: str = "chain", width: int = 6, **changes: Any) -> Setting:
    return Setting(platform=platform, kind=kind, width=width, native=True, new_tokens=12, **changes)


def follows(plain: PlainDecode, prompts: Sequence[list[int]], accept: Callable[[int, int], int]) -> Drafter:
    """Drafts that the plain decode's continuation accepts as often as ``accept`` says."""

    def continuation(history: Sequence[int], count: int) -> list[int]:
        prompt = max((p for p in prompts if list(history[: len(p)]) == p), key=len)
        done = len(history) - len(prompt)
        return plain.greedy(prompt, done + count).tokens[done:]

    return ScriptedDrafter(continuation, accept, plain.config.model.vocab_size)


def plain_decode(bench: Bench, setting: Setting, lengths: Sequence[int]) -> PlainDecode:
    engine = bench.engine(setting, "ngram")
    plain = PlainDecode(bench.model, engine.config, engine.options)
    plain.prepare([bench.prompt(length) for length in lengths], setting.new_tokens + setting.width)
    return plain


@pytest.fixture(scope="module")
def plains(bench: Bench) -> dict[str, PlainDecode]:
    """One plain decode per platform: it has the rings of any speculation, and enough tokens for the widest."""
    return {platform: plain_decode(bench, setting_of(platform, width=10), LENGTHS) for platform in FORMATS}


class NativeRun:
    """A speculative decode over native rows and its comparison with the plain one."""

    def __init__(
        self,
        bench: Bench,
        setting: Setting,
        lengths: Sequence[int] = LENGTHS,
        drafter: str = "",
        plain: PlainDecode | None = None,
    ) -> None:
        prompts = [bench.prompt(length) for length in lengths]
        self.oracle, self.plain = bench.oracle, plain or plain_decode(bench, setting, lengths)
        drafts = make_drafter(drafter) if drafter else follows(self.plain, prompts, varied(setting.width))
        self.engine: Engine = bench.engine(setting, drafts)
        for prompt in prompts:
            self.engine.submit(prompt, setting.new_tokens)
        self.requests = self.engine.run()
        self.comparisons: list[NativeComparison] = [
            compare_native(request, self.plain, bench.oracle) for request in self.requests
        ]

    def same(self) -> bool:
        """Whether every token and logit is the plain decode's."""
        return all(
            not c.explained and not c.unexplained and c.max_logit_error <= LOGIT_TOLERANCE for c in self.comparisons
        )

    def close_calls_are_complete(self) -> bool:
        """The reported positions are those where twice the logit error reaches the margin, worked out again here."""
        for request, comparison in zip(self.requests, self.comparisons, strict=True):
            logits, exact = torch.stack(request.logits), self.oracle.forced(request.prompt, request.outputs)
            wanted = []
            for position, (row, true) in enumerate(zip(logits, exact, strict=True)):
                first, second = sorted(row.tolist())[:-3:-1]
                off = max(abs(a - b) for a, b in zip(row.tolist(), true.tolist(), strict=True))
                if first - second <= 2 * off:
                    wanted.append(position)
                else:
                    assert int(true.argmax()) == request.outputs[position], "the error bound settles this choice"
            if [call.position for call in comparison.close_calls] != wanted:
                return False
        return True


@pytest.mark.parametrize(
    ("kind", "width", "drafter"), [("chain", 10, ""), ("dspark", 6, ""), ("chain", 4, "early-exit")]
)
@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_speculative_decode_is_the_plain_one(
    bench: Bench, plains: dict[str, PlainDecode], platform: str, kind: str, width: int, drafter: str
) -> None:
    run = NativeRun(bench, setting_of(platform, kind, width), drafter=drafter, plain=plains[platform])
    pools, (rows, keys, scale) = run.engine.pools, FORMATS[platform]
    for slab in (pools.swa, pools.c4, pools.c128):
        assert slab.row.name == rows
    assert pools.index.row.name == keys
    assert pools.index.scale is not None
    assert pools.index.scale.dtype == scale
    for state in (pools.c4_state, pools.index_state, pools.c128_state):
        assert state.data.dtype == torch.float32
    assert run.same()
    assert run.close_calls_are_complete()
    assert platform == "a3" or any(comparison.close_calls for comparison in run.comparisons)
    assert any(len(set(r.accepts)) > 1 for r in run.requests), "several acceptance lengths are meant to occur"
    run.engine.alloc.audit()
    for comparison in run.comparisons:
        assert comparison.max_row_error > 1e-4, "rows of a few bits move logits"
        assert comparison.float64_differences <= len(comparison.close_calls)


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_the_rows_themselves_are_the_same_bytes(bench: Bench, platform: str) -> None:
    setting = setting_of(platform, batch=2)
    held = []
    for width, drafter in ((6, "early-exit"), (1, None)):
        engine = bench.engine(Setting(**{**setting.__dict__, "width": width}), drafter)
        run = engine.submit(bench.prompt(250), 12, session=True)
        engine.run()
        held.append(read_rows(engine.pools, engine.alloc, run.row, 261))
    for name in ("swa", "c4", "c4 indexer", "c128"):
        for mine, theirs in zip(held[0][name], held[1][name], strict=True):
            assert mine.numel()
            assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("platform", ["a3", "a5"])
def test_new_rows_that_bypass_the_pool(bench: Bench, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    write, read, fresh = RowSlab.write, RowSlab.read, {}

    def remembered(self: RowSlab, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        write(self, layer, slots, rows)
        fresh[id(self), layer] = (slots, rows)

    def mixed(self: RowSlab, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        found = read(self, layer, slots, dtype)
        written, rows = fresh.pop((id(self), layer), (slots[:0], found[:0]))
        for slot, row in zip(written.tolist(), rows, strict=True):
            if slot > 0:
                found[slots == slot] = row
        return found

    monkeypatch.setattr(RowSlab, "write", remembered)
    monkeypatch.setattr(RowSlab, "read", mixed)
    run = NativeRun(bench, setting_of(platform, batch=2), [125])
    assert not run.same()
    assert not all(compare(r, bench.oracle, False, run.plain).identical for r in run.requests)


def worst_round_trip(bench: Bench, monkeypatch: pytest.MonkeyPatch, platform: str) -> float:
    """The largest error of a row read back after it was written in a run, in units of its format's bound."""
    write, worst = RowSlab.write, [0.0]

    def checked(self: RowSlab, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        write(self, layer, slots, rows)
        live = slots > 0
        if bool(live.any()):
            off = (self.read(layer, slots[live], torch.float64) - rows[live]).abs()
            bound = self.row.bound(rows[live]).clamp_min(1e-300)
            worst.append(float((off / bound).max()))

    with monkeypatch.context() as patch:
        patch.setattr(RowSlab, "write", checked)
        engine = bench.engine(setting_of(platform), "early-exit")
        engine.submit(bench.prompt(131), 4)
        engine.run()
    return max(worst)


@pytest.mark.parametrize(("platform", "slab"), [("a3", "keys"), ("a5", "keys"), ("a5", "rows")])
def test_rows_of_a_run_are_within_their_formats_bound(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, platform: str, slab: str
) -> None:
    assert 0.9 < worst_round_trip(bench, monkeypatch, platform) <= 1.0
    write = RowSlab.write

    def doubled(self: RowSlab, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        write(self, layer, slots, rows)
        if slab == "keys" and self.scale is not None:
            self.scale[layer].view(self.pages * self.page, 1)[slots.clamp_min(0)] *= 2
        if slab == "rows" and self.scale is None:
            # Of 16 + 2 · 16 + 1 bytes the last is the scale's exponent.
            self.data[layer].view(torch.uint8).view(self.pages * self.page, -1)[slots.clamp_min(0), 48] += 1

    monkeypatch.setattr(RowSlab, "write", doubled)
    assert worst_round_trip(bench, monkeypatch, platform) > 1.0


def entries_of(gen: torch.Generator, ratio: int, widths: Sequence[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Entries that batches of ``widths`` close, and the ring after them; float64 projections, float32 states."""
    overlap, dim, ring = {4: 2, 128: 1}[ratio], 8, {4: 16, 128: 256}[ratio]
    total = sum(widths)
    kv, gate = (torch.randn(1, total, overlap * dim, generator=gen, dtype=torch.float64) for _ in range(2))
    weights = CompressorWeights(
        torch.randn(ratio, overlap * dim, generator=gen, dtype=torch.float64),
        torch.ones(dim, dtype=torch.float64),
        1e-6,
        torch.tensor([0.3, 0.01]),
    )
    state = torch.zeros(ring + 1, 2 * overlap * dim)
    state[:, overlap * dim :] = float("-inf")
    made, start = [], 0
    for width in widths:
        plan = plan_ring(ratio, ring, [start], None, width, lambda at: at % ring, ring)
        part = slice(start, start + width)
        entries = compress_batch(state, kv[:, part], gate[:, part], plan, weights, torch.tensor([start]))
        assert entries.dtype == torch.float32
        made += list(entries[0, : plan.counts[0]])
        start += width
    return made, state


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_window_is_the_same_bits_whoever_closes_it(monkeypatch: pytest.MonkeyPatch, ratio: int) -> None:
    """Rows of this batch weigh in a window as the float32 that the ring would hold of them."""
    batches = [ratio - 1, *([6] * (3 * ratio // 6 + 2))]
    count = sum(batches)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(
            torch.stack(entries_of(torch.Generator().manual_seed(ratio), ratio, widths)[0])
            for widths in (batches, [1] * count)
        )  # type: ignore[return-value]

    together, alone = both()
    assert len(together) == count // ratio
    assert torch.equal(together, alone)
    real_batch = reference.torch.cat

    def unrounded(parts: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        joined: torch.Tensor = real_batch(parts, *args, **kwargs)
        if isinstance(parts, tuple) and len(parts) == 2 and joined.dim() == 3 and parts[1].shape[1] > 1:
            joined[:, -parts[1].shape[1] :] *= 1 + 2.0**-22
        return joined

    monkeypatch.setattr(reference, "torch", SimpleNamespace(**{**vars(torch), "cat": unrounded}))
    assert not torch.equal(*both())


# -- what the rows do not settle --------------------------------------------------------------------------------------


class Scripted:
    """A plain decode of given logits: token i of a history of ``n`` outputs is the best of row ``n + i``."""

    def __init__(self, prompt: list[int], logits: torch.Tensor) -> None:
        self.prompt, self.logits, self.asked = prompt, logits, []  # type: ignore[var-annotated]

    def greedy(self, prompt: Sequence[int], count: int) -> OracleRun:
        done = len(prompt) - len(self.prompt)
        self.asked.append(done)
        part = self.logits[done : done + count]
        return OracleRun(part.argmax(-1).tolist(), part)

    def forced(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        return self.logits[: len(tokens)]


def judged(outputs: list[int], margins: list[float], errors: list[float]) -> tuple[Any, Scripted]:
    """Compare outputs with a plain decode that always chooses token 1, by ``margins`` over token 2."""
    logits = torch.zeros(len(outputs), 4, dtype=torch.float64)
    logits[:, 1] = 1.0
    logits[:, 2] = 1.0 - torch.tensor(margins, dtype=torch.float64)
    exact = logits.clone()
    exact[:, 3] += torch.tensor(errors, dtype=torch.float64)
    plain, oracle = Scripted([7, 7], logits), Scripted([7, 7], exact)
    request: Any = SimpleNamespace(
        rid=5, prompt=[7, 7], outputs=outputs, logits=list(logits), cached=0, finish="length", rounds=1, accepts={1: 1}
    )
    return compare(request, oracle, False, plain), plain  # type: ignore[arg-type]


def test_a_difference_is_explained_only_where_the_rows_do_not_settle_the_choice() -> None:
    margins, errors = [0.5, 0.1, 0.5, 0.1, 2**-5], [0.1, 0.1, 0.0, 0.04, 2**-6]
    # Positions 1 and 4: twice the error reaches the margin; at 4 exactly.
    result, plain = judged([1, 1, 1, 1, 1], margins, errors)
    assert result.identical
    assert [(c.rid, c.position, c.token, c.plain) for c in result.native.close_calls] == [(5, 1, 1, 1), (5, 4, 1, 1)]
    assert result.native.close_calls[0].margin == pytest.approx(0.1)
    assert result.native.close_calls[0].row_error == pytest.approx(0.1)
    assert plain.asked == [0]
    result, plain = judged([1, 2, 1, 1, 2], margins, errors)
    assert result.identical
    assert (result.native.explained, result.native.unexplained) == ([1, 4], [])
    assert plain.asked == [0, 2], "behind a difference the plain decode goes on from the speculative history"
    result, _ = judged([1, 2, 2, 1, 1], margins, errors)
    assert not result.identical
    assert (result.native.explained, result.native.unexplained) == ([1], [2])
    assert result.first_difference == 2


def test_a_close_call_that_is_not_reported(
    bench: Bench, plains: dict[str, PlainDecode], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rule in (lambda margin, row_error: False, lambda margin, row_error: not margin > row_error):
        monkeypatch.setattr(native, "unsettled", rule)
        assert not NativeRun(bench, setting_of("a5"), plain=plains["a5"]).close_calls_are_complete()


def test_wrong_logits_fail_whatever_the_tokens(bench: Bench, plains: dict[str, PlainDecode]) -> None:
    run = NativeRun(bench, setting_of("a3"), [125], plain=plains["a3"])
    request = run.requests[0]
    assert compare(request, bench.oracle, False, run.plain).identical
    request.logits[-1] = request.logits[-1] + 1e-9
    assert not compare(request, bench.oracle, False, run.plain).identical
