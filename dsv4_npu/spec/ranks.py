"""Agreement of tensor-parallel ranks: rank 0 decides what a verify accepted, for all.

Every rank computes the same logits up to rounding, and draws with random numbers of its own. One token that two ranks
accept differently parts their histories for good, so nobody consumes a result of its own: rank 0's ``predict``,
``accept_index`` and ``accept_token_num`` travel together, in one broadcast, before anything reads them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dsv4_npu.errors import AuditError, InputError
from dsv4_npu.spec.verify import VerifyResult

#: What travels, in this order: one of them less, and a rank mixes its own decision with that of rank 0.
PARTS = ("predict", "accept_index", "accept_token_num")
#: Numbers in front of the parts, in which all ranks must agree beforehand.
_HEADER = ("round", "requests", "verify width D", "accept_index width", *["digest of the drafts"] * 2)
#: Modulus of the digest, a prime: products of two residues fit in int64.
_MODULUS = 2**31 - 1
#: A primitive root of the modulus and its square: one base for each number of the digest.
_BASES = (48271, 48271**2 % _MODULUS)


def _part(result: VerifyResult, name: str) -> torch.Tensor:
    return result.accept_lens - 1 if name == "accept_token_num" else getattr(result, name)


def digest_weights(places: int) -> torch.Tensor:
    """int64 ``[2, places]``: ``base ** place`` modulo 2^31 - 1 for each of the two bases."""
    weights = [[1] * places for _ in _BASES]
    for row, base in zip(weights, _BASES, strict=True):
        for place in range(1, places):
            row[place] = row[place - 1] * base % _MODULUS
    return torch.tensor(weights, dtype=torch.int64)


def digest(candidates: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Two numbers below 2^31, int64 ``[2]``, that tell lists of tokens apart.

    Values of a polynomial with the tokens as coefficients, at two places: a Reed-Solomon code of distance 3, so lists
    that differ in one or two tokens, or by a swap, never have the same digest; others have it once in 2^62 times.

    Args:
        candidates: int64, -1 to 2^31 - 4, of any shape; no more elements than ``weights`` has columns.
        weights: those of :func:`digest_weights`, on the device of ``candidates``.
    """
    flat = candidates.flatten().to(torch.int64) + 2
    return (flat * weights[:, : flat.numel()] % _MODULUS).sum(-1) % _MODULUS


