"""The generated tables of docs/native-rows.md; ``python -m tests.emulation.native_tables`` writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dsv4_npu.emulation.engine import Engine
from dsv4_npu.emulation.native import PlainDecode, compare_native
from dsv4_npu.movement.belongings import locate
from dsv4_npu.pools import RowSlab
from tests.emulation.harness import Bench, Setting

DOC = Path(__file__).parents[2] / "docs" / "native-rows.md"
PLATFORMS = ("a3", "a5")
LENGTHS = (60, 420)
NEW = 32
FAMILIES = {"swa": "SWA rows", "c4": "C4 entries", "c128": "C128 entries", "c4 indexer": "indexer keys"}


@dataclass(frozen=True)
class Error:
    """Largest and root mean square difference, and the root mean square of the values themselves."""

    largest: float
    rms: float
    size: float

    @staticmethod
    def of(found: torch.Tensor, true: torch.Tensor) -> Error:
        off = found - true
        return Error(float(off.abs().max()), float(off.square().mean().sqrt()), float(true.square().mean().sqrt()))


def kept_rows(bench: Bench, setting: Setting, history: list[int]) -> tuple[Engine, dict[str, torch.Tensor]]:
    """Rows ``[layers, n, D]`` of each family after a prefill of ``history``, in float64."""
    engine = bench.engine(setting, None)
    run = engine.submit(history, 1, session=True)
    engine.run()
    found = locate(engine.alloc, engine.config, run.row, len(history))
    rows = {}
    for name in FAMILIES:
        slab = engine.pools.families()[name]
        assert isinstance(slab, RowSlab)
        at = torch.from_numpy(found[name])
        rows[name] = torch.stack([slab.read(layer, at, torch.float64) for layer in range(slab.layers)])
    return engine, rows


def stored_alone(slab: Any, rows: torch.Tensor) -> torch.Tensor:
    """Exact rows after one round trip through the format."""
    flat = rows.flatten(0, 1)
    back: torch.Tensor = slab.row.decode(*slab.row.encode(flat), torch.float64)
    return back.view_as(rows)


def measured(bench: Bench, platform: str) -> tuple[list[tuple[str, str, Error, Error]], dict[str, float]]:
    """Per family: format, error of the format alone, error in the run. And what the logits and choices show."""
    exact = Setting(platform=platform, kind="none", width=1, batch=len(LENGTHS), new_tokens=NEW, chunk=256)
    setting = replace(exact, native=True)
    engine = bench.engine(setting, None)
    plain = PlainDecode(bench.model, engine.config, engine.options)
    prompts = [bench.prompt(length) for length in LENGTHS]
    plain.prepare(prompts, NEW)
    for prompt in prompts:
        engine.submit(prompt, NEW)
    runs = engine.run()
    found = [compare_native(run, plain, bench.oracle) for run in runs]
    count = sum(len(run.outputs) for run in runs)
    greedy = [bench.oracle.greedy(run.prompt, NEW).tokens for run in runs]
    numbers = {
        "outputs": count,
        "largest": max(one.max_row_error for one in found),
        "rms": (sum(one.rms_row_error**2 * NEW for one in found) / count) ** 0.5,
        "other": sum(one.float64_differences for one in found),
        "unsettled": sum(len(one.close_calls) for one in found),
        "greedy": sum(
            a != b for run, want in zip(runs, greedy, strict=True) for a, b in zip(run.outputs, want, strict=True)
        ),
    }
    parts: dict[str, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {name: [] for name in FAMILIES}
    for run in runs:
        history = run.prompt + run.outputs
        _, true = kept_rows(bench, exact, history)
        holder, stored = kept_rows(bench, setting, history)
        for name in FAMILIES:
            alone = stored_alone(holder.pools.families()[name], true[name])
            parts[name].append((stored[name], alone, true[name]))
    lines = []
    for name, label in FAMILIES.items():
        stored_rows, alone, true_rows = (torch.cat([part[i].flatten() for part in parts[name]]) for i in range(3))
        form = engine.pools.families()[name].row.name  # type: ignore[union-attr]
        lines.append((label, form, Error.of(alone, true_rows), Error.of(stored_rows, true_rows)))
    return lines, numbers


def tables(bench: Bench) -> str:
    rows = [
        "| platform | family | format | rms of the values | format alone, largest | rms | in the run, largest | rms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    heads = ("platform", "outputs", "logits, largest error", "rms", "float64 chooses another token")
    heads += ("not settled by the rows", "differ from float64's own greedy decode")
    logits = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for platform in PLATFORMS:
        lines, n = measured(bench, platform)
        for label, form, alone, run in lines:
            cells = (alone.size, alone.largest, alone.rms, run.largest, run.rms)
            rows.append(f"| {platform} | {label} | {form} | " + " | ".join(f"{cell:.1e}" for cell in cells) + " |")
        shares = [f"{n[key]:.0f} ({100 * n[key] / n['outputs']:.1f} %)" for key in ("other", "unsettled", "greedy")]
        logits.append(
            f"| {platform} | {n['outputs']:.0f} | {n['largest']:.1e} | {n['rms']:.1e} | " + " | ".join(shares) + " |"
        )
    return "\n".join(rows) + "\n\n" + "\n".join(logits) + "\n"


def written(text: str, table: str) -> str:
    """The page with the table between its markers."""
    return re.sub(r"(<!-- table -->\n).*?(<!-- end -->)", lambda m: m[1] + table + m[2], text, flags=re.DOTALL)


if __name__ == "__main__":
    from dsv4_npu.config import ModelSpec

    torch.set_num_threads(1)
    page = DOC.read_text(encoding="utf-8")
    DOC.write_text(written(page, tables(Bench(ModelSpec.load("tiny")))), encoding="utf-8")
