"""Tables of a run for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from dsv4_npu.emulation import tokenizer
from dsv4_npu.emulation.agreement import print_ranks
from dsv4_npu.emulation.costs import StepCosts
from dsv4_npu.emulation.result import RunResult

#: Columns below which tables leave out their frames and shorten what they can.
NARROW = 110


def _table(console: Console, title: str | None) -> Table:
    """An empty table with frames where there is room for them."""
    if console.width >= NARROW:
        return Table(title=title, title_justify="left")
    return Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))


def _verdict(identical: bool | None, simulated: bool, wrong: str) -> str:
    """Of a comparison with the oracle; a dash where nothing was compared."""
    if identical is None:
        return "–"
    return wrong if not identical else "simulated" if simulated else "yes"


def print_result(console: Console, result: RunResult) -> None:
    narrow = console.width < NARROW
    table = _table(console, result.label)
    histograms = "accepted:\nrounds" if narrow else "rows accepted: rounds"
    names = ("request", "prompt", "new", "rounds", histograms, "logit\nerror" if narrow else "logit error")
    for name in (*names, "identical", "output"):
        table.add_column(name, justify="right" if name in ("request", "prompt", "new", "rounds") else "left")
    for r in result.requests:
        histogram = "  ".join(f"{k}:{v}" for k, v in r.accept_histogram.items())
        verdict = _verdict(r.identical, r.simulated, f"NO (token {r.first_difference})")
        text = tokenizer.decode(r.outputs)
        longest = 12 if narrow else 28
        table.add_row(
            str(r.rid),
            str(r.prompt_tokens),
            str(len(r.outputs)),
            str(r.rounds),
            histogram,
            "–" if r.max_logit_error is None else f"{r.max_logit_error:.1e}",
            verdict,
            text[:longest] + ("…" if len(text) > longest else ""),
        )
    console.print(table)
    families = _table(console, None)
    for name in ("family", "pages held", "peak", "of", "MiB"):
        families.add_column(name, justify="left" if name == "family" else "right")
    for f in result.families:
        families.add_row(f.name, str(f.used), str(f.peak), str(f.total), f"{f.bytes / 2**20:.2f}")
    console.print(families)
    if result.parking is not None:
        p = result.parking
        console.print(
            f"retractions: {result.retractions}, of which {p.empty} had computed nothing; "
            f"snapshots: {p.saved} taken (at most {p.peak_bytes / 2**20:.2f} MiB at once), "
            f"{p.restored} restored with {p.positions} positions, {p.evicted} evicted, {p.refused} refused, "
            f"{p.put_off} put off for want of pages",
            soft_wrap=True,
        )
    elif result.retractions:
        console.print(f"retractions: {result.retractions}, each computed again")
    if result.drafts is not None:
        console.print(str(result.drafts), soft_wrap=True)
    if result.device is not None:
        _print_device(console, result.device)


def _print_device(console: Console, costs: StepCosts) -> None:
    table = _table(console, f"{costs.steps} decode steps on the emulated device")
    for name in ("event", "per step", "most in a step", "in a steady step"):
        table.add_column(name, justify="left" if name == "event" else "right")
    for line in costs.lines:
        steady = "-" if line.steady is None else f"{line.steady:g}"
        table.add_row(line.event, f"{line.total / max(costs.steps, 1):.2f}", str(line.most), steady)
    console.print(table)
    console.print("the model stands in for the attention kernels: what it does inside is not counted")


def print_native(console: Console, results: list[RunResult]) -> None:
    """What native rows cost in accuracy, and how many choices they do not settle."""
    table = Table(title="logits of native rows against float64, after the same history", title_justify="left")
    for name in (
        "run",
        "logits off by, rms",
        "most",
        "float64 chooses another",
        "not settled by the rows",
        "explained",
    ):
        table.add_column(name, justify="left" if name == "run" else "right")
    for r in results:
        natives = [(q.native, len(q.outputs)) for q in r.requests if q.native]
        count = sum(n for _, n in natives)
        square = sum(q.rms_row_error**2 * n for q, n in natives) / max(count, 1)
        table.add_row(
            r.label,
            f"{square**0.5:.1e}",
            f"{max((q.max_row_error for q, _ in natives), default=0.0):.1e}",
            f"{sum(q.float64_differences for q, _ in natives)} of {count}",
            str(sum(len(q.close_calls) for q, _ in natives)),
            str(sum(len(q.explained) for q, _ in natives)),
        )
    console.print(table)


def native_summary(results: list[RunResult]) -> str:
    """How many choices the rows do not settle, and how many of them went another way; empty without native rows."""
    natives = [q.native for r in results for q in r.requests if q.native]
    if not natives:
        return ""
    calls, turned = sum(len(q.close_calls) for q in natives), sum(len(q.explained) for q in natives)
    return (
        f"; compared with a plain decode over the same rows: {calls} outputs have a top-2 margin within the rows' "
        f"error, {turned} of them differ (--json lists them)"
    )


def print_summary(console: Console, results: list[RunResult]) -> None:
    table = _table(console, "summary")
    between = "\n" if console.width < NARROW else " "
    for name in ("run", "identical", "audit", "leaks", f"verify{between}rounds", f"rows per{between}round", "seconds"):
        table.add_column(name)
    for r in results:
        accepted = sum(q.mean_accept * q.rounds for q in r.requests)
        rounds = sum(q.rounds for q in r.requests)
        table.add_row(
            r.label,
            _verdict(r.identical, r.simulated, "NO"),
            r.audit,
            ", ".join(r.leaked) or "none",
            str(r.rounds),
            f"{accepted / rounds:.2f}" if rounds else "-",
            f"{r.seconds:.1f}",
        )
    console.print(table)
    print_ranks(console, results)
    if any(r.simulated for r in results):
        console.print("simulated acceptance: lengths and tokens are made up; only layout, memory and cost are real")
    if all(r.simulated for r in results):
        return
    if any(q.native for r in results for q in r.requests):
        print_native(console, results)
    worst = max((r.max_logit_error for r in results), default=0.0)
    margin = min((q.min_margin for r in results for q in r.requests), default=0.0)
    console.print(
        f"identical = {'yes' if all(r.identical for r in results) else 'NO'} "
        f"(largest logit difference {worst:.1e}, smallest top-2 margin {margin:.1e}){native_summary(results)}",
        soft_wrap=True,
    )
