"""Models, platforms and speculation as data; what follows from them; what is refused, and why.

Models are Hugging Face style dictionaries (``configs/models/*.json`` or a checkpoint's ``config.json``), platforms
stand in ``configs/platforms/*.json``. Rings, pads, widths and layer counts are derived, never typed in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dsv4_npu import addressing
from dsv4_npu.errors import ConfigError

SUPPORTED_RATIOS = (0, 4, 128)
C4Owner = Literal["swa_page", "request"]
KV_ROWS = ("bf16", "fp8_packed", "fp32", "fp64")
INDEXER_ROWS = ("int8_fp16", "fp8_fp32", "fp32", "fp64")


def configs_dir() -> Path:
    """The folder with ``models/`` and ``platforms/``: inside an installed package, else beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for candidate in (here / "configs", here.parent / "configs"):
        if (candidate / "models").is_dir():
            return candidate
    raise ConfigError(f"no configs folder in {here} or {here.parent}: the installation is incomplete")


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}; a JSON object is needed")
    return data


def _named(kind: str, name: str) -> Path:
    folder = configs_dir() / kind
    path = folder / f"{name}.json"
    if not path.is_file():
        known = sorted(p.stem for p in folder.glob("*.json"))
        raise ConfigError(f"{kind[:-1]} {name!r} is not known: give one of {known}, or the path of a JSON file")
    return path


def _positive(data: Mapping[str, Any], key: str, where: str) -> int:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {key} = {value!r}; a positive integer is needed")
    return value


@dataclass(frozen=True)
class ModelSpec:
    """What the memory of a DeepSeek-V4 model depends on.

    ``compress_ratios`` lists the target layers first; what the list holds beyond ``num_layers`` are draft stages.
    ``raw`` keeps the whole dictionary for builders of the model itself.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    head_dim: int
    rope_dim: int
    indexer_dim: int
    indexer_topk: int
    sliding_window: int
    vocab_size: int
    max_positions: int
    compress_ratios: tuple[int, ...]
    dspark_block_size: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], name: str | None = None) -> ModelSpec:
        """Build from a Hugging Face style dictionary; raises ConfigError that names the key."""
        where = f"model {name or data.get('name') or 'config'}"
        ratios = data.get("compress_ratios")
        if not isinstance(ratios, (list, tuple)) or not all(type(r) is int for r in ratios):
            raise ConfigError(f"{where}: compress_ratios = {ratios!r}; a list of integers is needed")
        bad = sorted({r for r in ratios if r not in SUPPORTED_RATIOS})
        if bad:
            raise ConfigError(
                f"{where}: compress_ratios holds {bad}; only {list(SUPPORTED_RATIOS)} are supported "
                "(DeepSeek-V4.1 with ratios 1 and 2 is another memory layout)"
            )
        layers = _positive(data, "num_hidden_layers", where)
        if len(ratios) < layers:
            raise ConfigError(f"{where}: compress_ratios has {len(ratios)} entries for num_hidden_layers = {layers}")
        if any(ratios[layers:]):
            raise ConfigError(f"{where}: draft stages (entries {layers}.. of compress_ratios) must have ratio 0")
        head_dim, rope_dim = _positive(data, "head_dim", where), _positive(data, "qk_rope_head_dim", where)
        if rope_dim > head_dim or rope_dim % 2:
            raise ConfigError(f"{where}: qk_rope_head_dim = {rope_dim}; an even number up to head_dim = {head_dim}")
        block = data.get("dspark_block_size")
        return cls(
            name=str(name or data.get("name") or "custom"),
            num_layers=layers,
            hidden_size=_positive(data, "hidden_size", where),
            num_heads=_positive(data, "num_attention_heads", where),
            head_dim=head_dim,
            rope_dim=rope_dim,
            indexer_dim=_positive(data, "index_head_dim", where),
            indexer_topk=_positive(data, "index_topk", where),
            sliding_window=_positive(data, "sliding_window", where),
            vocab_size=_positive(data, "vocab_size", where),
            max_positions=_positive(data, "max_position_embeddings", where),
            compress_ratios=tuple(ratios),
            dspark_block_size=None if block is None else _positive(data, "dspark_block_size", where),
            raw=dict(data),
        )

    @classmethod
    def load(cls, source: str | Path) -> ModelSpec:
        """A model by name (``v4_flash``, ``tiny``, ...) or by the path of a ``config.json``."""
        path = Path(source)
        if path.suffix == ".json" or path.exists():
            return cls.from_dict(_load(path), name=path.stem.split(".")[0])
        return cls.from_dict(_load(_named("models", str(source))), name=str(source))

    @property
    def nope_dim(self) -> int:
        """Channels of a KV row that carry no rotary position."""
        return self.head_dim - self.rope_dim

    @property
    def num_draft_stages(self) -> int:
        """Draft stages: the tail of ``compress_ratios`` beyond the target's layers."""
        return len(self.compress_ratios) - self.num_layers

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        """Indices of the target layers with compression ``ratio``."""
        return tuple(i for i, r in enumerate(self.compress_ratios[: self.num_layers]) if r == ratio)


