"""What a call costs: the host's time per call in a row of calls, beside the time that its bytes need at least."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_npu.selftest import sampling_cases
from dsv4_npu.selftest.case import FUNCTIONS

#: Seconds of one series, series, and bytes of the copy that measures the bandwidth.
SERIES, REPEATS, COPY_BYTES = 0.05, 5, 2**28
#: V4-Flash: C128 layers and width of a state row, hidden size, vocabulary.
LAYERS, STATE, HIDDEN, VOCAB = 20, 1024, 4096, 129280
RING, DRAFTS, PAGE = 256, 4, 128


@dataclass(frozen=True)
class Timing:
    """One op at one size. ``floor_us``: its bytes over the measured bandwidth of a copy."""

    op: str
    size: str
    bytes: int
    floor_us: float
    call_us: float


def wait(device: torch.device) -> None:
    """Until the device has done everything."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def per_call(call: Callable[[], object], device: torch.device) -> float:
    """Seconds per call: the median of series of calls that end in a wait."""
    call()
    wait(device)
    began = time.perf_counter()
    call()
    wait(device)
    count = max(1, min(1000, int(SERIES / max(time.perf_counter() - began, 1e-6))))
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(count):
            call()
        wait(device)
        times.append((time.perf_counter() - began) / count)
    return statistics.median(times)


def copy_bandwidth(device: torch.device, nbytes: int = COPY_BYTES) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.zeros(nbytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / per_call(lambda: target.copy_(source), device)


def timings(device: torch.device, bandwidth: float, batch: int = 16) -> Iterator[Timing]:
    """Every op at serving sizes of V4-Flash."""
    for op, size, nbytes, arguments in _sizes(batch):
        mine = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        function = FUNCTIONS[op]
        seconds = per_call(lambda f=function, m=mine: f(**m), device)  # type: ignore[misc]
        yield Timing(op, size, nbytes, nbytes / bandwidth * 1e6, seconds * 1e6)
        del mine


def _sizes(batch: int) -> Iterator[tuple[str, str, int, dict[str, Any]]]:
    """Op, size in words, bytes that any implementation reads and writes, arguments."""
    requests = torch.arange(1, batch + 1)
    lengths = requests * 1000
    state = torch.zeros(LAYERS, (batch + 1) * RING, STATE)
    made: dict[str, Any] = {"state": state, "req_pool_indices": requests, "ring_size": RING}
    rows = f"{batch} requests, {LAYERS} layers"
    accepted = torch.ones(batch, dtype=torch.int64)
    yield (
        "clear_c128_draft_states_",
        f"{rows}, D {DRAFTS}, all drafts rejected",
        LAYERS * batch * (DRAFTS - 1) * STATE * 4,
        {**made, "seq_lens": lengths, "accept_lens": accepted, "num_draft_tokens": DRAFTS},
    )
    few = {**made, "req_pool_indices": requests[:2]}
    yield "clear_request_states_", f"2 banks, {LAYERS} layers", 2 * LAYERS * RING * STATE * 4, few
    del state, made, few
    slab = torch.zeros(LAYERS, 3 * batch, 16, 1, 512, dtype=torch.bfloat16)
    src = torch.arange(batch) * 48 + 19
    moved = {"slab": slab, "tgt": src - 1, "src": src}
    yield "move_kv_", f"{rows}, one row each", 2 * LAYERS * batch * 512 * 2, moved
    paths = {
        "accept_index": torch.tensor([[b * DRAFTS, b * DRAFTS + 1, b * DRAFTS + 3] for b in range(batch)]).int(),
        "accept_lens": torch.full((batch,), 3, dtype=torch.int32),
    }
    predict = torch.zeros(batch * DRAFTS, dtype=torch.int32)
    slots = {"out_cache_loc": torch.arange(batch * DRAFTS), **paths}
    yield "gather_accepted_slots", f"{batch} requests", batch * 3 * (4 + 4 * 8), slots
    bonus = {"bonus_tokens": torch.zeros(batch, dtype=torch.int64), "predict": predict, **paths}
    yield "fill_bonus_tokens_", f"{batch} requests", batch * 20, bonus
    hidden = torch.zeros(batch * DRAFTS, HIDDEN, dtype=torch.bfloat16)
    front = {"predict": predict, "hidden_states": hidden, **paths}
    yield "compact_accept_", f"{batch} requests, hidden {HIDDEN}", batch * 2 * HIDDEN * 2, front
    table = torch.arange((batch + 1) * 64, dtype=torch.int32).view(batch + 1, 64)
    total = batch * PAGE
    extend = {
        "block_table": table,
        "req_pool_indices": requests,
        "starts": lengths % 4096,
        "lengths": torch.full((batch,), PAGE),
        "page_size": PAGE,
        "total": total,
        "columns": 64,
    }
    yield "extend_slots", f"{batch} requests, +{PAGE}", total * 8 + 2 * batch * 64 * 4, extend
    sampled = f"{batch} requests, D {DRAFTS}, V {VOCAB}"
    row = batch * VOCAB * 4
    chain = sampling_cases.chain(batch, DRAFTS, VOCAB, 1)
    yield "chain_speculative_sampling", sampled, 2 * row, chain
    tree = {name: value for name, value in chain.items() if name != "draft_probs"}
    tree["retrieve_next_token"] = torch.tensor([[1, 2, 3, -1]]).repeat(batch, 1)
    tree["retrieve_next_sibling"] = torch.full((batch, DRAFTS), -1)
    yield "tree_speculative_sampling_target_only", sampled, row, tree
    probs = chain["target_probs"][:, 0].contiguous()
    yield "top_k_renorm_prob", f"{batch} rows, V {VOCAB}", 2 * row, {"probs": probs, "top_k": torch.full((batch,), 50)}
    yield "top_p_renorm_prob", f"{batch} rows, V {VOCAB}", 2 * row, {"probs": probs, "top_p": torch.full((batch,), 0.9)}
    greedy = sampling_cases.greedy(batch, DRAFTS, 3, 1)
    yield "verify_tree_greedy", f"{batch} requests, D {DRAFTS}", batch * DRAFTS * 44, greedy
