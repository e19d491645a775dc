"""Checks that the verify and sampling ops share; see :mod:`dsv4_npu.ops._checks` for their manner."""

from __future__ import annotations

import math

import torch

from dsv4_npu.ops._checks import check_at_least, check_disjoint, check_tensor, check_values, fail

INDEX = (torch.int64,)
OUTPUT = (torch.int32,)
PROBABILITY = (torch.float32,)


def check_outputs(
    op: str,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
) -> tuple[int, int]:
    """The three output buffers and the candidates that size them; returns (bs, D)."""
    check_tensor(op, "candidates", candidates, ("bs", "D"), INDEX)
    device = candidates.device
    bs, drafts = candidates.shape
    check_at_least(op, "D, the columns of candidates,", drafts, 1)
    check_tensor(op, "predicts", predicts, (bs * drafts,), OUTPUT, device)
    check_tensor(op, "accept_index", accept_index, (bs, "width"), OUTPUT, device)
    check_at_least(op, "the width of accept_index", accept_index.shape[1], 1)
    check_tensor(op, "accept_token_num", accept_token_num, (bs,), OUTPUT, device)
    return bs, drafts


def check_rows(op: str, retrieve_index: torch.Tensor, bs: int, drafts: int, device: torch.device) -> None:
    check_tensor(op, "retrieve_index", retrieve_index, (bs, drafts), INDEX, device)
    check_values(op, "retrieve_index", retrieve_index, 0, bs * drafts - 1)


def check_links(
    op: str,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    bs: int,
    drafts: int,
    device: torch.device,
) -> None:
    for name, links in (
        ("retrieve_next_token", retrieve_next_token),
        ("retrieve_next_sibling", retrieve_next_sibling),
    ):
        check_tensor(op, name, links, (bs, drafts), INDEX, device)
        check_values(op, name, links, -1, drafts - 1)


def check_probabilities(op: str, target_probs: torch.Tensor, bs: int, drafts: int, device: torch.device) -> int:
    """The target's probabilities; returns V."""
    check_tensor(op, "target_probs", target_probs, (bs, drafts, "V"), PROBABILITY, device)
    check_at_least(op, "V, the last size of target_probs,", target_probs.shape[2], 1)
    return target_probs.shape[2]


def check_coins(
    op: str,
    uniform_samples: torch.Tensor,
    final_samples: torch.Tensor,
    bs: int,
    fewest: int,
    device: torch.device,
) -> None:
    """One coin per judging row (``fewest`` of them are read) and one for the final draw."""
    check_tensor(op, "uniform_samples", uniform_samples, (bs, f"at least {fewest}"), PROBABILITY, device)
    check_at_least(op, "the columns of uniform_samples", uniform_samples.shape[1], fewest)
    check_tensor(op, "uniform_samples_for_final_sampling", final_samples, (bs,), PROBABILITY, device)


def check_threshold(op: str, name: str, value: float) -> None:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and 0 <= value <= 1):
        fail(op, f"{name} is {value!r}; allowed: 0 to 1")


def check_outputs_alone(
    op: str,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    **inputs: torch.Tensor,
) -> None:
    """No output shares memory with another output or with an input."""
    outputs = {"predicts": predicts, "accept_index": accept_index, "accept_token_num": accept_token_num}
    check_disjoint(op, outputs, inputs)


def check_drawn(
    op: str,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
) -> None:
    """Raise InputError if some request had no token to draw (its last row reports -1). Reads the device."""
    last = accept_index.gather(1, accept_token_num.to(torch.int64).unsqueeze(1)).flatten().to(torch.int64)
    missing = torch.nonzero(predicts[last] < 0).flatten().tolist()
    if missing:
        fail(op, f"target_probs holds no positive entry in the last row of request(s) {missing}; allowed: at least one")
