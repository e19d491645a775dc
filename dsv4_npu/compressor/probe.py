"""Which rows an installed compressor operator saves, found out by running it on a few rows.

The only correct rule saves, after a batch ``[start, end)``, every row of position
``>= min(trunc(end, r) − (overlap − 1) · r, end − pad)``. An older rule lacks the ``end − pad`` term: once a draft
closes a window, it drops the rows before it, which are lost if the verify then accepts less than that. So a rule is not
trusted: :func:`probe` feeds batches that cross a boundary at every offset and looks which rows of the ring hold what.
Its judgement knows no rule; it asks, for each number of rows that may be accepted, whether every row that a later
window reads is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dsv4_npu import addressing
from dsv4_npu.compressor.plan import plan_ring
from dsv4_npu.compressor.reference import CompressorWeights, compress_batch
from dsv4_npu.errors import ConfigError, InputError

#: What rows hold before the batch: history, and a mark on rows whose content no window may use.
HISTORY, MARK = -1.0, -7.0
#: Position of the boundary that batches cross, in windows: far enough to have a whole ring of history.
_BOUNDARY = 12
#: Largest integer up to which bfloat16 holds every one: inputs of a fused operator are bfloat16.
_EXACT = 256


@dataclass(frozen=True)
class ProbeBatch:
    """One batch for an operator; request b has the ring rows ``(b + 1) · ring .. + ring`` of ``state``.

    Every channel of a new row holds the same small integer, so that an operator with projections of its own can be
    given inputs that produce exactly these rows.

    Attributes:
        ratio, ring: 4 or 128, and the rows of one bank.
        kv, gate: float32 ``[B, q, overlap · D]``, the projections of the new rows (ape is zero).
        state: float32 ``[(B + 2) · ring, 2 · overlap · D]``, to be changed in place; the last row is the dummy.
        starts: position of each request's first new row; each has q of them.
    """

    ratio: int
    ring: int
    kv: torch.Tensor
    gate: torch.Tensor
    state: torch.Tensor
    starts: tuple[int, ...]

    @property
    def dummy(self) -> int:
        """The dummy state row, which stands for positions without a row."""
        return self.state.shape[0] - 1

    @property
    def width(self) -> int:
        """q: new rows per request."""
        return self.kv.shape[1]

    def row(self, request: int, position: int) -> int:
        """State row of a position of one request of the batch."""
        return addressing.request_state_rows(request + 1, position, self.ring)


#: Compresses a batch: closes windows as it likes, and saves rows to ``batch.state``.
Operator = Callable[[ProbeBatch], None]


@dataclass(frozen=True)
class Lost:
    """A row that a later window reads and that is not there after a verify."""

    width: int
    start: int
    accepted: int
    position: int
    found: str

    def __str__(self) -> str:
        return (
            f"a verify of {self.width} rows from position {self.start}, {self.accepted} of them accepted: "
            f"the row of position {self.position} {self.found}"
        )


@dataclass(frozen=True)
class ProbeResult:
    """What the operator does.

    Attributes:
        rule: "pad" (correct), "old" (without the pad term), "nothing" (no new row was saved), "other".
        safe_width: the largest width up to which every verify keeps what is accepted; 0 if none does.
        lost: the first loss at each width that has one.
        strays: rows outside of the batch that the operator changed, in words; empty if none.
    """

    ratio: int
    ring: int
    asked: int
    rule: str
    safe_width: int
    lost: tuple[Lost, ...]
    strays: str = ""

    @property
    def ok(self) -> bool:
        """Whether a verify of the width that was asked for is safe."""
        return self.safe_width >= self.asked

    def __str__(self) -> str:
        name = f"C{self.ratio} compressor, ring {self.ring}"
        if self.ok:
            return f"{name}: {self.rule} rule, verify widths up to D = {self.safe_width} keep every accepted row"
        why = self.strays or str(self.lost[0])
        return f"{name}: {self.rule} rule, safe up to D = {self.safe_width} only: {why}"

    def require(self) -> None:
        """Raise ConfigError, with the reason and the safe width, unless the width that was asked for is safe."""
        if self.ok:
            return
        if self.safe_width < 1:
            advice = "this operator cannot be used at all: install another build of the compressor"
        elif self.safe_width == 1:
            advice = "no speculation is safe with it: leave --speculative-algorithm out"
        else:
            drafts = f"--speculative-num-steps {self.safe_width - 1} --speculative-num-draft-tokens {self.safe_width}"
            advice = f"the safe width is D = {self.safe_width}: {drafts}, or less"
        raise ConfigError(f"speculation with D = {self.asked} would lose accepted rows. {self}; {advice}")


def probe(
    operator: Operator,
    ratio: int,
    ring: int,
    width: int,
    head_dim: int = 512,
    device: torch.device | str = "cpu",
) -> ProbeResult:
    """Run ``operator`` at every width up to ``width`` and judge what it saved.

    Args:
        operator: called once per width with a fresh batch.
        ratio: 4 or 128; ring: rows of one bank; head_dim: D, 512 for attention and 128 for the C4 indexer.
        width: D, the verify width that shall be used (root included); 1 without speculation.

    Raises InputError for a ratio or a width that no batch can have. Waits for the device, once per width.
    """
    if ratio not in addressing.OVERLAP:
        raise InputError(f"ratio = {ratio}; one of {sorted(addressing.OVERLAP)} is needed")
    most = max(addressing.write_pad(ring, ratio), 1)
    while len(_starts(ratio, most)) * most > _EXACT:
        most -= 1
    if not 1 <= width <= most:
        raise InputError(f"width = {width}; 1 to {most} is needed for a C{ratio} ring of {ring} rows")
    safe, lost, strays, rules = 0, [], "", set[str]()
    for current in range(1, width + 1):
        batch = _batch(ratio, ring, current, head_dim, device)
        before = batch.state.cpu().clone()
        operator(batch)
        after = batch.state.cpu()
        seen = _Seen(batch, before, after)
        strays = strays or seen.strays()
        losses = list(seen.losses())
        lost += losses[:1]
        rules |= seen.rules() if current > 1 or width == 1 else set()
        if not losses and not strays and safe == current - 1:
            safe = current
    names = ("pad", "old", "nothing") if not strays else ()
    followed = [name for name in names if all(name in one.split("|") for one in rules)]
    return ProbeResult(ratio, ring, width, followed[0] if followed else "other", safe, tuple(lost), strays)


def reference_operator(batch: ProbeBatch) -> None:
    """The compressor of this package as an operator."""
    channels = batch.kv.shape[2]
    head = channels // addressing.OVERLAP[batch.ratio]
    device = batch.kv.device
    weights = CompressorWeights(
        ape=torch.zeros(batch.ratio, channels, device=device),
        norm=torch.ones(head, device=device),
        eps=1e-6,
        inv_freq=torch.ones(1, device=device),
    )
    rows = torch.arange(1, len(batch.starts) + 1, device=device)[:, None]
    plan = plan_ring(
        batch.ratio,
        batch.ring,
        batch.starts,
        None,
        batch.width,
        lambda positions: addressing.request_state_rows(rows, positions, batch.ring),
        batch.dummy,
        device,
    )
    compress_batch(batch.state, batch.kv, batch.gate, plan, weights, torch.tensor(batch.starts, device=device))


def _starts(ratio: int, width: int) -> tuple[int, ...]:
    """Starts from which a batch crosses the boundary after each of its rows, ends or begins at it, or stays inside."""
    boundary = _BOUNDARY * ratio
    return (*range(boundary - width, boundary + 1), *((boundary + 1, boundary + 2, boundary + 3)[: ratio % 128]))


def _batch(ratio: int, ring: int, width: int, head_dim: int, device: torch.device | str) -> ProbeBatch:
    starts = _starts(ratio, width)
    channels = addressing.OVERLAP[ratio] * head_dim
    state = torch.full(((len(starts) + 2) * ring, 2 * channels), MARK)
    for b, start in enumerate(starts):
        held = [addressing.request_state_rows(b + 1, p, ring) for p in range(start - ring, start)]
        state[held, :channels], state[held, channels:] = HISTORY, 0.0
    for dummy in (slice(0, ring), slice(-1, None)):
        state[dummy, :channels], state[dummy, channels:] = 0.0, float("-inf")
    codes = torch.arange(1, len(starts) * width + 1, dtype=torch.float32).view(len(starts), width, 1)
    kv = codes.expand(-1, -1, channels).contiguous()
    return ProbeBatch(ratio, ring, kv.to(device), (-kv).to(device), state.to(device), starts)


class _Seen:
    """The ring before and after one batch."""

    def __init__(self, batch: ProbeBatch, before: torch.Tensor, after: torch.Tensor) -> None:
        self.batch = batch
        self.changed: list[bool] = (after != before).any(dim=1).tolist()
        new = torch.cat((batch.kv.cpu(), batch.gate.cpu()), dim=-1)
        rows = [[batch.row(b, start + step) for step in range(batch.width)] for b, start in enumerate(batch.starts)]
        self.saved: list[list[bool]] = torch.isclose(after[torch.tensor(rows)], new).all(dim=2).tolist()

    def losses(self) -> Iterator[Lost]:
        """What each accepted length loses: rows of later windows that are neither intact history nor saved."""
        batch, ratio = self.batch, self.batch.ratio
        for request, start in enumerate(batch.starts):
            for accepted in range(1, batch.width + 1):
                end = start + accepted
                first = addressing.floor_to(end, ratio) - (addressing.OVERLAP[ratio] - 1) * ratio
                for position in range(max(first, 0), end):
                    found = self._wrong(request, start, position)
                    if found:
                        yield Lost(batch.width, start, accepted, position, found)

    def _wrong(self, request: int, start: int, position: int) -> str:
        changed = self.changed[self.batch.row(request, position)]
        if position >= start:
            if self.saved[request][position - start]:
                return ""
            return "holds another row's values" if changed else "was not saved"
        return "was overwritten" if changed else ""

    def strays(self) -> str:
        """Rows of other banks, or of positions outside of the batch, that were changed; the dummies do not count."""
        batch = self.batch
        mine = {batch.row(b, start + step) for b, start in enumerate(batch.starts) for step in range(batch.width)}
        mine |= {*range(batch.ring), batch.dummy}
        rows = [row for row, changed in enumerate(self.changed) if changed and row not in mine]
        return f"rows {rows[:4]} outside of the batch were changed" if rows else ""

    def rules(self) -> set[str]:
        """For each request, the names of the rules that save exactly what was saved, between bars."""
        return {self._followed(request, start) for request, start in enumerate(self.batch.starts)}

    def _followed(self, request: int, start: int) -> str:
        batch, end = self.batch, start + self.batch.width
        saved = [start + step for step, there in enumerate(self.saved[request]) if there]
        if any(self.changed[batch.row(request, p)] and p not in saved for p in range(start, end)):
            return "other"
        pad = addressing.write_pad(batch.ring, batch.ratio)
        rules: dict[str, Sequence[int]] = {
            "pad": range(addressing.save_start(start, end, batch.ratio, pad), end),
            "old": range(addressing.save_start(start, end, batch.ratio, 0), end),
            "nothing": (),
        }
        return "|".join(name for name, positions in rules.items() if list(positions) == saved) or "other"
