"""Case 37: what comes out is distributed as the target, whatever the drafts (chi-square at fixed seeds)."""

from __future__ import annotations

import pytest
import torch
from verify_world import Batch, Target, chain_links, run

CHAIN = "chain_speculative_sampling"
TREE = "tree_speculative_sampling_target_only"
REQUESTS = {"ref": 3000, "cpp": 40_000, "interpreter": 300, "cuda": 200_000}
# Quantile 1 - 1e-4 of the chi-square distribution by degrees of freedom.
LIMIT = {3: 21.11, 4: 23.51, 5: 25.74}


def chi_square(tokens: list[int], probabilities: torch.Tensor) -> float:
    expected = probabilities.to(torch.float64) / probabilities.sum() * len(tokens)
    counts = torch.bincount(torch.tensor(tokens), minlength=len(probabilities)).to(torch.float64)
    assert int(counts[expected == 0].sum()) == 0
    live = expected > 0
    return float(((counts - expected)[live] ** 2 / expected[live]).sum())


def assert_distributed(tokens: list[int], probabilities: torch.Tensor) -> None:
    assert len(tokens) > 100
    assert set(tokens) == set(torch.nonzero(probabilities).flatten().tolist())
    freedom = int((probabilities > 0).sum()) - 1
    assert chi_square(tokens, probabilities) < LIMIT[freedom]


def make(
    target: Target,
    rows: torch.Tensor,
    draft: torch.Tensor,
    candidates: torch.Tensor,
    links: tuple[torch.Tensor, torch.Tensor],
    rng: torch.Generator,
) -> Batch:
    """One tree and one set of rows for many requests; only the coins (and, if given so, the drafts) differ."""
    bs, drafts = REQUESTS[target.kind], rows.shape[0]
    return Batch(
        width=drafts,
        candidates=candidates.expand(bs, drafts).contiguous(),
        rows=torch.arange(bs * drafts).view(bs, drafts),
        children=links[0].expand(bs, drafts).contiguous(),
        siblings=links[1].expand(bs, drafts).contiguous(),
        coins=torch.rand(bs, drafts, generator=rng),
        last_coins=torch.rand(bs, generator=rng),
        target=rows.expand(bs, *rows.shape).contiguous(),
        draft=draft.expand(bs, *rows.shape).contiguous(),
        target_predict=torch.zeros(bs, drafts, dtype=torch.int64),
    )


ROWS = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.0], [0.05, 0.15, 0.5, 0.1, 0.2], [0.25, 0.25, 0.0, 0.25, 0.25]])
UNIFORM = torch.full((3, 4), 0.25)
DRAFTS = {
    "close": torch.tensor([[0.15, 0.25, 0.25, 0.35, 0.0], [0.1, 0.1, 0.4, 0.2, 0.2], [0.2, 0.3, 0.0, 0.25, 0.25]]),
    "far": torch.tensor([[0.5, 0.05, 0.05, 0.2, 0.2], [0.4, 0.4, 0.05, 0.1, 0.05], [0.2, 0.2, 0.2, 0.2, 0.2]]),
}


@pytest.mark.parametrize("quality", list(DRAFTS))
def test_chain(quality: str, target: Target) -> None:
    rng = torch.Generator().manual_seed(37)
    draft = DRAFTS[quality]
    drawn = torch.multinomial(draft[:2], REQUESTS[target.kind], replacement=True, generator=rng).T
    candidates = torch.cat([torch.zeros(len(drawn), 1, dtype=torch.int64), drawn], dim=1)
    batch = make(target, ROWS, draft, candidates, chain_links(1, 3), rng)
    result = run(target, CHAIN, batch)
    for step in range(2):
        tokens = [result.predicts[3 * b + step] for b, n in enumerate(result.accept_token_num) if n >= step]
        assert_distributed(tokens, ROWS[step])


@pytest.mark.parametrize("op", [CHAIN, TREE])
def test_uniform_target_yields_every_token(op: str, target: Target) -> None:
    rng = torch.Generator().manual_seed(4)
    drawn = torch.randint(0, 4, (REQUESTS[target.kind], 3), generator=rng)
    result = run(target, op, make(target, UNIFORM, UNIFORM, drawn, chain_links(1, 3), rng))
    assert_distributed(result.predicts[::3], UNIFORM[0])


@pytest.mark.parametrize(
    ("tokens", "children", "siblings"),
    [
        pytest.param([0, 1, 2, 3, 4, 0, 2], [1, 4, -1, 6, -1, -1, -1], [-1, 2, 3, -1, 5, -1, -1], id="tree"),
        pytest.param([0, 2, 2, 3, 3, 3, 1], [1, 4, 6, -1, -1, -1, -1], [-1, 2, 3, -1, 5, -1, -1], id="duplicates"),
        pytest.param([0, 3, -1, 3, 2, 9, 2], [1, 4, -1, -1, -1, -1, -1], [-1, 2, 3, -1, 5, 6, -1], id="no-drafts"),
        pytest.param([0, 4, 0, 1, 4, 4, 0], [1, -1, 4, -1, -1, -1, -1], [-1, 2, 3, -1, 5, 6, -1], id="impossible"),
    ],
)
def test_tree(tokens: list[int], children: list[int], siblings: list[int], target: Target) -> None:
    rng = torch.Generator().manual_seed(73)
    rows = ROWS[[0, 1, 2, 1, 0, 2, 1]]
    links = (torch.tensor([children]), torch.tensor([siblings]))
    batch = make(target, rows, rows, torch.tensor([tokens]), links, rng)
    result = run(target, TREE, batch)
    bs = len(result.accept_token_num)
    assert_distributed(result.predicts[::7], rows[0])
    for node in range(1, 7):
        emitted = [result.predicts[7 * b + node] for b in range(bs) if 7 * b + node in result.accept_index[b]]
        if len(emitted) > 100:
            assert_distributed(emitted, rows[node])


def test_lower_thresholds_are_lossy(target: Target) -> None:
    """The statistic sees a wrong distribution: below a threshold of 1 the drafts are favoured."""
    rng = torch.Generator().manual_seed(11)
    batch = make(target, ROWS, ROWS, torch.tensor([[0, 0, 1]]), chain_links(1, 3), rng)
    lossy = Batch(**{**vars(batch), "threshold_acc": 0.3})
    assert chi_square(run(target, TREE, lossy).predicts[::3], ROWS[0]) > LIMIT[3]
