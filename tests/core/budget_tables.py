"""The generated tables of docs/budget.md. ``python -m tests.core.budget_tables`` writes them; a test compares them."""

from __future__ import annotations

import argparse
import io
import itertools
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from rich.console import Console

from dsv4_npu.budget import GIB, budget_of, largest_sizes, unit_costs
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec, configs_dir
from dsv4_npu.planning import command
from dsv4_npu.planning.options import answer
from dsv4_npu.planning.show import show
from dsv4_npu.pools import DSV4Pools

DOC = Path(__file__).parents[2] / "docs" / "budget.md"
SPECULATIONS = (SpeculationSpec(), SpeculationSpec("chain", 3), SpeculationSpec("dspark", 5))
MIB = 2**20
EXAMPLE = (
    "--model v4_pro --platform a3 --hbm-gib 64 --weights-gib 40 --tp 16 --context 131072 --spec dspark --max-running 64"
)


def combinations() -> Iterator[CacheConfig]:
    """Every model × platform × speculation, 64 request slots of 131,072 tokens (or what the model has)."""
    names = [sorted(path.stem for path in (configs_dir() / kind).glob("*.json")) for kind in ("models", "platforms")]
    for model, platform, speculation in itertools.product(*names, SPECULATIONS):
        spec = ModelSpec.load(model)
        context = min(131072, spec.max_positions)
        yield CacheConfig(spec, PlatformSpec.load(platform), speculation, context_len=context, request_rows=64)


def built_bytes(config: CacheConfig, pools: DSV4Pools) -> int:
    """Bytes of the tensors themselves."""
    return sum(t.numel() * t.element_size() for slab in pools.families().values() for t in slab.tensors())


def equality() -> str:
    """Sizes for 24 GiB: bytes by the budget, bytes of the pools as torch builds them on its meta device."""
    lines = [
        "| model | platform | speculation | draft stages | tokens | budget, bytes | built, bytes | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for config in combinations():
        sizes = largest_sizes(config, 24 * GIB)
        speculation = config.speculation
        pools = DSV4Pools(config, sizes, device="meta", draft_stages=speculation.speculative)
        counted, built = budget_of(config, sizes).pool_bytes, built_bytes(config, pools)
        kind = f"{speculation.kind} {speculation.draft_tokens}" if speculation.speculative else "none"
        lines.append(
            f"| {config.model.name} | {config.platform.name} | {kind} | {pools.swa.layers - config.model.num_layers} "
            f"| {sizes.full_pages * config.page:,} | {counted:,} | {built:,} | {counted - built} |"
        )
    return "\n".join(lines)


def units() -> str:
    """What one more of each thing costs."""
    cases = [(m, p) for m in ("v4_flash", "v4_pro") for p in ("a3", "a5")]
    plain = [
        CacheConfig(ModelSpec.load(m), PlatformSpec.load(p), context_len=131072, request_rows=64) for m, p in cases
    ]
    drafting = [
        CacheConfig(c.model, c.platform, SpeculationSpec("chain", 3), context_len=131072, request_rows=64)
        for c in plain
    ]
    one, two = [unit_costs(c) for c in plain], [unit_costs(c) for c in drafting]
    pairs = list(zip(one, two, strict=True))
    rows = {
        "C4 KV + indexer + C128 KV, per token": [f"{float(u.token):,} B" for u in one],
        "SWA slot, all target layers": [f"{u.swa_slot:,} B" for u in one],
        "SWA slot, one draft stage": [f"{v.swa_draft_slot:,} B" for v in two],
        "C4 state of one bank, ring 8 / 16": [f"{u.c4_bank / MIB:.2f} / {v.c4_bank / MIB:.2f} MiB" for u, v in pairs],
        "C128 state of one request, ring 128 / 256": [
            f"{u.c128_bank / MIB:g} / {v.c128_bank / MIB:g} MiB" for u, v in pairs
        ],
        "one C128 page of 16 entries": [f"{u.c128_page:,} B" for u in one],
        "1 Mi-token KV without SWA": [f"{float(u.token * Fraction(MIB, GIB)):.2f} GiB" for u in one],
    }
    head = "| | " + " | ".join(f"{m} {p}" for m, p in cases) + " |"
    return "\n".join([head, "|---|---|---|---|---|", *(f"| {k} | {' | '.join(v)} |" for k, v in rows.items())])


def plan_output() -> str:
    """What ``dsv4-npu plan`` prints for the options of :data:`EXAMPLE`."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    out = io.StringIO()
    show(Console(file=out, width=80, highlight=False), answer(parser.parse_args(EXAMPLE.split())))
    lines = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
    first, second = EXAMPLE.split(" --context")
    return f"```console\n$ dsv4-npu plan {first} \\\n    --context{second}\n{lines}\n```"


TABLES = {"equality": equality, "units": units, "plan": plan_output}


def filled(text: str) -> str:
    """The page with each table between its markers generated anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: generated -->\n", f"\n<!-- end of {name} -->"
        head, _, rest = text.partition(begin)
        _, found, tail = rest.partition(end)
        if not found:
            raise ValueError(f"{DOC.name} has no marks of the table {name!r}")
        text = head + begin + table() + end + tail
    return text


if __name__ == "__main__":
    DOC.write_text(filled(DOC.read_text(encoding="utf-8")), encoding="utf-8")
