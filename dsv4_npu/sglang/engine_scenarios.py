"""Requests for SGLang's engine, and the comparison of what it says with Hugging Face's own cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_npu.emulation.model import build_model
from dsv4_npu.emulation.oracle import Oracle
from dsv4_npu.sglang.engine_launch import EmulatedEngine

#: Largest difference of float64 logits that is rounding and not memory.
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Outcome:
    """One request that went through the engine.

    Attributes:
        scenario: what the request was part of.
        prompt, outputs: tokens in and out.
        cached: leading tokens that SGLang found in its prefix cache.
        retracted: how often it gave its memory back.
        finish: "length", "stop" or "abort".
        same: every output is what the oracle chooses after the tokens before it.
        difference: the largest difference of a logit from the oracle's.
        margin: the least distance between the oracle's two best logits.
    """

    scenario: str
    prompt: int
    outputs: int
    cached: int
    retracted: int
    finish: str
    same: bool
    difference: float
    margin: float

    @property
    def right(self) -> bool:
        """Tokens and logits are the oracle's."""
        return self.same and self.difference < TOLERANCE


class Prompter:
    """Seeded prompts of one model's vocabulary."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._vocab, self._gen = vocab, torch.Generator().manual_seed(seed)

    def tokens(self, count: int) -> list[int]:
        """``count`` random tokens."""
        drawn: list[int] = torch.randint(0, self._vocab, (count,), generator=self._gen).tolist()
        return drawn


class Scenarios:
    """Scenarios over one running engine; each returns what became of its requests.

    Args:
        engine: a running engine.
        seed: of the prompts.
    """

    def __init__(self, engine: EmulatedEngine, seed: int = 0) -> None:
        self.engine = engine
        self.prompter = Prompter(engine.spec.vocab_size, seed)
        self.oracle = Oracle(build_model(engine.spec, engine.setup.seed))
        self.history: list[int] = []

    def _compare(self, scenario: str, prompts: Sequence[list[int]], outputs: Sequence[dict[str, Any]]) -> list[Outcome]:
        logits = self.engine.logits()
        return [self._compare_one(scenario, prompt, out, logits) for prompt, out in zip(prompts, outputs, strict=True)]

    def _compare_one(self, scenario: str, prompt: list[int], out: dict[str, Any], logits: Any) -> Outcome:
        tokens, meta = list(out["output_ids"]), out["meta_info"]
        difference, margin, same = 0.0, float("inf"), True
        if tokens:
            want = self.oracle.forced(prompt, tokens)
            seen = [logits[meta["id"], len(prompt) - 1 + i] for i in range(len(tokens))]
            got = torch.stack([torch.from_numpy(row) for row in seen])
            difference = float((got - want).abs().max())
            top = want.topk(2, dim=-1).values
            margin = float((top[:, 0] - top[:, 1]).min())
            same = want.argmax(-1).tolist() == tokens
        finish = meta["finish_reason"]["type"] if meta["finish_reason"] else "running"
        return Outcome(
            scenario,
            len(prompt),
            len(tokens),
            meta.get("cached_tokens", 0),
            meta.get("num_retractions", 0),
            finish,
            same,
            difference,
            margin,
        )

    def _run(self, scenario: str, prompts: list[list[int]], max_new: int | list[int]) -> list[Outcome]:
        return self._compare(scenario, prompts, self.engine.generate(prompts, max_new))

    def chunked(self) -> list[Outcome]:
        """A prompt of five chunks beside a short one; both decode over a window and a C4 boundary together."""
        self.history = self.prompter.tokens(2040)
        prompts = [self.history, self.prompter.tokens(120)]
        outputs = self.engine.generate(prompts, [12, 10])
        self.history = self.history + list(outputs[0]["output_ids"])
        return self._compare("chunked prefill, ragged decode", prompts, outputs)

    def prefix(self) -> list[Outcome]:
        """Two requests that go on from the first one's history, whose group was closed by a decode, at once."""
        prompts = [self.history + self.prompter.tokens(30), self.history[:2050] + self.prompter.tokens(115)]
        return self._run("prefix of a finished request", prompts, [6, 15])

    def divided(self) -> list[Outcome]:
        """A request that shares less than a group: nothing can be reused."""
        return self._run("shared tokens below a group", [self.history[:1500] + self.prompter.tokens(30)], 6)

    def retracted(self) -> list[Outcome]:
        """Three requests that fill the pools to the last page and want more: some are retracted and start again."""
        pages = self.engine.tokens // self.engine.page // 3
        prompts = [self.prompter.tokens(pages * self.engine.page - 10) for _ in range(3)]
        return self._run("retraction", prompts, 16)

    def aborted(self) -> list[Outcome]:
        """One of two running requests is aborted after some tokens; the other one, and the next one, are unharmed."""
        prompts = [self.prompter.tokens(300), self.prompter.tokens(290)]
        outputs = asyncio.get_event_loop().run_until_complete(self._abort_first(prompts))
        return self._compare("abort beside a running request", prompts, outputs) + self._run(
            "after the abort", [self.prompter.tokens(200)], 10
        )

    async def _abort_first(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        sglang = self.engine.sglang

        async def ask(prompt: list[int], max_new: int, rid: str, stop_after: int) -> dict[str, Any]:
            sampling = {"max_new_tokens": max_new, "temperature": 0, "ignore_eos": True}
            stream = await sglang.async_generate(input_ids=prompt, sampling_params=sampling, rid=rid, stream=True)
            tokens: list[int] = []
            out: dict[str, Any] = {}
            sent = False
            async for out in stream:
                tokens = list(out["output_ids"])
                if len(tokens) >= stop_after and not sent:
                    sglang.tokenizer_manager.abort_request(rid)
                    sent = True
            return {**out, "output_ids": tokens}

        return list(await asyncio.gather(ask(prompts[0], 400, "leaves", 5), ask(prompts[1], 30, "stays", 1000)))
