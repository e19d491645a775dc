"""Residency of compressor rows, against a brute-force ring machine over random histories."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4_npu import addressing
from dsv4_npu.alloc import AllocSpec
from dsv4_npu.alloc.rollback import RingLog, RingRule, RollbackRules
from dsv4_npu.errors import ConfigError
from tests.lifecycle.ring_sim import RingSim

PAGE = 128
WIDTH = {True: 10, False: 1}


def rules_of(owner: str, speculative: bool, tails: bool = False) -> RollbackRules:
    spec = AllocSpec(PAGE, 16, 64, 64, 64, 4, 4096, verify_width=WIDTH[speculative], c4_state_owner=owner)
    return RollbackRules.of(spec, speculative, saves_page_tails=tails)


Choose = Callable[["History", int], int | None]


class History:
    """One request: the package's log beside the ring machines."""

    def __init__(self, rules: RollbackRules, speculative: bool) -> None:
        self.rules, self.log = rules, rules.log()
        self.width = WIDTH[speculative]
        by_page = rules.c4.bank == "swa_page"
        self.c4 = RingSim(
            4, 2, 16 if speculative else 8, PAGE if by_page else None, PAGE if rules.saves_page_tails else None
        )
        self.c128 = RingSim(128, 1, 256 if speculative else 128)
        self.sims = (self.c4, self.c128)
        self.committed = 0
        self.wrong: list[int] = []

    def run(self, length: int, kept: int, decode: bool = True) -> None:
        start = self.committed
        for sim in self.sims:
            self.wrong += sim.run(start, start + length)
            sim.commit(start + kept)
        if kept == 0:
            self.log.overrun(start, start + length)
        elif decode:
            self.log.decoded(start, start + length, start + kept)
        else:
            self.log.ran(start, start + length)
        self.committed = start + kept

    def back(self, target: int) -> None:
        for sim in self.sims:
            sim.commit(target)
            sim.free_pages_from(target)
        self.log.cut(target)
        self.committed = target

    def go_back(self, wanted: int, choose: Choose) -> None:
        target = choose(self, wanted)
        if target is not None:
            self.back(target)

    def truth(self, target: int) -> bool:
        return all(sim.resident(target) for sim in self.sims)


def proved(history: History, wanted: int) -> int | None:
    return history.rules.target(history.log, wanted, 0)


def play(history: History, moves: list[tuple[str, int, int]], choose: Choose = proved) -> None:
    for kind, a, b in moves:
        if kind == "prefill":
            history.run(a, a, decode=False)
        elif kind == "verify":
            width = 1 + a % history.width
            history.run(width, 1 + b % width)
        elif kind == "late":  # a further verify whose outcome nobody wants
            history.run(1 + a % history.width, 0)
            if not history.log.resident(history.committed):
                history.go_back(history.committed, choose)
        else:
            history.go_back(max(0, history.committed - a), choose)


VERIFY = st.tuples(st.just("verify"), st.integers(0, 9), st.integers(0, 9))
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), st.one_of(st.integers(1, 20), st.integers(100, 420)), st.just(0)),
        VERIFY,
        VERIFY,
        VERIFY,
        st.tuples(st.just("late"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("back"), st.one_of(st.integers(0, 12), st.integers(0, 400)), st.just(0)),
    ),
    min_size=1,
    max_size=40,
)
SHAPES = [("swa_page", True, False), ("swa_page", True, True), ("request", True, False), ("swa_page", False, False)]
SHAPES += [("request", False, False)]


@pytest.mark.parametrize(("owner", "speculative", "tails"), SHAPES)
@settings(max_examples=80, deadline=None)
@example(moves=[("prefill", 7, 0), ("verify", 9, 0), ("verify", 0, 0)])
@given(moves=MOVES)
def test_the_log_says_exactly_what_the_rings_hold(
    owner: str, speculative: bool, tails: bool, moves: list[tuple[str, int, int]]
) -> None:
    history = History(rules_of(owner, speculative, tails), speculative)
    play(history, moves)
    assert not history.wrong, "a batch read a row that was not its history's"
    end = history.committed
    for target in {*range(max(0, end - 300), end + 1), *range(0, end, PAGE)}:
        assert history.log.resident(target) == history.truth(target), target


@pytest.mark.parametrize("owner", ["swa_page", "request"])
def test_a_decode_of_any_acceptance_always_reads_its_own_rows(owner: str) -> None:
    history = History(rules_of(owner, True), True)
    history.run(125, 125, decode=False)
    for turn in range(400):
        history.run(10, 1 + turn * 7 % 10)
    assert not history.wrong
    assert history.truth(history.committed)


