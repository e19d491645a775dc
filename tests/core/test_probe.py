"""The probe of a compressor's save rule, on operators of both rules, on broken ones, and on a fused one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from dsv4_npu.compressor import fused
from dsv4_npu.compressor.probe import Operator, ProbeBatch, probe, reference_operator
from dsv4_npu.errors import ConfigError, InputError, UnavailableError

RINGS = {4: 16, 128: 256}
WIDEST = {4: 10, 128: 15}
#: First saved position of a batch, by rule, written out (not taken from the package).
Rule = Callable[[int, int, int], int]


def pad_rule(start: int, end: int, ratio: int) -> int:
    overlap, pad = {4: (1, 10), 128: (0, 130)}[ratio]
    return max(start, min(end // ratio * ratio - overlap * ratio, end - pad))


def old_rule(start: int, end: int, ratio: int) -> int:
    return max(start, end // ratio * ratio - {4: 4, 128: 0}[ratio])


def saves(rule: Rule, row: Callable[[ProbeBatch, int, int], int] | None = None) -> Operator:
    """An operator that saves by a rule, row by row."""

    def run(batch: ProbeBatch) -> None:
        for b, start in enumerate(batch.starts):
            end = start + batch.width
            for p in range(rule(start, end, batch.ratio), end):
                at = (b + 1) * batch.ring + p % batch.ring if row is None else row(batch, b, p)
                batch.state[at] = torch.cat((batch.kv[b, p - start], batch.gate[b, p - start]))

    return run


def nothing(batch: ProbeBatch) -> None:
    pass


@pytest.mark.parametrize("ratio", [4, 128])
def test_the_pad_rule_is_safe_at_every_legal_width(ratio: int) -> None:
    for operator in (saves(pad_rule), reference_operator):
        found = probe(operator, ratio, RINGS[ratio], WIDEST[ratio], head_dim=8)
        assert (found.rule, found.safe_width, found.lost, found.strays) == ("pad", WIDEST[ratio], (), "")
        found.require()


@pytest.mark.parametrize(("ratio", "safe"), [(4, 4), (128, 1)])
def test_the_old_rule_is_safe_only_below(ratio: int, safe: int) -> None:
    """C4 up to D = 4, C128 not at all: the widths at which losses were measured elsewhere."""
    found = probe(saves(old_rule), ratio, RINGS[ratio], 6, head_dim=8)
    assert (found.rule, found.safe_width, found.ok) == ("old", safe, False)
    assert [one.width for one in found.lost] == list(range(safe + 1, 7))
    with pytest.raises(ConfigError) as caught:
        found.require()
    advice = {4: "--speculative-num-steps 3 --speculative-num-draft-tokens 4", 128: "no speculation is safe with it"}
    assert advice[ratio] in str(caught.value)
    assert "was not saved" in str(caught.value)
    probe(saves(old_rule), ratio, RINGS[ratio], safe, head_dim=8).require()


def test_losses_are_those_of_serial_decode() -> None:
    """The first loss of C128 at D = 2: from 127 rows of a window, one row accepted, the other closed the window."""
    (lost,) = probe(saves(old_rule), 128, 256, 2, head_dim=8).lost
    assert (lost.width, lost.accepted, lost.position) == (2, 1, lost.start)
    assert (lost.start + 1) % 128 == 127


def off_by_one(batch: ProbeBatch, b: int, p: int) -> int:
    return (b + 1) * batch.ring + (p + 1) % batch.ring


def neighbour(batch: ProbeBatch, b: int, p: int) -> int:
    return (b + 2) * batch.ring + p % batch.ring


def ring_of_8(batch: ProbeBatch, b: int, p: int) -> int:
    return (b + 1) * batch.ring + p % 8


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize(
    ("broken", "rule", "words"),
    [
        (nothing, "nothing", "was not saved"),
        (saves(pad_rule, off_by_one), "other", "rows"),
        (saves(pad_rule, neighbour), "other", "outside of the batch were changed"),
        (saves(pad_rule, ring_of_8), "other", "row"),
        (saves(lambda start, end, ratio: end - 1), "other", "was not saved"),
    ],
)
def test_broken_operators_are_refused(ratio: int, broken: Operator, rule: str, words: str) -> None:
    found = probe(broken, ratio, RINGS[ratio], 4, head_dim=8)
    assert found.rule == rule
    assert found.safe_width <= 1
    with pytest.raises(ConfigError, match=words):
        found.require()


def test_an_operator_that_confuses_values_is_refused() -> None:
    def swapped(batch: ProbeBatch) -> None:
        saves(pad_rule)(batch)
        batch.state[: batch.dummy] = batch.state[: batch.dummy].roll(batch.state.shape[1] // 2, dims=1)

    assert probe(swapped, 4, 16, 3, head_dim=8).safe_width == 0


def test_without_speculation_one_row_is_probed() -> None:
    for ratio, ring in ((4, 8), (128, 128)):
        assert probe(reference_operator, ratio, ring, 1, head_dim=8).ok
    with pytest.raises(InputError, match="width = 11; 1 to 10 is needed"):
        probe(reference_operator, 4, 16, 11)
    with pytest.raises(InputError, match="width = 2; 1 to 1"):
        probe(reference_operator, 4, 8, 2)
    with pytest.raises(InputError, match="ratio = 2"):
        probe(reference_operator, 2, 16, 2)


class Fused:
    """A fused compressor with the argument list of SGLang's call, that saves by a rule."""

    def __init__(self, rule: Rule, by_request: bool) -> None:
        self.rule, self.by_request = rule, by_request

    def __call__(self, x: Any, wkv: Any, wgate: Any, state: Any, ape: Any, norm: Any, **more: Any) -> torch.Tensor:
        ratio, coff = more["cmp_ratio"], more["coff"]
        assert state.shape[1:] == (RINGS[ratio], 2 * wkv.shape[0])
        assert norm.shape == (wkv.shape[0] // coff,)
        assert more["rope_sin"].shape == more["rope_cos"].shape
        assert (more["rotary_mode"], more["cache_mode"]) == (2, 2)
        kv = x.float() @ wkv.float().T
        score = x.float() @ wgate.float().T
        flat, table = state.view(-1, state.shape[2]), more["state_block_table"]
        cu = more["cu_seqlens"].tolist()
        for b, start in enumerate(more["start_pos"].tolist()):
            length = int(more["seqused"][b])
            for p in range(self.rule(start, start + length, ratio), start + length):
                if self.by_request:
                    row = int(table[b]) * state.shape[1] + p % state.shape[1]
                else:
                    row = int(table[b, coff * ratio + p - start])
                at = cu[b] + p - start
                flat[row] = torch.cat((kv[at], score[at] + ape[p % ratio]))
        return x.new_zeros(0)


@pytest.mark.parametrize("by_request", [False, True])
@pytest.mark.parametrize("ratio", [4, 128])
def test_a_fused_operator_is_probed_through_its_own_arguments(ratio: int, by_request: bool) -> None:
    for rule, name, safe in ((pad_rule, "pad", 6), (old_rule, "old", {4: 4, 128: 1}[ratio])):
        operator = fused.fused_operator(Fused(rule, by_request), hidden=32, by_request=by_request)
        found = probe(operator, ratio, RINGS[ratio], 6, head_dim=8)
        assert (found.rule, found.safe_width) == (name, safe)


def test_without_an_npu_there_is_no_fused_operator() -> None:
    for by_request in (False, True):
        with pytest.raises(UnavailableError, match=r"compressor is not there: import"):
            fused.installed_compressor(by_request)


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_probe_that_looks_at_one_offset_misses_the_old_rule(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: batches that begin at the boundary alone cross none, and the old rule passes."""
    from dsv4_npu.compressor import probe as module

    starts: Callable[[int, int], Iterable[int]] = lambda ratio, width: (12 * ratio,)  # noqa: E731
    monkeypatch.setattr(module, "_starts", starts)
    assert probe(saves(old_rule), ratio, RINGS[ratio], 3, head_dim=8).ok
