"""Native rows: speculative decode against plain decode over pools of the same formats.

Rows of a few bits move every logit, so the float64 oracle cannot be the reference. A plain decode (D = 1) of the same
engine over pools of the same formats and rings is: all new rows are read back through the pool, so both see the same
bytes, and their logits differ by the rounding of batched products alone. The float64 oracle says how far the rows move
the logits, and with that which choices they do not settle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsv4_npu.budget import sizes_for_tokens
from dsv4_npu.config import CacheConfig
from dsv4_npu.emulation.engine import Engine, EngineOptions, RequestRun
from dsv4_npu.emulation.oracle import Oracle, OracleRun


@dataclass(frozen=True)
class CloseCall:
    """A choice that the rows do not settle.

    Attributes:
        rid, position: the request, and the index of the output.
        token: the speculative decode's; plain, float64: those of the others after the same history.
        margin: difference of the two largest logits of the plain decode.
        row_error: the largest difference of a logit to float64's here. Both logits of a margin may be off by it, so
            twice as much can turn the choice.
    """

    rid: int
    position: int
    token: int
    plain: int
    float64: int
    margin: float
    row_error: float


@dataclass(frozen=True)
class NativeComparison:
    """One request against the plain decode and float64.

    Attributes:
        close_calls: every choice that the rows do not settle, in order.
        explained: outputs that differ from the plain decode and are close calls; unexplained: other ones.
        max_logit_error: largest logit difference to the plain decode, over all outputs.
        min_margin: smallest difference of the two largest logits of the plain decode.
        max_row_error, rms_row_error: logit difference of the plain decode to float64 after the same history.
        float64_differences: outputs for which float64 would choose another token after the same history.
    """

    close_calls: list[CloseCall]
    explained: list[int]
    unexplained: list[int]
    max_logit_error: float
    min_margin: float
    max_row_error: float
    rms_row_error: float
    float64_differences: int


class PlainDecode:
    """A plain decode (D = 1) over its own pools, with the row formats, rings and page sizes of ``config``.

    It is asked like the oracle; results are kept per prompt.
    """

    def __init__(self, model: Any, config: CacheConfig, options: EngineOptions) -> None:
        spare = config.verify_width
        longest = min(config.context_len + spare, config.model.max_positions)
        self.model = model
        self.config = replace(
            config, speculation=replace(config.speculation, draft_tokens=0), context_len=longest, row_width=None
        )
        self.options = EngineOptions(batch=options.batch, chunk=options.chunk)
        self._runs: dict[tuple[int, ...], OracleRun] = {}

    def prepare(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        """Decode ``count`` tokens after each prompt, several at once."""
        config = self.config
        engine = Engine(
            self.model, config, sizes_for_tokens(config, config.request_rows * config.width), None, self.options
        )
        for prompt in prompts:
            engine.submit(prompt, min(count, config.context_len - len(prompt)))
        for run in engine.run():
            self._runs[tuple(run.prompt)] = OracleRun(run.outputs, torch.stack(run.logits))

    def greedy(self, prompt: Sequence[int], count: int) -> OracleRun:
        """The first ``count`` tokens after ``prompt`` and the logits behind them, fewer where the context ends."""
        known = self._runs.get(tuple(prompt))
        if known is None or len(known.tokens) < count:
            self.prepare([prompt], count)
        run = self._runs[tuple(prompt)]
        return OracleRun(run.tokens[:count], run.logits[:count])


def compare_native(request: RequestRun, plain: PlainDecode, oracle: Oracle) -> NativeComparison:
    """Compare a speculative decode over native rows with the plain decode.

    Behind an output that differs the plain decode starts again from the speculative history, so every output is
    compared after the same history.
    """
    outputs, count = request.outputs, len(request.outputs)
    tokens: list[int] = []
    parts: list[torch.Tensor] = []
    while len(tokens) < count:
        want = plain.greedy(request.prompt + outputs[: len(tokens)], count - len(tokens))
        same = 0
        while same < len(want.tokens) and want.tokens[same] == outputs[len(tokens) + same]:
            same += 1
        # The choice that differs was made after the same history too.
        taken = min(same + 1, len(want.tokens))
        tokens += want.tokens[:taken]
        parts.append(want.logits[:taken])
    logits = torch.cat(parts)
    exact = oracle.forced(request.prompt, outputs)
    off = logits - exact
    row_errors = off.abs().amax(-1)
    margins = OracleRun(tokens, logits).margins()
    best = exact.argmax(-1).tolist()
    close = [
        CloseCall(request.rid, i, outputs[i], tokens[i], best[i], float(margins[i]), float(row_errors[i]))
        for i in range(count)
        if unsettled(float(margins[i]), float(row_errors[i]))
    ]
    positions = {call.position for call in close}
    differ = [i for i in range(count) if tokens[i] != outputs[i]]
    return NativeComparison(
        close_calls=close,
        explained=[i for i in differ if i in positions],
        unexplained=[i for i in differ if i not in positions],
        max_logit_error=float((torch.stack(request.logits) - logits).abs().max()),
        min_margin=float(margins.min()),
        max_row_error=float(row_errors.max()),
        rms_row_error=float(off.square().mean().sqrt()),
        float64_differences=sum(a != b for a, b in zip(tokens, best, strict=True)),
    )


def unsettled(margin: float, row_error: float) -> bool:
    """Whether rows that move logits by up to ``row_error`` can turn a choice of this margin."""
    return not margin > 2 * row_error
