"""The functions between a verify and the next draft, beside SGLang's own kernels under Triton's interpreter."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest
import torch

from dsv4_npu.sglang import cache_locs, dspark, verify_ops
from tests.sglang.processes import run
from tests.sglang.sides import prepare

pytestmark = pytest.mark.filterwarnings("ignore")

#: Runs SGLang's Triton kernels of the same names on the arguments that the JSON on its command line describes.
THEIRS = """
import json, sys
import torch
from sglang.kernels.ops.speculative import cache_locs, eagle
case = {name: torch.tensor(value) for name, value in json.loads(CASE).items()}
bs, steps = case["accept_index"].shape
width = case["window"].numel() // bs
out = {}
bonus = torch.full((bs,), -7, dtype=torch.int32)
eagle.fill_bonus_tokens_func(case["tokens"].int(), case["accept_lens"].int(), bonus, steps, bs)
out["bonus"] = bonus.tolist()
slots = torch.full((bs * steps,), -7)
eagle.fill_accept_out_cache_loc_func(case["accept_index"].int().view(-1), case["window"], slots, bs * steps)
out["accepted"] = slots.tolist()
front = torch.full((bs * width,), -7)
cache_locs.fill_front_out_cache_loc_func(case["accept_lens"], case["window"], front)
out["front"] = front.tolist()
loc = torch.empty(bs * 6, dtype=torch.int64)
positions = torch.empty(bs * 2, dtype=torch.int64)
cache_locs.assign_draft_cache_locs_contiguous_func(
    case["rows"], case["table"].int(), case["lens"], loc, 2, 3, positions=positions)
out["drafts"], out["positions"] = loc.tolist(), positions.tolist()
extend = torch.empty(bs * width, dtype=torch.int64)
cache_locs.assign_extend_cache_locs_uniform[(bs,)](
    case["rows"], case["table"].int(), case["lens"], extend, case["table"].shape[1], width)
out["verify"] = extend.tolist()
print(json.dumps(out))
"""


def case(bs: int = 5, width: int = 4, steps: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    accept_lens = torch.tensor([1, 2, 3, 1, 3])[:bs]
    index = torch.arange(bs).view(-1, 1) * width + torch.arange(steps)
    return {
        "rows": torch.tensor([3, 1, 7, 2, 5])[:bs],
        "table": torch.randint(1, 9999, (9, 64)),
        "lens": torch.tensor([0, 13, 7, 40, 2])[:bs],
        "accept_lens": accept_lens,
        "accept_index": torch.where(torch.arange(steps) < accept_lens.view(-1, 1), index, -1),
        "tokens": torch.randint(0, 999, (bs, steps)),
        "window": torch.randint(1, 9999, (bs * width,)),
    }


@pytest.fixture(scope="module")
def theirs() -> dict[str, list[int]]:
    text = json.dumps({name: value.tolist() for name, value in case().items()})
    done = run(f"CASE = {text!r}\n" + THEIRS, None, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_helpers_equal_sglangs_kernels(theirs: dict[str, list[int]]) -> None:
    c = case()
    bs, steps = c["accept_index"].shape
    bonus = torch.full((bs,), -7, dtype=torch.int32)
    verify_ops.fill_bonus_tokens_func(c["tokens"].int(), c["accept_lens"].int(), bonus, steps, bs)
    assert bonus.tolist() == theirs["bonus"]
    slots = torch.full((bs * steps,), -7)
    verify_ops.fill_accept_out_cache_loc_func(c["accept_index"].int(), c["window"], slots, bs * steps)
    assert slots.tolist() == theirs["accepted"]
    front = torch.full((c["window"].numel(),), -7)
    cache_locs.fill_front_out_cache_loc_func(c["accept_lens"], c["window"], front)
    assert front.tolist() == theirs["front"]
    drafts, positions = torch.empty(bs * 6, dtype=torch.int64), torch.empty(bs * 2, dtype=torch.int64)
    cache_locs.assign_draft_cache_locs_contiguous_func(
        c["rows"], c["table"].int(), c["lens"], drafts, 2, 3, positions=positions
    )
    assert drafts.tolist() == theirs["drafts"]
    assert positions.tolist() == theirs["positions"]
    at, anchor = torch.empty(bs, 4, dtype=torch.int64), torch.zeros(bs, 4, dtype=torch.int64)
    verify = cache_locs.assign_extend_cache_locs_uniform_func(
        c["rows"], c["table"].int(), c["lens"], bs, 4, "cpu", positions_out=at, anchor_src=c["rows"], anchor_out=anchor
    )
    assert verify.tolist() == theirs["verify"]
    assert at.tolist() == (c["lens"].view(-1, 1) + torch.arange(4)).tolist()
    assert anchor[:, 0].tolist() == c["rows"].tolist()


def test_greedy_verification_follows_the_contract() -> None:
    """contracts.md's example: root -> {A, B}, A -> C; A and C are right, X is the bonus."""
    predicts, accept, count = (torch.full(shape, 99, dtype=torch.int32) for shape in ((4,), (1, 3), (1,)))
    out = verify_ops.verify_tree_greedy_func(
        predicts,
        accept,
        count,
        torch.tensor([[0, 10, 11, 12]]),
        torch.tensor([[0, 1, 2, 3]]),
        torch.tensor([[1, 3, -1, -1]]),
        torch.tensor([[-1, 2, -1, -1]]),
        torch.tensor([[10, 12, 50, 77]]),
        topk=2,
    )
    assert [t.tolist() for t in out] == [[10, 12, 99, 77], [[0, 1, 3]], [2]]
    assert out[0] is predicts


def test_the_clear_by_its_name_clears_one_layer() -> None:
    state = torch.ones(4 * 256, 8)
    verify_ops.clear_unaccepted_c128_draft_states(
        state, torch.tensor([2]), torch.tensor([254]), torch.tensor([1]), ring_size=256, num_draft_tokens=4
    )
    rows = [2 * 256 + (254 + o) % 256 for o in (1, 2, 3)]
    expected = torch.ones(4 * 256, 8)
    expected[rows, :4], expected[rows, 4:] = 0, -torch.inf
    assert torch.equal(state, expected)


def test_the_clear_follows_every_dspark_verify() -> None:
    prepare()
    calls: list[tuple[Any, ...]] = []
    pool = types.SimpleNamespace(clear_unaccepted_c128_draft_states=lambda *args: calls.append(args))
    batch = types.SimpleNamespace(
        req_pool_indices="rows", token_to_kv_pool_allocator=types.SimpleNamespace(get_kvcache=lambda: pool)
    )
    worker = types.SimpleNamespace(verify_num_draft_tokens=6)
    order: list[str] = []
    lens: dict[str, Any] = {"seq_lens_pre_verify": "before", "seq_lens_post_verify": "after", "commit_lens": "accepted"}
    dspark.clear_after_commit(lambda *_, **__: order.append("original"), worker, batch=batch, **lens)
    assert order == ["original"]
    assert calls == [("rows", "before", "accepted", 6)]


def test_dsparks_worker_commits_through_the_wrapped_function() -> None:
    """The seam is called once per verify, with the arguments that the clear needs."""
    import inspect

    from sglang.srt.speculative.dspark_components import dspark_worker_v2

    worker = dspark_worker_v2.DSparkWorkerV2
    text = inspect.getsource(worker._forward_decode)
    assert text.count("self._commit_target_mamba_states_after_verify(") == 1
    assert {"batch", "seq_lens_pre_verify", "seq_lens_post_verify", "commit_lens"} <= set(
        inspect.signature(worker._commit_target_mamba_states_after_verify).parameters
    )