@dataclass(frozen=True)
class PlatformSpec:
    """Row formats, C4 state ownership and kernel limits of one kind of hardware."""

    name: str
    npu: bool
    page_size: int
    kv_row: str
    indexer_row: str
    c4_state_owner: C4Owner
    target: str | None = None
    vector_cores: int | None = None
    unified_buffer_kib: int | None = None
    description: str = ""

    @classmethod
    def load(cls, name: str) -> PlatformSpec:
        """A platform by name: a2, a3, a5 or cpu."""
        data = _load(_named("platforms", name))
        for key, allowed in (
            ("kv_row", KV_ROWS),
            ("indexer_row", INDEXER_ROWS),
            ("c4_state_owner", ("swa_page", "request")),
        ):
            if data.get(key) not in allowed:
                raise ConfigError(f"platform {name}: {key} = {data.get(key)!r}; one of {list(allowed)} is needed")
        return cls(**data)


@dataclass(frozen=True)
class SpeculationSpec:
    """Rows of one verify. ``draft_tokens`` is k of a chain or gamma of DSpark; D is one more (the root)."""

    kind: Literal["none", "chain", "dspark"] = "none"
    draft_tokens: int = 0
    topk: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("none", "chain", "dspark"):
            raise ConfigError(f"speculation kind = {self.kind!r}; one of ['none', 'chain', 'dspark'] is needed")
        if self.kind == "none" and self.draft_tokens != 0:
            raise ConfigError(f"draft_tokens = {self.draft_tokens} without speculation; 0 is needed")
        if self.kind != "none" and self.draft_tokens < 0:
            raise ConfigError(f"draft_tokens = {self.draft_tokens}; 0 or more is needed for {self.kind} speculation")
        if self.topk != 1:
            raise ConfigError(
                f"topk = {self.topk} on DeepSeek-V4: only 1 is possible, because the compressor ring is addressed by "
                "absolute position, so two tree nodes of one depth would share a state row"
            )

    @property
    def speculative(self) -> bool:
        """Whether rings are doubled and a verify runs."""
        return self.kind != "none"

    @property
    def verify_width(self) -> int:
        """D: rows per request in one verify, the root included (1 without speculation)."""
        return self.draft_tokens + 1

    @property
    def alloc_len(self) -> int:
        """Tokens that one decode may write: ``max(topk · steps, D)``."""
        return max(self.topk * self.draft_tokens, self.verify_width)

    @property
    def reserve(self) -> int:
        """Tokens kept allocated past the committed length: two decodes, since the host learns lengths a step late."""
        return 2 * self.alloc_len


