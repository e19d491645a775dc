"""``python -m tests.stages``: make the tables of docs/draft-stages.md anew (some minutes)."""

from __future__ import annotations

import torch

from tests.stages.tables import DOC, filled, tables

torch.set_num_threads(1)
DOC.write_text(filled(DOC.read_text(encoding="utf-8"), tables()), encoding="utf-8")
