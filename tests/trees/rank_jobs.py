"""What the ranks of the tests do, each in a process of its own."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec
from dsv4_npu.errors import AuditError, Dsv4NpuError, InputError
from dsv4_npu.spec import VerifyResult, accepted_tokens
from dsv4_npu.spec import ranks as ranks_module
from dsv4_npu.spec.ranks import RankSync
from dsv4_npu.spec.trees import accept_tree_sampling, tree_layout

VOCAB, WIDTH, STEPS, MOST = 5, 7, 3, 3


def seeded(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


def target(histories: Sequence[Sequence[int]], parents: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """A target whose every row depends on the whole path behind it."""
    batch, width = parents.shape
    probs = torch.empty(batch, width, VOCAB)
    for b in range(batch):
        paths: list[tuple[int, ...]] = []
        for j in range(width):
            above = int(parents[b, j])
            paths.append((*(paths[above] if above >= 0 else tuple(histories[b][-3:])), int(tokens[b, j])))
            gen = torch.Generator().manual_seed(seeded(paths[j], len(histories[b])))
            probs[b, j] = torch.rand(VOCAB, generator=gen) + 0.05
    return probs / probs.sum(-1, keepdim=True)


def rounds(
    rank: int,
    count: int,
    synced: bool = True,
    parts: Sequence[str] = ranks_module.PARTS,
    device: str = "cpu",
) -> dict[str, Any]:
    """Rounds of verify over a few requests: each rank with coins of its own, batches of 0 to ``MOST`` requests."""
    before, ranks_module.PARTS = ranks_module.PARTS, tuple(parts)
    sent, broadcast = [], ranks_module.dist.broadcast

    def counted(buffer: torch.Tensor, **where: Any) -> None:
        sent.append(buffer.numel())
        broadcast(buffer, **where)

    ranks_module.dist.broadcast = counted  # type: ignore[assignment]
    sync = RankSync(MOST, WIDTH, STEPS + 1, device=device)
    coins = torch.Generator().manual_seed(1000 + rank)
    shapes = random.Random(7)
    histories: list[list[int]] = [[b] for b in range(MOST)]
    error = ""
    for _ in range(count):
        if error:
            # It has told what it found; the others go on.
            sync.idle()
            continue
        try:
            batch = shapes.randrange(MOST + 1)
            live = histories[:batch]
            parents = torch.tensor(
                [[-1] + [shapes.randrange(j) if shapes.random() < 0.9 else -1 for j in range(1, WIDTH)] for _ in live],
                dtype=torch.int64,
            ).view(batch, WIDTH)
            tokens = torch.tensor([[shapes.randrange(VOCAB) for _ in range(WIDTH)] for _ in live]).view(batch, WIDTH)
            tokens = tokens.long()
            probs = target(live, parents, tokens).to(device)
            tokens = tokens.to(device)
            result = accept_tree_sampling(
                tokens,
                tree_layout(parents.to(device)),
                probs,
                torch.rand((batch, WIDTH), generator=coins).to(device),
                torch.rand(batch, generator=coins).to(device),
                STEPS + 1,
            )
            if synced:
                lens = torch.tensor([len(one) for one in live], dtype=torch.int64, device=device)
                result = sync.agree(result, lens, tokens)
                sync.check()
            for history, new in zip(live, accepted_tokens(result), strict=True):
                history.extend(new)
        except Dsv4NpuError as found:
            error = str(found)
    ranks_module.PARTS, ranks_module.dist.broadcast = before, broadcast
    return {"histories": histories, "overruled": sync.overruled, "error": error, "sent": sent}


def _result(batch: int, width: int = 3, depth: int = 3, token: int = 0) -> VerifyResult:
    index = torch.full((batch, depth), -1, dtype=torch.int32)
    index[:, 0] = torch.arange(batch) * width
    return VerifyResult(
        torch.full((batch * width,), token, dtype=torch.int32), index, torch.ones(batch, dtype=torch.int32)
    )


def mismatches(rank: int) -> list[str]:
    """What a rank is told when it knows something else than rank 0."""
    sync = RankSync(4, 4, 4)
    said = []
    for mine, lens in (
        (_result(2 if rank else 3), [5, 6, 7]),
        (_result(3), [5, 9 if rank else 6, 7]),
        (_result(2, width=4 if rank else 3), [5, 6]),
        (_result(2, depth=2 if rank else 3), [5, 6]),
        (_result(0 if rank else 2), [5, 6]),
        (_result(2), [5, 6]),
    ):
        drafts = torch.tensor([[1, 2, 3], [1, 3, 2] if rank else [1, 2, 3]]) if len(said) == 5 else None
        try:
            sync.agree(mine, torch.tensor(lens[: len(mine.accept_lens)]), drafts)
            said.append("")
        except AuditError as error:
            said.append(str(error))
    sync.agree(_result(1), torch.tensor([4]))
    for culprits in ((0, 1), (0,), (1,)):
        batch = 5 if rank in culprits else 2
        try:
            sync.agree(_result(batch), torch.tensor([1] * batch))
            said.append("")
        except (AuditError, InputError) as error:
            said.append(str(error))
    sync.agree(_result(1), torch.tensor([4]))
    return said


#: Sizes of a result on rank 0 and on rank 1: batch, D, W.
SIZES = {
    "more requests": ((2, 3, 3), (4, 3, 3)),
    "fewer requests": ((4, 3, 3), (2, 3, 3)),
    "no requests": ((4, 4, 4), (0, 1, 3)),
    "larger D": ((3, 2, 2), (3, 4, 2)),
    "smaller D": ((3, 4, 2), (3, 2, 2)),
    "larger W": ((3, 4, 2), (3, 4, 4)),
    "smaller W": ((3, 4, 4), (3, 4, 2)),
    "lengths": ((3, 4, 3), (3, 4, 3)),
}


def unlike(rank: int, blind: bool = False) -> dict[str, Any]:
    """Other sizes than rank 0's, looked for two rounds later; all rows accepted, with tokens far above any row.

    ``blind``: rank 0's numbers are taken whatever differs.
    """
    outcome: dict[str, Any] = {}
    for name, sizes in SIZES.items():
        batch, width, depth = sizes[rank]
        sync = RankSync(4, 4, 4, check_now=False)
        if blind:
            sync._compare = lambda mine, theirs: None  # type: ignore[method-assign]
        index = torch.arange(batch * width, dtype=torch.int32).view(batch, width)[:, :depth].contiguous()
        tokens = torch.arange(5000, 5000 + batch * width, dtype=torch.int32)
        mine = VerifyResult(tokens, index, torch.full((batch,), depth, dtype=torch.int32))
        lens = torch.full((batch,), 7 + rank if name == "lengths" else 7)
        said = []
        try:
            agreed = [sync.agree(mine, lens), sync.agree(_result(2, token=6000), torch.tensor([8, 9]))]
            parts = [[part.tolist() for part in (one.predict, one.accept_index, one.accept_lens)] for one in agreed]
        except IndexError as error:
            parts = [[str(error)]]
        overruled = sync.overruled
        for _ in range(2):
            try:
                sync.check()
                said.append("")
            except AuditError as error:
                said.append(str(error))
        if len(parts) == 1:
            sync.idle()
        last = sync.agree(_result(2, token=7000 + rank), torch.tensor([8, 9]))
        outcome[name] = {"parts": parts, "said": said, "overruled": overruled, "last": last.predict.tolist()}
    return outcome


def later(rank: int) -> list[str]:
    """Looked for after several rounds, as a device would be: the first difference is told, once."""
    sync = RankSync(4, 4, 4, check_now=False)
    for round_ in range(6):
        sync.agree(_result(2), torch.tensor([5, 6 + (rank if round_ in (2, 4) else 0)]))
    said = []
    for _ in range(2):
        try:
            sync.check()
            said.append("")
        except AuditError as error:
            said.append(str(error))
    return said


def idle(rank: int) -> dict[str, Any]:
    """Rank 1 has no requests in one round, both have none in another; the third is an ordinary one."""
    sync = RankSync(2, 3, 3)
    if rank:
        sync.idle()
    else:
        sync.agree(_result(2), torch.tensor([8, 9]))
    empty = sync.agree(_result(0, width=1), torch.zeros(0, dtype=torch.int64))
    last = sync.agree(_result(2, token=10 + rank), torch.tensor([3, 4]))
    return {"empty": list(empty.accept_index.shape), "tokens": accepted_tokens(last), "overruled": sync.overruled}


def fail(rank: int) -> None:
    """One rank finds a mistake while the other waits for it."""
    sync = RankSync(2, 3, 3)
    sync.agree(_result(1), torch.tensor([2 + rank]))
    sync.agree(_result(1), torch.tensor([3]))


def die(rank: int) -> None:
    if rank:
        raise ValueError("no result")


def llama(rank: int, accept: str, temperature: float) -> dict[str, Any]:
    from dsv4_npu.emulation.replica import Replica
    from dsv4_npu.spec.trees import TreeSpec
    from tests.trees.harness import Bench, check_empty

    bench, spec = Bench(), TreeSpec(3, 3, 9)
    replica = Replica(RankSync(4, spec.width, spec.depth), seed=50 + rank)
    options = {"accept": accept, "temperature": temperature, "seed": rank}
    engine = bench.engine(spec, bench.scripted(spec) if accept == "greedy" else None, options=options, replica=replica)
    for length in (3, 9, 12, 20, 5):
        engine.submit(bench.prompt(length), 20)
    runs = engine.run()
    check_empty(engine)
    worst = max(
        float((torch.stack(run.logits) - bench.oracle.forced(run.prompt, run.outputs)).abs().max()) for run in runs
    )
    return {
        "outputs": [run.outputs for run in runs],
        "history": engine.history,
        "overruled": replica.sync.overruled,
        "noise": replica.largest_noise,
        "error": worst,
        "greedy": [bench.oracle.greedy(run.prompt, 20).tokens for run in runs],
    }


def deepseek(rank: int, accept: str, temperature: float) -> dict[str, Any]:
    from dsv4_npu.budget import sizes_for_tokens
    from dsv4_npu.emulation.drafters import EarlyExitDrafter
    from dsv4_npu.emulation.engine import Engine, EngineOptions
    from dsv4_npu.emulation.model import build_model
    from dsv4_npu.emulation.oracle import Oracle
    from dsv4_npu.emulation.replica import Replica

    spec = ModelSpec.load("tiny")
    model = build_model(spec, seed=0)
    config = CacheConfig(
        spec,
        PlatformSpec.load("a3"),
        SpeculationSpec("chain", 3),
        context_len=256,
        request_rows=2,
        kv_row="fp64",
        indexer_row="fp64",
    )
    options = EngineOptions(batch=2, accept=accept, temperature=temperature, seed=rank)  # type: ignore[arg-type]
    engine = Engine(model, config, sizes_for_tokens(config, 2 * config.width, 1.0), EarlyExitDrafter(), options)
    engine.device.replica = replica = Replica(RankSync(2, 4, 4), seed=50 + rank)
    gen = torch.Generator().manual_seed(3)
    for length in (120, 7):
        engine.submit(torch.randint(spec.vocab_size, (length,), generator=gen).tolist(), 14)
    runs = engine.run()
    engine.alloc.audit()
    oracle = Oracle(model)
    worst = max(float((torch.stack(run.logits) - oracle.forced(run.prompt, run.outputs)).abs().max()) for run in runs)
    return {
        "outputs": [run.outputs for run in runs],
        "overruled": replica.sync.overruled,
        "noise": replica.largest_noise,
        "error": worst,
    }


def play(rank: int, jobs: Sequence[tuple[str, str, dict[str, Any]]]) -> dict[str, Any]:
    """Several jobs in one group, by name."""
    return {name: globals()[job](rank, **arguments) for name, job, arguments in jobs}
