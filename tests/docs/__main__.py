"""``python -m tests.docs``: renew the blocks of docs/troubleshooting.md and docs/walkthrough.md from the scripts."""

from __future__ import annotations

import torch

from dsv4_npu.config import ModelSpec
from tests.docs import faults_accept, faults_engine, faults_life, faults_pages  # noqa: F401
from tests.docs.faults import FAULTS
from tests.docs.pages import ROOT, read, with_blocks
from tests.docs.walk import walk
from tests.emulation.harness import Bench


def main() -> None:
    torch.set_num_threads(1)
    bench = Bench(ModelSpec.load("tiny"))
    given = {"backend": "python", "bench": bench}
    faults = {name: fault.text(True, given[fault.needs]) for name, fault in FAULTS.items()}
    for name, produced in (("troubleshooting.md", faults), ("walkthrough.md", walk(bench).blocks)):
        path = ROOT / "docs" / name
        path.write_text(with_blocks(read(name), produced), encoding="utf-8")


if __name__ == "__main__":
    main()