def read_wrong(choose: Choose, owner: str = "request") -> bool:
    """Whether going back by ``choose`` ever makes a later batch read a wrong row, over a fixed set of histories."""
    for base in (250, 380, 390, 511):
        for late in (0, 1):
            for back in (1, 3, 5, 9, 40, 130, 200):
                history = History(rules_of(owner, True), True)
                moves = [("prefill", base, 0), *[("verify", 9, i) for i in range(40)]]
                moves += [("late", 9, 0)] * late + [("back", back, 0), ("prefill", 5, 0), ("prefill", 130, 0)]
                play(history, moves, choose)
                if history.wrong:
                    return True
    return False


@pytest.mark.parametrize("owner", ["swa_page", "request"])
def test_going_back_where_nothing_is_proved_is_seen(owner: str) -> None:
    def unaligned(history: History, wanted: int) -> int:
        return wanted

    assert read_wrong(unaligned, owner), "the ring machine must see an unaligned rewind"
    assert not read_wrong(proved, owner)


def test_a_page_boundary_alone_proves_nothing_where_the_request_owns_the_c4_rows() -> None:
    def aligned(history: History, wanted: int) -> int:
        return addressing.floor_to(wanted, PAGE)

    assert read_wrong(aligned, "request")


def test_128_aligned_targets_need_no_c128_row() -> None:
    history = History(rules_of("swa_page", True), True)
    history.run(4996, 4996, decode=False)
    assert all(history.c128.resident(target) for target in range(0, 4997, 128))
    assert history.log.c128.holds(4866, 4996)
    assert not history.log.resident(4900), "rows 4864 and 4865 of a long prefill were never saved"
    assert history.log.resident(4992), "its C4 rows 4988..4991 were"
    assert not history.log.resident(4864), "the C4 rows before an earlier page were not"


def test_a_ring_of_256_allows_a_rewind_of_128_rows_in_a_decode() -> None:
    long, short = RingSim(128, 1, 256), RingSim(128, 1, 128)
    for sim in (long, short):
        for position in range(1000):
            sim.run(position, position + 1)
    assert all(long.resident(1000 - back) for back in range(129))
    assert not all(short.resident(1000 - back) for back in range(129))


@pytest.mark.parametrize("width", range(1, 11))
def test_one_further_verify_is_harmless_exactly_up_to_half_the_pad(width: int) -> None:
    """A stop anywhere in the last run, then one more verify: every possible end is resident iff 2 D <= pad."""
    broken = False
    for seq in range(200, 216):
        for accepted in range(1, width + 1):
            rule = RingRule(4, 16, "request")
            log, sim = RingLog(RollbackRules(PAGE, rule, RingRule(128, 256, "request"))), RingSim(4, 2, 16)
            for position in range(seq):
                sim.run(position, position + 1)
                log.ran(position, position + 1)
            for start in (seq, seq + accepted):
                sim.run(start, start + width)
                log.ran(start, start + width)
                sim.commit(start + accepted if start == seq else start)
                log.cut(start + accepted if start == seq else start)
            for target in range(seq + 1, seq + accepted + 1):
                assert log.c4.holds(*rule.live(target)) == sim.resident(target)
                broken |= not sim.resident(target)
    assert broken == (2 * width > rule.pad)


def test_a_verify_wider_than_the_pad_is_refused() -> None:
    spec = AllocSpec(PAGE, 16, 8, 8, 8, 2, 1024, verify_width=11)
    with pytest.raises(ConfigError, match="at most 10"):
        RollbackRules.of(spec, True)
    with pytest.raises(ConfigError, match="at most 1"):
        RollbackRules.of(AllocSpec(PAGE, 16, 8, 8, 8, 2, 1024, verify_width=2), False)


@settings(max_examples=100, deadline=None)
@given(
    start=st.integers(0, 600),
    length=st.integers(1, 900),
    boundary=st.integers(1, 11),
    tails=st.booleans(),
    speculative=st.booleans(),
)
def test_tail_saved_is_what_the_ring_then_holds(
    start: int, length: int, boundary: int, tails: bool, speculative: bool
) -> None:
    rules = rules_of("swa_page", speculative, tails)
    history, end = History(rules, speculative), boundary * PAGE
    if start:
        history.run(start, start, decode=False)
    history.run(length, length, decode=False)
    if start < end <= start + length:
        assert rules.tail_saved(start, start + length, end) == history.c4.resident(end)
