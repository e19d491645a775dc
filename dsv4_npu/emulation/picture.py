"""The HTML report of a run: pages per family over its rounds, page maps, and the comparison with the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsv4_npu.emulation.engine import Engine
from dsv4_npu.emulation.result import RunResult
from dsv4_npu.replay.picture import FamilySeries, snapshot
from dsv4_npu.replay.report import SCHEMA, write_report

#: Page maps kept of one run.
MAPS = 60


class RunPicture:
    """Collects what the report shows while an engine runs; :meth:`sample` is called after every round."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.series = FamilySeries(engine.alloc, unit="round")
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.maps: list[dict[str, Any]] = []

    def sample(self) -> None:
        """Take the state after the round that just ended."""
        engine = self.engine
        self.series.sample(engine.rounds)
        self.running.append(len(engine.running))
        self.waiting.append(len(engine.waiting))
        self.maps.append(snapshot(engine.alloc, time=engine.rounds))
        if len(self.maps) > MAPS:
            self.maps = self.maps[::2]

    def write(self, result: RunResult, path: Path) -> None:
        """Write the report of the finished run."""
        rounds = sum(r.rounds for r in result.requests)
        accepted = sum(r.mean_accept * r.rounds for r in result.requests)
        same = "equal" if result.identical else "DIFFER from"
        those = "the oracle's" if result.reference == "the oracle" else f"those of {result.reference}"
        leaked = ", ".join(result.leaked) or "none"
        data = {
            "schema": SCHEMA,
            "title": "Speculative decode on the pools",
            "subtitle": result.label,
            "notes": [
                "a real DeepSeek-V4 implementation, tiny and randomly initialised, float64 on a CPU",
                f"outputs are compared with {result.reference}",
            ],
            "verdict": {
                "ok": result.ok,
                "text": f"outputs {same} {those}; audit {result.audit}; leaks: {leaked}",
            },
            **self.series.as_data(),
            "series": [
                {"name": "running requests", "values": self.running},
                {"name": "waiting requests", "values": self.waiting},
            ],
            "snapshots": self.maps,
            "numbers": [
                {"group": "Requests", "name": "served", "value": len(result.requests), "tile": True},
                {"group": "Requests", "name": "verify rounds", "value": result.rounds, "tile": True},
                {
                    "group": "Requests",
                    "name": "rows accepted per round",
                    "value": round(accepted / rounds, 2) if rounds else 0,
                    "tile": True,
                },
                {
                    "group": "Oracle",
                    "name": "largest logit difference",
                    "value": f"{result.max_logit_error:.1e}",
                    "tile": True,
                },
            ],
            "tables": [
                {
                    "title": "Requests",
                    "columns": ["request", "prompt", "cached", "new", "rounds", "rows accepted: rounds", "identical"],
                    "rows": [
                        [
                            r.rid,
                            r.prompt_tokens,
                            r.cached_tokens,
                            len(r.outputs),
                            r.rounds,
                            "  ".join(f"{k}:{v}" for k, v in r.accept_histogram.items()),
                            "yes" if r.identical else "NO",
                        ]
                        for r in result.requests
                    ],
                },
                {
                    "title": "Families",
                    "columns": ["family", "pages held", "peak", "of", "MiB"],
                    "rows": [[f.name, f.used, f.peak, f.total, round(f.bytes / 2**20, 2)] for f in result.families],
                },
            ],
        }
        write_report(data, path)


def report_path(path: Path, platform: str, kind: str, several: bool) -> Path:
    """Where the report of one run goes: ``OUT.html``, or ``OUT-a3-chain.html`` if there are several."""
    return path.with_name(f"{path.stem}-{platform}-{kind}{path.suffix}") if several else path
