"""Times the sampling ops on a CUDA GPU against a baseline and the memory floor, and prints one table.

    python benchmarks/sampling_bench.py                    # V = 129280, D = 4, batches 1, 16, 64
    python benchmarks/sampling_bench.py --sweep            # block sizes and warps of our kernels

A time is the median of many runs with a cold L2 (triton.testing.do_bench); "graph" is one replay of a CUDA graph over
input sets that together exceed the L2, so it holds no host time. The floor is the bytes that have to be read (the final
row of p, and of q where a draft was rejected) over the bandwidth of a large copy, measured in the same run. The
baseline is written here from the description of today's public kernels: an accept kernel with one program per request,
a kernel for block sums, a kernel that samples; for trees also a cleared [bs, D, V] scratch.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.testing import do_bench

from dsv4_npu import ops
from dsv4_npu.ops import _draw_triton

CHAIN, TREE, GREEDY = "chain_speculative_sampling", "tree_speculative_sampling_target_only", "verify_tree_greedy"
BASELINE_BLOCK = 4096


@triton.jit
def baseline_accept(predicts, index, number, state, candidates, coins, p, q, D, V, TREE: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    row, rejected = b * D, 0
    tl.store(index + b * D, row.to(tl.int32))
    accepted = 0
    step = 1
    while step < D:
        token = tl.load(candidates + b * D + step)
        chance = tl.load(p + row * V + token)
        bound = tl.load(coins + row)
        if not TREE:
            bound *= tl.load(q + row * V + token)
        if bound < chance:
            tl.store(predicts + row, token.to(tl.int32))
            accepted += 1
            row += 1
            tl.store(index + b * D + accepted, row.to(tl.int32))
            step += 1
        else:
            if TREE:
                tl.store(q + row * V + token, chance)
            rejected = 1
            step = D
    tl.store(number + b, accepted)
    tl.store(state + b, rejected)


@triton.jit
def baseline_sums(sums, state, number, p, q, D, V, blocks, BLOCK: tl.constexpr):
    b, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = b * D + tl.load(number + b)
    i = block * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(p + row * V + i, mask=i < V, other=0.0)
    if tl.load(state + b) > 0:
        weight = tl.maximum(weight - tl.load(q + row * V + i, mask=i < V, other=0.0), 0.0)
    tl.store(sums + b * blocks + block, tl.sum(weight, 0))


@triton.jit
def baseline_sample(
    predicts, sums, state, number, last_coins, p, q, D, V, blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    row = b * D + tl.load(number + b)
    n = tl.arange(0, BLOCKS)
    mass = tl.load(sums + b * blocks + n, mask=n < blocks, other=0.0)
    steps = tl.cumsum(mass, 0)
    goal = tl.load(last_coins + b) * tl.max(steps, 0)
    block = tl.minimum(tl.min(tl.where(steps > goal, n, BLOCKS), 0), blocks - 1)
    before = tl.max(tl.where(n < block, steps, 0.0), 0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(p + row * V + i, mask=i < V, other=0.0)
    if tl.load(state + b) > 0:
        weight = tl.maximum(weight - tl.load(q + row * V + i, mask=i < V, other=0.0), 0.0)
    inside = tl.cumsum(weight, 0) + before
    tl.store(predicts + row, tl.minimum(tl.min(tl.where(inside > goal, i, V), 0), V - 1).to(tl.int32))


@dataclass
class Inputs:
    """One batch on the GPU with its output buffers."""

    candidates: torch.Tensor
    rows: torch.Tensor
    children: torch.Tensor
    siblings: torch.Tensor
    coins: torch.Tensor
    last_coins: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor
    wanted: torch.Tensor
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def arguments(self, op: str) -> tuple[torch.Tensor, ...]:
        tree = (self.candidates, self.rows, self.children, self.siblings)
        coins = (self.coins, self.last_coins, self.p)
        rest = {GREEDY: (*tree, self.wanted), CHAIN: (*tree[:2], *coins, self.q), TREE: (*tree, *coins)}[op]
        return (*self.outputs, *rest)


def make_inputs(bs: int, drafts: int, vocab: int, seed: int) -> Inputs:
    """A chain whose last draft but one is rejected, so that the walk is long and the residual is read."""
    rng = torch.Generator("cuda").manual_seed(seed)
    p = torch.softmax(torch.randn(bs, drafts, vocab, device="cuda", generator=rng), -1)
    q = torch.softmax(torch.randn(bs, drafts, vocab, device="cuda", generator=rng), -1)
    candidates = torch.randint(0, vocab, (bs, drafts), device="cuda", generator=rng)
    coins = torch.zeros(bs, drafts, device="cuda")
    judge = max(drafts - 2, 0)
    coins[:, judge] = 1
    q[torch.arange(bs), judge, candidates[:, min(judge + 1, drafts - 1)]] = 0.5
    children = torch.tensor([[*range(1, drafts), -1]] * bs, device="cuda")
    wanted = torch.roll(candidates, -1, 1)
    wanted[:, judge] += 1
    sizes = ((bs * drafts,), (bs, drafts), (bs,))
    return Inputs(
        candidates,
        torch.arange(bs * drafts, device="cuda").view(bs, drafts),
        children,
        torch.full_like(children, -1),
        coins,
        torch.rand(bs, device="cuda", generator=rng),
        p,
        q,
        wanted,
        tuple(torch.empty(size, dtype=torch.int32, device="cuda") for size in sizes),  # type: ignore[arg-type]
    )


def make_sets(bs: int, drafts: int, vocab: int) -> list[Inputs]:
    """As many sets as it takes for the rows that are read to exceed the L2."""
    count = 2**30 // (bs * drafts * vocab * 8)
    return [make_inputs(bs, drafts, vocab, seed) for seed in range(max(6, min(128, count)))]


def run_ours(op: str) -> Callable[[Inputs], None]:
    bare = getattr(torch.ops.dsv4_npu, op)
    return lambda x: bare(*x.arguments(op))


def run_checked(op: str) -> Callable[[Inputs], None]:
    return lambda x: getattr(ops, op)(*x.arguments(op))


def run_baseline(op: str) -> Callable[[Inputs], None]:
    tree = op == TREE

    def run(x: Inputs) -> None:
        bs, drafts, vocab = x.p.shape
        predicts, index, number = x.outputs
        blocks = triton.cdiv(vocab, BASELINE_BLOCK)
        state = torch.empty(bs, dtype=torch.int32, device="cuda")
        sums = torch.empty(bs, blocks, device="cuda")
        q = torch.zeros_like(x.p) if tree else x.q
        size = (drafts, vocab)
        baseline_accept[(bs,)](predicts, index, number, state, x.candidates, x.coins, x.p, q, *size, TREE=tree)
        baseline_sums[(bs, blocks)](sums, state, number, x.p, q, *size, blocks, BLOCK=BASELINE_BLOCK)
        width = triton.next_power_of_2(blocks)
        tables = (predicts, sums, state, number, x.last_coins, x.p, q)
        baseline_sample[(bs,)](*tables, *size, blocks, BLOCKS=width, BLOCK=BASELINE_BLOCK)

    return run


def run_public_chain(path: Path) -> Callable[[Inputs], None]:
    """SGLang's own chain kernel, from its file (kernels/ops/speculative/reject_sampling.py of the wheel)."""
    spec = importlib.util.spec_from_file_location("public_reject_sampling", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    public = module.chain_speculative_sampling_triton

    def run(x: Inputs) -> None:
        tree = (x.candidates, x.rows, x.children, x.siblings)
        public(*x.outputs, *tree, x.coins, x.last_coins, x.p, x.q, 1.0, 1.0, True)

    return run


def median_us(function: Callable[..., object], *arguments: object) -> float:
    return 1e3 * float(do_bench(lambda: function(*arguments), warmup=30, rep=150, return_mode="median"))


def graph_us(function: Callable[[Inputs], None], sets: list[Inputs], least_calls: int = 20) -> float:
    """Device time of one call inside a CUDA graph that goes round the input sets."""
    calls = max(least_calls, len(sets))
    for x in sets:
        function(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in itertools.islice(itertools.cycle(sets), calls):
            function(x)
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[len(times) // 2]


def host_us(function: Callable[[Inputs], None], x: Inputs) -> float:
    """Host time of one call, the device kept out of the way by its own queue."""
    function(x)
    torch.cuda.synchronize()
    times = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(20):
            function(x)
        times.append((time.perf_counter() - start) / 20 * 1e6)
        torch.cuda.synchronize()
    return sorted(times)[len(times) // 2]


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large device-to-device copy."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    seconds = float(do_bench(lambda: target.copy_(source), warmup=30, rep=150, return_mode="median")) / 1e3
    return 2 * source.numel() * 4 / seconds


@triton.jit
def empty_kernel(x):
    pass


@dataclass
class Row:
    """One line of the table; times in microseconds."""

    op: str
    bs: int
    ours: float
    ours_graph: float
    baseline: float
    baseline_graph: float
    floor: float
    host: float
    host_checked: float


def measure(batches: Iterable[int], drafts: int, vocab: int, bandwidth: float) -> list[Row]:
    table = []
    for bs in batches:
        sets = make_sets(bs, drafts, vocab)
        for op, rows_read in ((CHAIN, 2), (TREE, 1)):
            ours, baseline, checked = run_ours(op), run_baseline(op), run_checked(op)
            same = 0
            for x in sets[:4]:
                ours(x)
                mine = [t.clone() for t in x.outputs]
                baseline(x)
                same += torch.equal(mine[2], x.outputs[2])
            if same != len(sets[:4]):
                raise SystemExit(f"{op} at batch {bs}: ours and the baseline accept different drafts")
            table.append(
                Row(
                    op,
                    bs,
                    median_us(ours, sets[0]),
                    graph_us(ours, sets),
                    median_us(baseline, sets[0]),
                    graph_us(baseline, sets),
                    1e6 * bs * vocab * 4 * rows_read / bandwidth,
                    host_us(ours, sets[0]),
                    host_us(checked, sets[0]),
                )
            )
    return table


def show(table: list[Row], launch: tuple[float, float], card: str, bandwidth: float, vocab: int, drafts: int) -> None:
    print(f"{card}, torch {torch.__version__}, triton {triton.__version__}; V = {vocab}, D = {drafts}")
    print(f"copy {bandwidth / 1e12:.2f} TB/s; one empty launch {launch[0]:.1f} us, in a graph {launch[1]:.1f} us")
    print(
        f"{'op':<38}{'bs':>4}{'ours':>8}{'base':>8}{'ratio':>7}{'graph':>8}{'base':>8}{'ratio':>7}{'floor':>8}"
        f"{'limit':>8}{'host':>7}{'checked':>9}"
    )
    for r in table:
        limit = 1.5 * r.floor + launch[0]
        print(
            f"{r.op:<38}{r.bs:>4}{r.ours:>8.1f}{r.baseline:>8.1f}{r.baseline / r.ours:>7.2f}{r.ours_graph:>8.1f}"
            f"{r.baseline_graph:>8.1f}{r.baseline_graph / r.ours_graph:>7.2f}{r.floor:>8.1f}{limit:>8.1f}"
            f"{r.host:>7.1f}{r.host_checked:>9.1f}"
        )
    print("us; limit = 1.5 x floor + one launch; host = host time of a bare call, checked = of the public function")


SWEEP = {
    CHAIN: [(2048, 4, 4), (1024, 2, 8), (2048, 2, 4), (1024, 4, 6), (4096, 8, 2)],
    TREE: [(512, 1, 16), (512, 1, 12), (512, 1, 20), (1024, 1, 8), (1024, 1, 12), (1024, 2, 8), (2048, 4, 4)],
}


def sweep(drafts: int, vocab: int) -> None:
    """Our kernels at other block sizes, warps and programs per processor; times in a graph."""
    batches = (1, 16, 64)
    sets = {bs: make_sets(bs, drafts, vocab) for bs in batches}
    for op, tilings in SWEEP.items():
        module = importlib.import_module(f"dsv4_npu.ops.{op}.triton")
        before = module.GPU_TILING
        for block, warps, programs in tilings:
            module.GPU_TILING = _draw_triton.Tiling(block, ahead=True, warps=warps, programs=programs)
            times = "".join(f"{graph_us(run_ours(op), sets[bs]):8.1f}" for bs in batches)
            print(f"{op[:5]} {module.GPU_TILING}: {times} us at batch {batches}")
        module.GPU_TILING = before


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--vocab", type=int, default=129280)
    parser.add_argument("--drafts", type=int, default=4, help="verify width D, root included")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--public-chain", type=Path, help="SGLang's reject_sampling.py, to time its kernel as well")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    if options.sweep:
        sweep(options.drafts, options.vocab)
        return
    card = torch.cuda.get_device_name()
    bandwidth = copy_bandwidth()
    x = make_inputs(1, 2, 16, 0)
    launch = (median_us(lambda: empty_kernel[(1,)](x.p)), graph_us(lambda y: empty_kernel[(1,)](y.p), [x]))
    table = measure(options.batches, options.drafts, options.vocab, bandwidth)
    show(table, launch, card, bandwidth, options.vocab, options.drafts)
    if options.public_chain:
        for bs in options.batches:
            sets, public = make_sets(bs, options.drafts, options.vocab), run_public_chain(options.public_chain)
            eager, graph = median_us(public, sets[0]), graph_us(public, sets)
            print(f"SGLang's chain kernel at batch {bs}: {eager:.1f} us, graph {graph:.1f}")
    if options.json:
        facts = {"card": card, "bandwidth": bandwidth, "launch_us": launch, "vocab": options.vocab}
        options.json.write_text(json.dumps({**facts, "rows": [asdict(r) for r in table]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
