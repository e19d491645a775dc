"""The faults of docs/troubleshooting.md: each is planted in a small scene, and the scene tells what one sees.

A fault is a function ``(planted, backend) -> lines``. Without the fault the same scene must tell nothing: that proves
that it is the fault that the message speaks of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4_npu.alloc import AllocSpec, KVAllocator
from dsv4_npu.alloc.audit import find_violations
from dsv4_npu.alloc.lifecycle import Lifecycle
from dsv4_npu.alloc.prefix_cache import PrefixCache
from dsv4_npu.alloc.request import Request, State
from dsv4_npu.alloc.rollback import RollbackRules
from dsv4_npu.errors import Dsv4NpuError
from tests.docs.pages import block

PAGE = 128
Scene = Callable[[bool, Any], list[str]]


@dataclass(frozen=True)
class Fault:
    """``needs``: ``backend`` (the scene takes the name of a ledger) or ``bench`` (it takes the emulation)."""

    name: str
    scene: Scene
    needs: str

    def text(self, planted: bool, given: Any) -> str:
        """What is seen, as the body of a block."""
        return block(self.scene(planted, given))


FAULTS: dict[str, Fault] = {}


def fault(name: str, needs: str = "backend") -> Callable[[Scene], Scene]:
    """Register a scene under the name of the block that quotes it."""

    def add(scene: Scene) -> Scene:
        assert name not in FAULTS
        FAULTS[name] = Fault(name, scene, needs)
        return scene

    return add


def refused(call: Callable[[], object]) -> list[str]:
    """The error of a call, as a traceback's last line shows it; nothing if it is accepted."""
    try:
        call()
    except Dsv4NpuError as error:
        return [f"{type(error).__name__}: {error}"]
    return []


def audited(alloc: KVAllocator) -> list[str]:
    """What the audit finds."""
    return [str(one) for one in find_violations(alloc)]


def allocator(backend: str, **sizes: Any) -> KVAllocator:
    """An allocator with few pages: C128 pages of one entry unless said otherwise."""
    base = {"full_pages": 20, "swa_pages": 20, "c128_pages": 20, "request_rows": 4, "row_width": 2048}
    return KVAllocator(AllocSpec(**{"page_size": PAGE, "c128_page_size": 1, **base, **sizes}), backend=backend)  # type: ignore[arg-type]


def filled(alloc: KVAllocator, name: str, length: int, allocated: int = 0) -> int:
    """A row with ``length`` committed tokens."""
    row = alloc.open(name)
    with alloc.transaction() as plan:
        plan.extend(row, max(length, allocated))
        plan.commit(slots=False)
    alloc.commit(row, length)
    return row


def life_on(alloc: KVAllocator, *, cache: bool = True, capture: Any = None) -> Lifecycle:
    """The life cycle over an allocator; speculative if its verify is wider than one row."""
    rules = RollbackRules.of(alloc.spec, alloc.spec.verify_width > 1)
    return Lifecycle(alloc, PrefixCache(alloc, capture=capture) if cache else None, rules=rules)


def serve(life: Lifecycle, request: Request, chunk: int = PAGE, runs: Sequence[Sequence[int]] = ()) -> Request:
    """Prefill a request in chunks, then decode the given runs, one step at a time."""
    while request.state is State.PREFILL:
        end = life.chunk_end(request, chunk)
        step = life.extend([(request, end)])
        life.launch(step)
        life.done(step)
        life.learn(step, {request: [7] if end == len(request) else []})
    for run in runs:
        step = life.decode_plan([request])
        life.launch(step)
        life.done(step)
        life.learn(step, {request: list(run)})
    return request
