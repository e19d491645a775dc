"""Drafts from stages with rows of their own: MTP as a chain, DSpark as a block.

Positions as everywhere: a request with history ``t[0 .. n]`` has ``n`` committed positions and the root ``t[n]``;
``h[i]`` is the target's hidden state at position ``i`` (what its head is given). ``row[s][i]`` is what stage ``s``
keeps of position ``i``, in SWA slot ``i`` of the request, layer ``target layers + s`` of the slab.

MTP, one stage. The input at position i is ``x[i] = mix[norm(e(t[i + 1])); norm(h[i])]``, so a row needs the token
behind its position::

    inject(start, accept, predict, h):            # after a verify; a prefill is the same for its whole chunk
        for i in start .. start + accept - 1:     # committed rows only
            row[i] = key_value(x[i])              # t[i + 1] = predict of verify row i - start: a draft, or the bonus
        keep h[start + accept - 1]

    propose(n, root, h[n - 1], k):
        token, hidden = root, h[n - 1]            # row[n - 1] is there: this step only reads
        for j in 0 .. k - 1:                      # position n - 1 + j; from j = 1 on the step writes row[n - 1 + j]
            hidden = stage(e(token), hidden) over row[.. n - 1 + j]
            token = draft[j] = argmax head(hidden)

DSpark, several stages, gamma drafts. The input at a committed position is ``x[i] = mix[norm(e(t[i])); norm(h[i])]``; it
goes through all stages, each of which keeps its row::

    inject(start, accept, candidates, h):
        for i in start .. start + accept - 1, stage by stage:
            row[s][i] = key_value of stage s at position i, over row[s][.. i]
        keep h[start + accept - 1]

    propose(n, root, h[n - 1], gamma):            # one forward of gamma rows at positions n .. n + gamma - 1
        x[n] = mix[norm(e(root)); norm(h[n - 1])]
        x[n + j] = mix[norm(place[j]); norm(h[n - 1])]  for j = 1 .. gamma - 1
        draft[j] = argmax head(stages(x)[n + j])        row n + j reads positions n + j - window + 1 .. n + j

Rows of rejected positions are never read by a later round. A round at ``n`` reads rows up to its own end; those below
``n`` were injected by the round (or prefill) that committed them, over whatever a draft had left there, and those from
``n`` on it writes itself before it reads them.

Nothing has to be carried between steps but the last hidden state of each request row, on the device. It need not leave
with a request either: who comes back (retracted, restored, resumed, rewound) prefills at least one token, which makes
it anew. What an MTP row depends on beyond its position is the next token, which a prompt knows and a forward makes; so
where that token changes, the row is history no more (``lookahead``,
:class:`~dsv4_npu.alloc.rollback.RollbackRules`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from dsv4_npu.emulation.cache import held_pools, pool_layer_class
from dsv4_npu.emulation.device import held, on_device
from dsv4_npu.emulation.drafters import Drafts
from dsv4_npu.emulation.forward import BatchPlan, Bounds, Tables, check_resident, plan_batch_on_device
from dsv4_npu.emulation.model import transformers_module
from dsv4_npu.emulation.numerics import KeepFloat64
from dsv4_npu.emulation.stages.net import PLACES, StageNet
from dsv4_npu.errors import ConfigError
from dsv4_npu.pools import DSV4Pools

Kind = Literal["mtp", "dspark"]


@dataclass(frozen=True)
class Proposal:
    """One round's drafts, for whoever watches: all tensors in held memory.

    ``rows``, ``starts``, ``roots``: int64 ``[bs]``. ``tokens``: int64 ``[bs, k]``. ``logits``: ``[bs, k, V]``.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    roots: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor


class OwnDrafter:
    """Proposes from the draft stages of the model; see the module for what each kind computes.

    It works from lengths, roots and hidden states on the device, so a round can be drafted before the one before it is
    learned.

    Args:
        net: the stages.
        kind: "mtp" (one stage) or "dspark".

    Raises:
        ConfigError: MTP with another number of stages.
    """

    name = "own"
    needs_history = False

    def __init__(self, net: StageNet, kind: Kind) -> None:
        if kind not in ("mtp", "dspark"):
            raise ConfigError(f"draft stages of kind {kind!r}; 'mtp' or 'dspark' is needed")
        if kind == "mtp" and net.stages != 1:
            raise ConfigError(f"mtp over {net.stages} draft stages; a model with 1 is needed (dspark takes several)")
        self.net, self.kind = net, kind

    @property
    def lookahead(self) -> int:
        """Tokens behind a position that its row is made from."""
        return int(self.kind == "mtp")


class StageRounds:
    """The stages of one engine: their rows in ``pools``, the hidden states in between, and what a round does with them.

    Attributes:
        hidden: ``[request rows + 1, hidden size]`` on the device: the target's hidden state at each row's last
            position.
        watch: called with every :class:`Proposal`.
    """

    def __init__(self, drafter: OwnDrafter, pools: DSV4Pools, tables: Tables) -> None:
        model = pools.config.model
        if pools.swa.layers != model.num_layers + drafter.net.stages:
            raise ConfigError(
                f"SWA slab of {pools.swa.layers} layers; {model.num_layers} of the target and {drafter.net.stages} of "
                "the draft stages are needed"
            )
        if drafter.kind == "dspark" and pools.config.verify_width > PLACES:
            raise ConfigError(f"verify width D = {pools.config.verify_width}; at most {PLACES} with dspark stages")
        self.net, self.kind = drafter.net, drafter.kind
        self.tables, self.device = tables, tables.block_table.device
        self.pools, self.casts = held_pools(pools), KeepFloat64()
        # Stages have no compressor: their plans address SWA rows and nothing else.
        self._plain = copy.copy(pools)
        self._plain.c4_index, self._plain.c128_index = {}, {}
        self._batch: BatchPlan | None = None
        layer = pool_layer_class()
        layers = [layer(self, model.num_layers + stage, {}) for stage in range(self.net.stages)]
        self._cache: Any = transformers_module().cache_utils.Cache(layers=layers)
        self.hidden = torch.zeros(
            (tables.block_table.shape[0], model.hidden_size), dtype=torch.float64, device=self.device
        )
        self.watch: Callable[[Proposal], None] | None = None

    @property
    def batch(self) -> BatchPlan:
        """The plan of the forward that is running."""
        assert self._batch is not None
        return self._batch

    def prefilled(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        chunk: torch.Tensor,
        following: torch.Tensor,
        hidden: torch.Tensor,
        plan: BatchPlan,
    ) -> None:
        """Write the rows of a prefill chunk, all of which is committed.

        ``rows``, ``lengths``: int64 ``[bs]``. ``chunk``: int64 ``[bs, q]``, padded. ``following``: int64 ``[bs]``, the
        token behind each chunk. ``hidden``: ``[bs, q, hidden size]``. ``plan``: the target's, for the same positions.
        """
        last = (lengths - 1)[:, None]
        tokens = chunk
        if self.kind == "mtp":
            tokens = torch.cat((chunk[:, 1:], chunk[:, :1]), dim=1).scatter(1, last, following[:, None])
        self._forward(self._embed(tokens), hidden, plan)
        self._keep(rows, hidden, last)

    def committed(
        self,
        rows: torch.Tensor,
        starts: torch.Tensor,
        accept_lens: torch.Tensor,
        candidates: torch.Tensor,
        predict: torch.Tensor,
        hidden: torch.Tensor,
        bounds: Bounds,
    ) -> None:
        """Inject the committed rows of a verify, and no others: the first ``accept_lens[b]`` rows of the window.

        ``rows``, ``starts``, ``accept_lens``: ``[bs]``. ``candidates``: int64 ``[bs, D]``. ``predict``: int32
        ``[bs · D]``, valid at accepted rows. ``hidden``: ``[bs, D, hidden size]``. A chain's accepted rows are in
        place.
        """
        accepted = accept_lens.to(torch.int64)
        tokens = candidates if self.kind == "dspark" else predict.view(candidates.shape).to(torch.int64)
        index = torch.arange(candidates.shape[1], device=self.device)
        # What acceptance did not write may be no token at all; these rows go nowhere.
        tokens = torch.where(index < accepted[:, None], tokens, 0)
        plan = self._plan(rows, starts, accepted, bounds)
        self._forward(self._embed(tokens), hidden, plan)
        self._keep(rows, hidden, (accepted - 1)[:, None])

    def propose(
        self, rows: torch.Tensor, starts: torch.Tensor, roots: torch.Tensor, bounds: Bounds, count: int
    ) -> Drafts:
        """``count`` drafts per request behind ``roots``; rows, starts and roots are int64 ``[bs]`` on the device."""
        hidden = self.hidden[rows]
        make = self._chain if self.kind == "mtp" else self._block
        logits = make(rows, starts, roots, hidden, bounds, count)
        tokens = logits.argmax(-1)
        if self.watch is not None:
            # Lengths and roots move on in place while a round is in flight.
            seen = [held(one).clone() for one in (rows, starts, roots, tokens, logits)]
            self.watch(Proposal(*seen))
        return Drafts(tokens)

    def _chain(
        self,
        rows: torch.Tensor,
        starts: torch.Tensor,
        roots: torch.Tensor,
        hidden: torch.Tensor,
        bounds: Bounds,
        count: int,
    ) -> torch.Tensor:
        token, step, logits = roots, hidden[:, None], []
        for index in range(count):
            plan = self._plan(rows, starts + (index - 1), 1, bounds.row(index - 1))
            if not index:
                # The row of the last committed position was injected; it may lie on a page that others read.
                plan = replace(plan, swa_new=torch.full_like(plan.swa_new, -1))
            step = self._forward(self._embed(token[:, None]), step, plan)
            logits.append(self._head(step))
            token = logits[-1][:, 0].argmax(-1)
        return torch.cat(logits, dim=1)

    def _block(
        self,
        rows: torch.Tensor,
        starts: torch.Tensor,
        roots: torch.Tensor,
        hidden: torch.Tensor,
        bounds: Bounds,
        count: int,
    ) -> torch.Tensor:
        plan = self._plan(rows, starts, count, Bounds(bounds.lows, bounds.highs, [count] * len(bounds.lows)))
        places = self.net.places[1:count].expand(len(rows), -1, -1)
        embedded = torch.cat((held(self._embed(roots[:, None])), places), dim=1)
        spread = hidden[:, None].expand(-1, count, -1)
        return self._head(self._forward(on_device(embedded, self.device), spread, plan))

    def _plan(self, rows: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor | int, bounds: Bounds) -> BatchPlan:
        plan = plan_batch_on_device(self._plain, self.tables, rows, starts, lengths, bounds)
        if self.device.type == "cpu":
            check_resident(plan, starts + lengths)
        return plan

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return on_device(self.net.embed(held(tokens)), self.device)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return on_device(self.net.head(held(hidden)), self.device)

    def _forward(self, embedded: torch.Tensor, hidden: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """Outputs of the rows of ``plan``; like the target's attention it works on held memory."""
        self._batch = held(plan)
        try:
            output = self.net.run(
                held(embedded), held(hidden), self.batch.positions, self.batch.mask, self._cache, self.casts
            )
        finally:
            self._batch = None
        return on_device(output, self.device)

    def _keep(self, rows: torch.Tensor, hidden: torch.Tensor, last: torch.Tensor) -> None:
        """The hidden state at index ``last [bs, 1]`` of each request is the one that its next round starts from."""
        chosen = hidden.gather(1, last[..., None].expand(-1, -1, hidden.shape[-1]))[:, 0]
        self.hidden.index_put_((rows,), chosen)