class RankSync:
    """One rank's end of the agreement. All ranks of ``group`` call :meth:`agree` or :meth:`idle` once per round.

    The broadcast has the same size whatever the batch: ranks that disagree about the batch find it out from what they
    receive instead of hanging. A rank without requests (idle) takes part with :meth:`idle`; an empty batch with
    :meth:`agree`.

    Ranks are compared with rank 0, not made equal to it: drafts, D or lengths that differ are an error. From the round
    in which a rank differs until it is told (:meth:`check`), it gets a result that harms nothing instead of rank 0's:
    the root alone accepted, followed by token 0.

    Args:
        batch: the most requests of a round. All ranks must give the same three sizes: they are what is sent.
        width: the largest D, rows per request.
        depth: the largest W, width of ``accept_index``.
        device: of the results; gloo serves "cpu", hccl an NPU, nccl a CUDA device.
        group: the process group; None is the default one.
        check_now: look for differences in each call of :meth:`agree`, which reads the device; None: on a CPU alone.
            Otherwise call :meth:`check` where the host reads the outcome anyway.

    Attributes:
        rounds: rounds so far.

    Raises:
        InputError: a size below 1.
    """

    def __init__(
        self,
        batch: int,
        width: int,
        depth: int,
        *,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        check_now: bool | None = None,
    ) -> None:
        for name, value in (("batch", batch), ("width", width), ("depth", depth)):
            if value < 1:
                raise InputError(f"{name} = {value}: at least 1 is needed")
        self.batch, self.width, self.depth = batch, width, depth
        self.device, self.group = torch.device(device), group
        self.check_now = self.device.type == "cpu" if check_now is None else check_now
        self.rank = dist.get_rank(group)
        self.rounds = 0
        self._size = len(_HEADER) + batch * (1 + width + depth + 1)
        self._weights = digest_weights(batch * width).to(self.device)
        self._overruled = torch.zeros((), dtype=torch.int64, device=self.device)
        # The first number of a header that was not rank 0's: round, place in the header (-1: none), own, rank 0's.
        self._none = torch.tensor([0, -1, 0, 0], dtype=torch.int32, device=self.device)
        self._found = self._none

    @property
    def overruled(self) -> int:
        """Rounds in which this rank would have accepted something else than rank 0; reads the device.

        Rounds from a difference on, until it is told, do not count.
        """
        return int(self._overruled)

    def agree(
        self, result: VerifyResult, seq_lens: torch.Tensor, candidates: torch.Tensor | None = None
    ) -> VerifyResult:
        """Rank 0's result, on every rank.

        Args:
            result: what this rank would have accepted, for the same requests in the same order.
            seq_lens: int64 ``[bs]``; committed lengths before the verify. All ranks must have the same.
            candidates: int64 ``[bs, D]``, what was verified. A rank that verified other drafts holds other KV behind
                the same tokens, which no comparison of outputs would show; None where there are no drafts.

        Raises:
            InputError: a batch, D or W above the sizes of this object. This rank still takes part in the round with
                its numbers alone, so that no other rank waits for it: if it is rank 0, the others find the difference.
            AuditError: this rank's round, batch, D, W, drafts or a length differ from rank 0's; without ``check_now``
                :meth:`check` raises it.
        """
        batch, depth = result.accept_index.shape
        width = result.predict.numel() // batch if batch else 0
        self.rounds += 1
        header = torch.tensor([self.rounds, batch, width, depth, 0, 0], dtype=torch.int32)
        mine = torch.zeros(self._size, dtype=torch.int32, device=self.device)
        mine[: len(_HEADER)] = header.to(self.device, non_blocking=True)
        for name, value, most in (("batch", batch, self.batch), ("D", width, self.width), ("W", depth, self.depth)):
            if value > most:
                self._broadcast(mine)
                raise InputError(f"{name} = {value}: at most {most} was agreed on")
        if candidates is not None:
            mine[len(_HEADER) - 2 : len(_HEADER)] = digest(candidates, self._weights)
        own = torch.cat([seq_lens.to(torch.int32), *(_part(result, name).flatten() for name in PARTS)])
        mine[len(_HEADER) : len(_HEADER) + own.numel()] = own
        theirs = self._broadcast(mine.clone())
        head = len(_HEADER) + batch
        self._compare(mine[:head], theirs[:head])
        if self.check_now:
            self.check()
        same = self._found[1] < 0
        agreed = self._unpack(result, theirs[head:], same)
        self._overruled += self._differ(result, agreed) & same
        return agreed

    def idle(self) -> None:
        """Take part in a round in which this rank has no requests; what rank 0 decided does not concern it."""
        self.rounds += 1
        header = torch.zeros(self._size, dtype=torch.int32, device=self.device)
        header[0] = self.rounds
        self._broadcast(header)

    def check(self) -> None:
        """Whether this rank and rank 0 knew the same before each round since the last call; reads the device.

        Raises:
            AuditError: naming the first thing that differed, and both values.
        """
        number, at, here, there = self._found.tolist()
        self._found = self._none
        if at < 0:
            return
        what = _HEADER[at] if at < len(_HEADER) else f"committed length of request {at - len(_HEADER)} of the batch"
        raise AuditError(f"rank {self.rank}, round {number}: {what} is {here}, rank 0 has {there}")

    def _compare(self, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        """Note the first difference of two headers, without a look at the values."""
        bad = mine != theirs
        at = bad.to(torch.int32).argmax()
        place = torch.where(bad.any(), at, -1).to(torch.int32)
        seen = torch.stack((mine[0], place, mine[at], theirs[at]))
        self._found = torch.where(self._found[1] >= 0, self._found, seen)

    def _broadcast(self, buffer: torch.Tensor) -> torch.Tensor:
        dist.broadcast(buffer, group_src=0, group=self.group)
        return buffer

    def _unpack(self, result: VerifyResult, received: torch.Tensor, same: torch.Tensor) -> VerifyResult:
        """Rank 0's parts in the shapes of ``result``; where not ``same``, they are cut elsewhere: roots alone."""
        parts = {name: _part(result, name) for name in ("predict", "accept_index", "accept_token_num")}
        at = 0
        for name in PARTS:
            size = parts[name].numel()
            parts[name] = received[at : at + size].view(parts[name].shape)
            at += size
        batch, depth = result.accept_index.shape
        width = result.predict.numel() // max(batch, 1)
        place = torch.arange(depth, device=received.device)
        row = torch.arange(batch, dtype=torch.int32, device=received.device)[:, None] * width
        return VerifyResult(
            torch.where(same, parts["predict"], 0),
            torch.where(same, parts["accept_index"], torch.where(place == 0, row, -1)),
            torch.where(same, parts["accept_token_num"], 0) + 1,
        )

    @staticmethod
    def _differ(mine: VerifyResult, agreed: VerifyResult) -> torch.Tensor:
        """Whether the accepted rows or their tokens differ; rows behind a length mean nothing."""
        if not mine.accept_lens.numel():
            return torch.zeros((), dtype=torch.bool, device=mine.accept_lens.device)

        def seen(result: VerifyResult) -> tuple[torch.Tensor, torch.Tensor]:
            valid = torch.arange(result.accept_index.shape[1], device=result.accept_lens.device)
            index = torch.where(valid < result.accept_lens[:, None], result.accept_index, -1)
            tokens = result.predict[index.clamp_min(0).to(torch.int64)]
            return index, torch.where(index >= 0, tokens, -1)

        return torch.stack([(a != b).any() for a, b in zip(seen(mine), seen(agreed), strict=True)]).any()
