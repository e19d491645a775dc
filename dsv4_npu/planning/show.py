"""A plan as text for a terminal and as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from dsv4_npu.budget import GIB, draft_stages, unit_costs
from dsv4_npu.planning.options import Answer

_LIMITS = {
    "FULL": "tokens (FULL pages)",
    "SWA": "SWA pages",
    "C128": "C128 pages",
    "request slots": "request slots (--max-running)",
}


def headline(answer: Answer) -> str:
    """One line: how much fits."""
    plan = answer.plan
    return f"{plan.tokens:,} tokens, {plan.requests:,} requests of full context"


def label(answer: Answer) -> str:
    """The configuration in a few words."""
    config = answer.plan.deployment.config
    spec = config.speculation
    drafting = f"{spec.kind} D={config.verify_width}" if spec.speculative else "no speculation"
    return f"{config.model.name} {config.platform.name} {drafting}"


def show(console: Console, answer: Answer) -> None:
    """Print a plan."""
    plan = answer.plan
    config = plan.deployment.config
    console.print(f"[bold]{headline(answer)}[/bold]", soft_wrap=True)
    console.print(
        f"{label(answer)}, context {config.context_len:,}, {config.request_rows} request slots; {_memory(answer)}",
        soft_wrap=True,
    )
    console.print(_families(answer))
    console.print("(pages: usable pages or state banks; rows: of one layer, with dummies; row: bytes)", soft_wrap=True)
    console.print(f"fixed {_gib(plan.fixed)}, then {plan.bytes_per_token:,.0f} bytes per token", soft_wrap=True)
    held = ", ".join(f"{name} {count:,}" for name, count in plan.limits.items())
    console.print(f"binding: {_LIMITS[plan.binding]}; requests of full context by {held}", soft_wrap=True)
    if plan.left is not None:
        console.print(
            f"{plan.left:,} bytes stay free; a page of {config.page} tokens more takes {plan.next_page:,}",
            soft_wrap=True,
        )
    console.print(_changes(answer))
    console.print("(bytes: at the same tokens; tokens then: the most that fit into the same memory)", soft_wrap=True)
    for note in answer.notes:
        console.print(f"note: {note}", soft_wrap=True)


def show_both(console: Console, one: Answer, two: Answer, changed: str) -> None:
    """Print two plans side by side; ``changed`` names the second where both have the same label."""
    first, second = label(one), label(two)
    if first == second:
        second = changed
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", first, second, "ratio"):
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    for name, a, b in _pairs(one, two):
        ratio = f"{b / a:.2f}" if a else "-"
        table.add_row(name, f"{a:,}", f"{b:,}", ratio)
    table.add_row("binding", *(_LIMITS[x.plan.binding].split(" (")[0] for x in (one, two)), "")
    console.print(f"{first}: [bold]{headline(one)}[/bold]", soft_wrap=True)
    console.print(f"{second}: [bold]{headline(two)}[/bold]", soft_wrap=True)
    console.print(table)
    for name, notes, others in ((first, one.notes, two.notes), (second, two.notes, one.notes)):
        for note in notes:
            if note not in others:
                console.print(f"note ({name}): {note}", soft_wrap=True)
    for note in one.notes:
        if note in two.notes:
            console.print(f"note: {note}", soft_wrap=True)


def as_json(answer: Answer) -> dict[str, Any]:
    """Every number of a plan."""
    plan, memory = answer.plan, answer.memory
    config, budget = plan.deployment.config, plan.budget
    costs = unit_costs(config)
    return {
        "summary": headline(answer),
        "tokens": plan.tokens,
        "requests": plan.requests,
        "binding": plan.binding,
        "requests_by_family": plan.limits,
        "model": config.model.name,
        "platform": config.platform.name,
        "speculation": config.speculation.kind,
        "verify_width": config.verify_width,
        "draft_stages": draft_stages(config),
        "context": config.context_len,
        "request_slots": config.request_rows,
        "page_size": config.page,
        "c128_page_size": config.c128_page_size,
        "swa_ratio": None if plan.deployment.swa_tokens is not None else plan.deployment.swa_ratio,
        "swa_tokens": budget.sizes.swa_pages * config.page,
        "tp": memory.tp,
        "hbm_gib": None if memory.hbm is None else float(memory.hbm),
        "weights_gib": float(memory.weights),
        "reserve_gib": float(memory.reserve),
        "memory_bytes": plan.deployment.memory,
        "total_bytes": budget.total_bytes,
        "free_bytes": plan.left,
        "next_page_bytes": plan.next_page,
        "fixed_bytes": plan.fixed,
        "bytes_per_token": plan.bytes_per_token,
        "sizes": asdict(budget.sizes),
        "families": {name: {**asdict(family), "bytes": family.nbytes} for name, family in budget.families.items()},
        "table_bytes": budget.table_bytes,
        "unit_costs": {name: float(value) for name, value in asdict(costs).items()},
        "changes": [asdict(change) for change in plan.changes],
        "notes": list(answer.notes),
    }


def _families(answer: Answer) -> Table:
    plan = answer.plan
    budget = plan.budget
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("family", "layers", "pages", "rows", "row", "bytes", "share"):
        table.add_column(name, justify="left" if name == "family" else "right")

    def share(nbytes: int) -> str:
        return f"{100 * nbytes / budget.total_bytes:.1f} %"

    table.add_row("full (ids only)", "-", f"{budget.sizes.full_pages:,}", f"{plan.tokens:,}", "-", "-", "-")
    drafts = draft_stages(budget.config)
    for name, family in budget.families.items():
        parts = [(name, family.layers)]
        if name == "swa" and drafts:
            parts = [(name, family.layers - drafts), ("swa draft stages", drafts)]
        for part, layers in parts:
            nbytes = layers * family.rows * family.row_bytes
            numbers = (f"{n:,}" for n in (layers, family.units, family.rows, family.row_bytes, nbytes))
            table.add_row(part, *numbers, share(nbytes))
    table.add_row("device tables", "-", "-", "-", "-", f"{budget.table_bytes:,}", share(budget.table_bytes))
    table.add_row("total", "", "", "", "", f"{budget.total_bytes:,}", share(budget.total_bytes))
    return table


def _changes(answer: Answer) -> Table:
    plan = answer.plan
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("change", "bytes", "tokens then", "gain", ""):
        table.add_column(name, justify="right" if name in ("bytes", "tokens then", "gain") else "left", no_wrap=True)
    for change in plan.changes:
        then = ("-", "-") if change.tokens is None else (f"{change.tokens:,}", f"{change.tokens - plan.tokens:+,}")
        table.add_row(change.what, f"{change.more_bytes:+,}", *then, change.note)
    return table


def _memory(answer: Answer) -> str:
    plan, memory = answer.plan, answer.memory
    total = _gib(plan.budget.total_bytes)
    if memory.hbm is None or plan.deployment.memory is None:
        return f"{total} needed on each device"
    taken = f"{float(memory.hbm):g} GiB - {float(memory.weights):g} weights - {float(memory.reserve):g} reserve"
    return f"{total} of {_gib(plan.deployment.memory)} ({taken}) on each device"


def _pairs(one: Answer, two: Answer) -> Iterator[tuple[str, int, int]]:
    a, b = one.plan, two.plan
    yield "tokens", a.tokens, b.tokens
    yield "requests of full context", a.requests, b.requests
    yield "request slots", a.deployment.config.request_rows, b.deployment.config.request_rows
    yield "bytes per token", round(a.bytes_per_token), round(b.bytes_per_token)
    yield "fixed bytes", a.fixed, b.fixed
    slots = [next(c.more_bytes for c in plan.changes) for plan in (a, b)]
    yield "one more slot, bytes", slots[0], slots[1]
    for name in a.budget.families:
        yield f"{name}, bytes", a.budget.families[name].nbytes, b.budget.families[name].nbytes
    yield "device tables, bytes", a.budget.table_bytes, b.budget.table_bytes
    yield "total bytes", a.budget.total_bytes, b.budget.total_bytes


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
