"""The numbers of a replay: as plain data, and as the data of the HTML report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dsv4_npu.replay.report import SCHEMA, shown
from dsv4_npu.replay.runner import Deployment, Outcome
from dsv4_npu.replay.sizing import GIB, pool_bytes

FAMILIES = ("FULL", "SWA", "C128")
#: Owners of a page that some request reads.
READ = ("request", "shared")
IN_USE = (*READ, "cache", "transaction", "quarantine")


def as_json(name: str, what: Deployment, outcome: Outcome) -> dict[str, Any]:
    """Every number. All but ``timing`` depends on the trace and the options alone."""
    config = what.config
    return {
        "trace": name,
        "acceptance": what.acceptance.text,
        "deployment": {
            "model": config.model.name,
            "platform": config.platform.name,
            "speculation": config.speculation.kind,
            "verify_width": config.verify_width,
            "page_size": config.page,
            "c128_page_size": config.c128_page_size,
            "context": config.context_len,
            "sizes": asdict(what.sizes),
            "pool_gib": round(sum(pool_bytes(config, what.sizes).values()) / GIB, 3),
            "policy": asdict(what.policy),
            "sessions": what.sessions,
            "prefix_cache": what.prefix_cache,
            "seed": what.acceptance.seed,
            "accept_rate": what.acceptance.rate,
        },
        "counters": outcome.counters.as_dict(),
        "pages": {
            family: {
                "peak": outcome.usage[family][1],
                "mean": round(outcome.samples.families.mean(family, *IN_USE), 2),
                "mean_read_by_requests": round(outcome.samples.families.mean(family, *READ), 2),
                "total": outcome.usage[family][2],
            }
            for family in FAMILIES
        },
        "refused": [{"reason": reason, "requests": count} for reason, count in outcome.reasons()],
        "audit": {"runs": outcome.counters.audits, "clean": outcome.clean, "problems": outcome.problems},
        "timing": {
            "seconds": round(outcome.seconds, 3),
            "operations_per_s": round(outcome.counters.operations / max(outcome.seconds, 1e-9)),
            "ledger": outcome.ledger,
        },
    }


def as_report(name: str, what: Deployment, outcome: Outcome) -> dict[str, Any]:
    """The data of the HTML report."""
    config, sizes, policy = what.config, what.sizes, what.policy
    spec = config.speculation
    speculation = f"{spec.kind}, D = {config.verify_width}" if spec.speculative else "no speculation"
    reasons = [[reason, count] for reason, count in outcome.reasons()]
    gib = sum(pool_bytes(config, sizes).values()) / GIB
    return {
        "schema": SCHEMA,
        "title": f"Replay of {name}",
        "subtitle": f"{config.model.name} on {config.platform.name}, {speculation}, at most {policy.max_running} "
        f"running, {sizes.full_pages * config.page:,} tokens ({gib:.1f} GiB), seed {what.acceptance.seed}",
        "notes": [*what.notes, what.acceptance.text, "no forward runs: memory and scheduling only"],
        "verdict": {"ok": outcome.clean and bool(outcome.counters.served), "text": verdict(outcome)},
        **outcome.samples.as_data(),
        "numbers": list(_numbers(what, outcome)),
        "tables": [
            {"title": "Refused requests", "columns": ["reason", "requests"], "rows": reasons},
            *(
                [{"title": "Problems", "columns": ["what"], "rows": [[one] for one in outcome.problems]}]
                * (not outcome.clean)
            ),
        ],
    }


def verdict(outcome: Outcome) -> str:
    """One line: audit and leaks."""
    audits = outcome.counters.audits
    if outcome.clean:
        served = "" if outcome.counters.served else "nothing was served: every request was refused; "
        return f"{served}audit clean ({audits} run{'s' * (audits != 1)}), no leaks"
    return f"{len(outcome.problems)} problem{'s' * (len(outcome.problems) != 1)}: {outcome.problems[0]}"[:200]


def groups(numbers: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, str, str]]]:
    """Name, value and unit of numbers as texts, by group."""
    out: dict[str, list[tuple[str, str, str]]] = {}
    for one in numbers:
        out.setdefault(one["group"], []).append((one["name"], shown(one["value"]), one.get("unit", "")))
    return out


def _numbers(what: Deployment, outcome: Outcome) -> list[dict[str, Any]]:
    c, seconds = outcome.counters, max(outcome.seconds, 1e-9)
    hits = c.hit_tokens / max(c.prompt_tokens, 1)
    rows = sum(c.accept_histogram.values())
    mean_accept = sum(length * count for length, count in c.accept_histogram.items()) / max(rows, 1)
    accepted = "accepted tokens per verify, SIMULATED" if what.acceptance.width > 1 else "tokens per decode"
    numbers: list[dict[str, Any]] = [
        _number("Requests", "served", c.served, tile=True),
        _number("Requests", "refused", c.refused),
        _number("Requests", "retractions", c.retracted, tile=True),
        _number("Requests", "tokens recomputed after retractions", c.recomputed_tokens),
        _number("Requests", "session turns resumed", c.resumed),
        _number("Requests", "sessions given up under pressure", c.sessions_given_up),
        _number("Tokens", "prompt tokens", c.prompt_tokens),
        _number("Tokens", "prefix hit tokens", c.hit_tokens, tile=True),
        _number("Tokens", "prefix hit share of prompts", 100 * hits, "%"),
        _number("Tokens", "session tokens not recomputed", c.session_tokens),
        _number("Tokens", "prefilled tokens", c.prefilled_tokens),
        _number("Tokens", "output tokens", c.output_tokens),
        _number("Tokens", accepted, round(mean_accept, 3)),
        _number("Steps", "rounds", c.rounds),
        _number("Steps", "prefill steps", c.prefill_steps),
        _number("Steps", "decode steps", c.decode_steps),
        _number("Steps", "decode rows", c.decode_rows),
        _number("Steps", "table entries sent to the mirrors", c.table_entries),
        _number("Steps", "rows to clear", c.cleared_rows),
        _number("Steps", "SWA pages freed", c.cleared_swa_pages),
        _number("Throughput", "wall time", outcome.seconds, "s"),
        _number("Throughput", "operations", c.operations),
        _number("Throughput", "operations per second", round(c.operations / seconds), tile=True),
        _number("Throughput", "output tokens per second of replay", round(c.output_tokens / seconds)),
        _number("Throughput", "ledger", outcome.ledger),
    ]
    for family in FAMILIES:
        _, peak, total = outcome.usage[family]
        numbers += [
            _number("Pages", f"{family} peak", peak, f"of {total:,}", tile=family == "FULL"),
            _number("Pages", f"{family} mean", outcome.samples.families.mean(family, *IN_USE)),
            _number("Pages", f"{family} mean, read by requests", outcome.samples.families.mean(family, *READ)),
        ]
    numbers += [
        _number("Check", "audits", c.audits),
        _number("Check", "leaks and violations", len(outcome.problems), tile=True),
    ]
    return numbers


def _number(group: str, name: str, value: object, unit: str = "", *, tile: bool = False) -> dict[str, Any]:
    number = {"group": group, "name": name, "value": value, "unit": unit}
    return {**number, "tile": True} if tile else number