@dataclass(frozen=True)
class CacheConfig:
    """One deployment of the memory: model, platform, speculation and geometry, with everything derived from them.

    Args:
        page_size: tokens per FULL/SWA page; None takes the platform's.
        c128_page_size: C128 entries per physical page; a power of two, on NPU also a multiple of 16.
        context_len: the longest history of a request, in tokens.
        request_rows: request rows that can be given out (row 0 comes on top).
        row_width: tokens a request row can address; None derives it.
        kv_row, indexer_row: row formats; None takes the platform's native ones.
        emulated_kernels: lifts the multiple-of-16 rule of the NPU kernels, for short test sequences on a CPU.
        online_c128: refused on NPU; exists so that a configuration that asks for it gets the reason.
    """

    model: ModelSpec
    platform: PlatformSpec
    speculation: SpeculationSpec = SpeculationSpec()
    page_size: int | None = None
    c128_page_size: int = 16
    context_len: int = 4096
    request_rows: int = 8
    row_width: int | None = None
    kv_row: str | None = None
    indexer_row: str | None = None
    emulated_kernels: bool = False
    online_c128: bool = False

    def __post_init__(self) -> None:
        page = self.platform.page_size if self.page_size is None else self.page_size
        object.__setattr__(self, "page_size", page)
        object.__setattr__(self, "kv_row", self.kv_row or self.platform.kv_row)
        object.__setattr__(self, "indexer_row", self.indexer_row or self.platform.indexer_row)
        if page < 128 or page % 128:
            raise ConfigError(f"page_size = {page}; a positive multiple of 128 is needed")
        if self.kv_row not in KV_ROWS:
            raise ConfigError(f"kv_row = {self.kv_row!r}; one of {list(KV_ROWS)} is needed")
        if self.indexer_row not in INDEXER_ROWS:
            raise ConfigError(f"indexer_row = {self.indexer_row!r}; one of {list(INDEXER_ROWS)} is needed")
        ps = self.c128_page_size
        if ps < 1 or ps & (ps - 1):
            raise ConfigError(f"c128_page_size = {ps}; a power of two is needed (the extend kernel shifts by it)")
        if self.platform.npu and ps % 16 and not self.emulated_kernels:
            raise ConfigError(
                f"c128_page_size = {ps} on {self.platform.name}; a multiple of 16 is needed by the NPU kernels "
                "(emulated_kernels lifts this on a CPU)"
            )
        if self.online_c128:
            raise ConfigError(
                f"online_c128 on {self.platform.name}: the online C128 mode is CUDA-only, the fused compressor of the "
                "NPU has none; leave it off"
            )
        if self.request_rows < 1:
            raise ConfigError(f"request_rows = {self.request_rows}; at least 1 is needed")
        self._check_width()
        self._check_context()

    def _check_width(self) -> None:
        if not self.speculation.speculative:
            return
        width = self.speculation.verify_width
        for ratio, name in ((4, "C4"), (128, "C128")):
            pad = self.write_pad(ratio)
            if self.model.layers_of(ratio) and width > pad:
                raise ConfigError(
                    f"verify width D = {width} (draft_tokens = {self.speculation.draft_tokens} + the root) exceeds the "
                    f"write pad {pad} of the {name} ring of {self.ring(ratio)} rows: at most "
                    f"draft_tokens = {pad - 1} keeps accepted rows"
                )

    def _check_context(self) -> None:
        if not 1 <= self.context_len <= self.model.max_positions:
            raise ConfigError(
                f"context_len = {self.context_len}; 1 to {self.model.max_positions} (the model's positions) is needed"
            )
        need = addressing.ceil_to(self.context_len + self.reserve, self.page)
        if self.row_width is None:
            object.__setattr__(self, "row_width", need)
        elif self.row_width < need:
            raise ConfigError(
                f"context_len = {self.context_len} with reserve {self.reserve} needs a request row of {need} tokens; "
                f"row_width = {self.row_width} cannot hold it"
            )

    @property
    def page(self) -> int:
        """Tokens per FULL/SWA page."""
        assert self.page_size is not None
        return self.page_size

    @property
    def width(self) -> int:
        """Tokens that a request row can address."""
        assert self.row_width is not None
        return self.row_width

    @property
    def verify_width(self) -> int:
        """D: rows per request in one verify."""
        return self.speculation.verify_width

    @property
    def reserve(self) -> int:
        """Tokens kept allocated past the committed length."""
        return self.speculation.reserve

    @property
    def sidecar_columns(self) -> int:
        """Columns of the C128 sidecar."""
        return addressing.sidecar_width(self.width, self.c128_page_size)

    @property
    def c4_page(self) -> int:
        """C4 entries per page."""
        return self.page // 4

    def ring(self, ratio: int) -> int:
        """Rows of the compressor ring of ``ratio``."""
        return addressing.ring_size(ratio, self.speculation.speculative)

    def write_pad(self, ratio: int) -> int:
        """Write pad of the ring of ``ratio``: the largest legal verify width."""
        return addressing.write_pad(self.ring(ratio), ratio)
