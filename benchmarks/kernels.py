"""Times every op on a CUDA GPU against today's public kernels and the memory floor.

    python benchmarks/kernels.py                        # all ops; a table on the screen
    python benchmarks/kernels.py --ops clear chain      # those whose name starts so
    python benchmarks/kernels.py --json out/kernels.json --markdown out/kernels.md
    python benchmarks/kernels.py --sglang out/sglang    # also SGLang's own files, laid there unmodified
    python benchmarks/kernels.py --check                # only compare with ref.py, on a small size; needs no GPU

Each op is compared with its ref.py on fresh random inputs and poisoned outputs before it is timed, and so are the
others. Times are microseconds per call, taken in the three ways of _kernels_timing.py: "python / events / graph". Ours
is the public function on tensors that it has seen before, as in a serving loop; "first" is the host's time of a call
with tensors that come for the first time, with all argument checks, and "bare" that of the operator alone, through
torch's dispatcher. The floor is the bytes that any implementation touches over this card's own bandwidth; "reading
alone" is a kernel that only reads and adds up the rows that a draw reads.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
from _kernels_case import Case
from _kernels_memory import memory_cases
from _kernels_sampling import sampling_cases
from _kernels_timing import Card, by_events, from_python, in_graph, measure_card

from dsv4_npu.ops import _registry

SGLANG_FILES = {
    "clear": ("dsv4_c128_cleanup", "clear_unaccepted_c128_draft_states"),
    "chain": ("reject_sampling", "chain_speculative_sampling_triton"),
}


@dataclass
class Row:
    """One line: microseconds per call."""

    op: str
    size: str
    batch: int
    floor: float
    bare: float
    first: float
    ours: tuple[float, float, float]
    rivals: dict[str, tuple[float, float, float]] = field(default_factory=dict)


@triton.jit
def empty_kernel(x):  # type: ignore[no-untyped-def]
    pass


def load_sglang(folder: Path | None) -> dict[str, Any]:
    """SGLang's functions from its files in ``folder``, those that are there; the files need only torch and Triton."""
    found = {}
    for key, (module_name, function) in SGLANG_FILES.items():
        path = folder / f"{module_name}.py" if folder else None
        if path and path.is_file():
            spec = importlib.util.spec_from_file_location(module_name, path)
            if spec is None or spec.loader is None:
                raise SystemExit(f"{path} is not a Python file")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            found[key] = getattr(module, function)
    return found


def cases(device: str, small: bool, names: list[str], rivals: dict[str, Any]) -> Iterator[Case]:
    for family in (memory_cases, sampling_cases):
        for build in family(device, small, rivals):
            for case in build():
                if not names or case.op.startswith(tuple(names)):
                    yield case
                del case


def measure(case: Case, card: Card) -> Row:
    sets = [case.make(seed) for seed in range(case.sets)]
    touched = sum(case.touched(x) for x in sets) / len(sets)
    known = _registry.ops[case.op].calls

    def first(x: Any) -> None:
        known._known.clear()
        case.ours(x)

    new = from_python([first], sets, case.calls)[0]
    bare, ours, *others = from_python([case.bare, case.ours, *case.rivals.values()], sets, case.calls)
    return Row(
        case.op,
        case.size,
        case.batch,
        touched / getattr(card, case.ceiling) * 1e6,
        bare,
        new,
        (ours, by_events(case.ours, sets), in_graph(case.bare, sets, case.calls)),
        {
            name: (python, by_events(run, sets), in_graph(run, sets, case.calls))
            for python, (name, run) in zip(others, case.rivals.items(), strict=True)
        },
    )


def three(values: Iterable[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values)


def lines(rows: list[Row], card: Card) -> Iterator[str]:
    """The table in Markdown, which reads well on a screen too."""
    yield (
        f"{card.name}, torch {torch.__version__}, triton {triton.__version__}. Fill {card.fill / 1e12:.2f} TB/s, copy "
        f"{card.copy / 1e12:.2f} TB/s, read {card.read / 1e12:.2f} TB/s. An empty launch: {three(card.launch)} µs."
    )
    yield ""
    yield "| op | size | batch | floor | bare | first | ours | other | its times | ratios |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for r in rows:
        head = f"{r.op} | {r.size} | {r.batch} | {r.floor:.1f} | {r.bare:.1f} | {r.first:.1f} | {three(r.ours)}"
        for name, times in r.rivals.items():
            ratios = three(theirs / mine for theirs, mine in zip(times, r.ours, strict=True))
            yield f"| {head} | {name} | {three(times)} | {ratios} |"
            head = " |" * 6 + " "
        if not r.rivals:
            yield f"| {head} | – | – | – |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ops", nargs="*", default=[], help="only ops whose name starts with one of these")
    parser.add_argument(
        "--check", action="store_true", help="compare with ref.py only, at a small size, on any machine"
    )
    parser.add_argument("--sglang", type=Path, help="folder with SGLang's dsv4_c128_cleanup.py and reject_sampling.py")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.check:
        raise SystemExit("timing needs a CUDA GPU; --check compares with ref.py without one")
    rivals = load_sglang(options.sglang)
    if options.check:
        for case in cases(device, True, options.ops, rivals):
            for seed in range(2):
                case.verify(case.make(1000 + seed))
            print(f"{case.op} (batch {case.batch}): equal to ref", flush=True)
        return
    card = measure_card(lambda x: empty_kernel[(1,)](x))
    rows = []
    for case in cases(device, False, options.ops, rivals):
        for seed in range(2):
            case.verify(case.make(1000 + seed))
        rows.append(measure(case, card))
        print(f"{case.op} batch {case.batch}: {rows[-1]}", flush=True)
        torch.cuda.empty_cache()
    text = "\n".join(lines(rows, card)) + "\n"
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        facts = {"card": asdict(card), "torch": torch.__version__, "triton": triton.__version__}
        options.json.write_text(json.dumps({**facts, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
