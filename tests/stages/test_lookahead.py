"""Rows that depend on the token behind them, on the host alone: what is shared, and where a history goes on."""

from __future__ import annotations

import pytest

from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.prefix_cache import PrefixCache
from dsv4_npu.alloc.request import Request
from dsv4_npu.alloc.rollback import RollbackRules
from dsv4_npu.errors import InputError


def world(lookahead: int, saves: bool = True) -> Lifecycle:
    """Pages of 128 tokens; a prefix granule is one of them."""
    spec = AllocSpec(128, 1, 24, 24, 24, 4, 1024, verify_width=4, c4_state_owner="swa_page")
    alloc = KVAllocator(spec)
    rules = RollbackRules.of(spec, True, saves_page_tails=saves, lookahead=lookahead)
    return Lifecycle(alloc, PrefixCache(alloc, lookahead=lookahead), rules=rules)


def prefilled(life: Lifecycle, rid: str, tokens: list[int], first: int = 7) -> Request:
    request = life.admit(rid, tokens, 4)
    while request.planned < len(tokens):
        end = life.chunk_end(request, 128)
        step = life.extend([(request, end)])
        life.launch(step)
        life.done(step)
        life.learn(step, {request: [first]} if end == len(tokens) else {})
    return request


HISTORY = list(range(256))


@pytest.mark.parametrize(("lookahead", "lengths"), [(0, [256, 256, 256]), (1, [256, 128, 128])])
def test_a_prefix_is_shared_with_the_same_token_behind_it(lookahead: int, lengths: list[int]) -> None:
    life = world(lookahead)
    life.finish(prefilled(life, "a", [*HISTORY, 1, 2]))
    prompts = ([*HISTORY, 1, 9], [*HISTORY, 3, 9], [*HISTORY, 2])
    assert [life.admit(str(i), prompt, 4).cached for i, prompt in enumerate(prompts)] == lengths
    life.alloc.audit()


@pytest.mark.parametrize(("lookahead", "length"), [(0, 256), (1, 256)])
def test_the_token_behind_a_granule_may_be_an_output(lookahead: int, length: int) -> None:
    life = world(lookahead)
    request = prefilled(life, "a", HISTORY, first=77)
    life.finish(request)
    assert life.admit("b", [*HISTORY, 77, 5], 4).cached == length
    assert life.admit("c", [*HISTORY, 78, 5], 4).cached == (128 if lookahead else 256)


@pytest.mark.parametrize(
    ("lookahead", "keep", "position"), [(0, 256, 256), (1, 256, 128), (0, 257, 256), (1, 257, 256)]
)
def test_a_session_goes_on_where_the_token_behind_is_the_same(lookahead: int, keep: int, position: int) -> None:
    life = world(lookahead)
    request = prefilled(life, "a", HISTORY, first=77)
    life.keep(request)
    assert life.resume(request, [5, 6], 4, keep=keep) == position
    life.alloc.audit()


def test_cache_and_rules_look_ahead_alike() -> None:
    spec = AllocSpec(128, 1, 24, 24, 24, 4, 1024)
    alloc = KVAllocator(spec)
    with pytest.raises(InputError, match="lookahead = 0; 1"):
        Lifecycle(alloc, PrefixCache(alloc), rules=RollbackRules.of(spec, False, lookahead=1))
