"""The plan of one deployment: sizes, requests, what limits them, and what a change would cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsv4_npu.budget import (
    DEFAULT_SWA_RATIO,
    GIB,
    Budget,
    PoolSizes,
    budget_of,
    fixed_bytes,
    group_swa_floor,
    largest_sizes,
    request_pages,
    requests_by_family,
    sizes_for_tokens,
)
from dsv4_npu.config import CacheConfig
from dsv4_npu.errors import ConfigError


@dataclass(frozen=True)
class Deployment:
    """What is asked for. Either ``memory`` (bytes of one device for pools and tables), or ``tokens``, or both."""

    config: CacheConfig
    memory: int | None
    tokens: int | None = None
    swa_ratio: float = DEFAULT_SWA_RATIO
    swa_tokens: int | None = None

    def sizes(self) -> PoolSizes:
        """The sizes: ``tokens`` where given, else the most that fit; ConfigError where they do not fit."""
        config = self.config
        largest = None
        if self.memory is not None:
            floor = group_swa_floor(config)
            largest = largest_sizes(config, self.memory, self.swa_ratio, swa_tokens=self.swa_tokens, swa_floor=floor)
        if self.tokens is None:
            assert largest is not None
            return largest
        wanted = self.sizes_for(self.tokens)
        if largest is not None and wanted.full_pages > largest.full_pages:
            assert self.memory is not None
            need, most = budget_of(config, wanted).total_bytes, largest.full_pages * config.page
            raise ConfigError(
                f"tokens = {self.tokens:,}: {need / GIB:.2f} GiB are needed, {self.memory / GIB:.2f} GiB are there: "
                f"lower --tokens to {most:,}, or raise --hbm-gib"
            )
        return wanted

    def sizes_for(self, tokens: int) -> PoolSizes:
        """Sizes that hold ``tokens``, whether they fit or not."""
        floor = group_swa_floor(self.config)
        return sizes_for_tokens(self.config, tokens, self.swa_ratio, swa_tokens=self.swa_tokens, swa_floor=floor)


@dataclass(frozen=True)
class Change:
    """One change of the deployment.

    Attributes:
        what: the change, in words.
        more_bytes: bytes that it takes more at the same tokens (negative: fewer).
        tokens: tokens that fit into the same memory with it; None without a memory or where nothing fits.
        note: why it cannot be had, if so.
    """

    what: str
    more_bytes: int
    tokens: int | None
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """The answer; tokens and requests are at least 1.

    Attributes:
        requests: requests of full context that run at once: the least of ``limits``.
        limits: how many requests of full context each family, and the slots, would hold.
        fixed: bytes that are there before the first token.
        changes: what one more slot, other C128 pages, less SWA would do.
    """

    deployment: Deployment
    budget: Budget
    limits: dict[str, int]
    fixed: int
    changes: tuple[Change, ...]

    @property
    def tokens(self) -> int:
        """Tokens of history over all requests."""
        return self.budget.sizes.full_pages * self.deployment.config.page

    @property
    def requests(self) -> int:
        """Requests of full context at once."""
        return min(self.limits.values())

    @property
    def binding(self) -> str:
        """The family, or the request slots, that limits the requests."""
        return min(self.limits, key=self.limits.__getitem__)

    @property
    def bytes_per_token(self) -> float:
        """What is not fixed, per token: compressed entries, the SWA share with its states, the SWA mapping."""
        return (self.budget.total_bytes - self.fixed) / self.tokens

    @property
    def windows(self) -> int:
        """Running requests of any length that SWA holds at once."""
        return self.limits["SWA"]

    @property
    def next_page(self) -> int:
        """Bytes that one more page of tokens would take."""
        more = self.deployment.sizes_for(self.tokens + self.deployment.config.page)
        return budget_of(self.deployment.config, more).total_bytes - self.budget.total_bytes

    @property
    def left(self) -> int | None:
        """Bytes of the memory that stay free; less than a page of tokens takes, unless tokens were given."""
        memory = self.deployment.memory
        return None if memory is None else memory - self.budget.total_bytes


def make_plan(deployment: Deployment) -> Plan:
    """Plan a deployment. Raises ConfigError, which names the option to change, if not one full context fits."""
    config = deployment.config
    sizes = deployment.sizes()
    limits = requests_by_family(config, sizes)
    if not min(limits.values()):
        _refuse(deployment, sizes, min(limits, key=limits.__getitem__))
    budget = budget_of(config, sizes)
    fixed = fixed_bytes(config, deployment.swa_tokens)
    return Plan(deployment, budget, limits, fixed, tuple(_changes(deployment, budget)))


def _refuse(deployment: Deployment, sizes: PoolSizes, family: str) -> None:
    config = deployment.config
    have = {"FULL": sizes.full_pages, "SWA": sizes.swa_pages, "C128": sizes.c128_pages}
    need = request_pages(config)
    fits = sizes.full_pages * config.page - config.reserve
    more = "raise --tokens" if deployment.tokens is not None else "raise --hbm-gib"
    if config.request_rows > 1 and deployment.tokens is None:
        more += ", lower --max-running"
    raise ConfigError(
        f"context = {config.context_len:,}: one request of it needs {need[family]:,} {family} pages, there are "
        f"{have[family]:,}: {more}, or lower --context" + (f" to {fits:,}" if fits > 0 else "")
    )


def _changes(deployment: Deployment, budget: Budget) -> Iterator[Change]:
    config, page = deployment.config, deployment.config.c128_page_size

    def with_config(changed: CacheConfig) -> Deployment:
        return replace(deployment, config=changed)

    slot = replace(config, request_rows=config.request_rows + 1)
    yield _change("one more request slot", with_config(slot), budget)
    if page > 1:
        small = replace(config, c128_page_size=page // 2, emulated_kernels=True)
        change = _change(f"C128 page {page // 2} (now {page})", with_config(small), budget)
        if config.platform.npu and page // 2 % 16:
            change = replace(change, note="not on an NPU")
        yield change
    large = replace(config, c128_page_size=2 * page)
    yield _change(f"C128 page {2 * page} (now {page})", with_config(large), budget)
    if deployment.swa_tokens is None:
        half = deployment.swa_ratio / 2
        less = replace(deployment, swa_ratio=half)
        yield _change(f"SWA share {half:g} (now {deployment.swa_ratio:g})", less, budget)


def _change(what: str, other: Deployment, budget: Budget) -> Change:
    config, fits, note = other.config, None, ""
    same = budget_of(config, other.sizes_for(budget.sizes.full_pages * config.page)).total_bytes
    if other.memory is not None:
        try:
            fits = replace(other, tokens=None).sizes().full_pages * config.page
        except ConfigError:
            note = "does not fit"
    return Change(what, same - budget.total_bytes, fits, note)
