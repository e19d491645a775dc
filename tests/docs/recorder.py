"""The engine of the walkthrough, whose last verify round can be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.request import Step
from dsv4_npu.emulation.drafters import ScriptedDrafter
from dsv4_npu.emulation.engine import Engine, RequestRun
from dsv4_npu.emulation.states import StateKeeper
from dsv4_npu.spec import VerifyResult, verify
from tests.emulation.harness import Bench, Setting

WIDTH = 4
SETTING = Setting(platform="a3", width=WIDTH, c128_page=1, chunk=256, batch=5, context=640)
#: Drafts that the target accepts in the round that is followed (the history is the prompt and R then), and in others.
FOLLOWED, OTHERS, PROMPT = 2, 1, 126
#: The neighbour needs a new page in the round that is followed, so the pages of the two requests alternate.
NEIGHBOUR = 504


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
