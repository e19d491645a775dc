"""Models, platforms and speculation as data; what follows from them; what is refused, and why.

Models are Hugging Face style dictionaries (``configs/models/*.json`` or a checkpoint's ``config.json``), platforms
stand in ``configs/platforms/*.json``. Rings, pads, widths and layer counts are derived, never typed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from dsv4_npu import addressing
from dsv4_npu.errors import ConfigError
from dsv4_npu.reading import LARGEST, parse_json, shown

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
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    data = parse_json(text, str(path), ConfigError)
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}; a JSON object is needed")
    return data


def configuration_file(source: str | Path) -> Path | None:
    """The file that ``source`` means: itself, or ``config.json`` in the folder of a checkpoint; None for a name."""
    path = Path(source)
    if path.suffix == ".json" or path.is_file():
        return path
    inside = path / "config.json"
    known = path.name == str(source) and (configs_dir() / "models" / f"{source}.json").is_file()
    return inside if not known and inside.is_file() else None


def _named(kind: str, name: str, also: Iterable[str] = ()) -> Path:
    folder = configs_dir() / kind
    path = folder / f"{name}.json"
    if not path.is_file():
        known = sorted([*(p.stem for p in folder.glob("*.json")), *also])
        raise ConfigError(f"{kind[:-1]} {name!r} is not known: give one of {known}, or the path of a JSON file")
    return path


def require_integer(value: object, name: str, low: int = 1) -> None:
    """Raise ConfigError unless ``value`` is an ``int`` of at least ``low``; a bool or a float like 8.0 is none."""
    if type(value) is not int or value < low:
        raise ConfigError(f"{name} = {shown(value)}; an integer of at least {low} is needed")
    if value > LARGEST:
        raise ConfigError(f"{name} = {shown(value)}; an integer from {low} to 2**53 is needed")


def require_flag(value: object, name: str) -> None:
    """Raise ConfigError unless ``value`` is a ``bool``: the string "false" would count as true."""
    if type(value) is not bool:
        raise ConfigError(f"{name} = {value!r}; true or false is needed")


def _require_one_of(value: object, allowed: tuple[str, ...], name: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} = {shown(value)}; one of {list(allowed)} is needed")


def _check_page_size(value: object, name: str) -> None:
    require_integer(value, name)
    assert isinstance(value, int)
    if value % 128:
        raise ConfigError(f"{name} = {value}; a multiple of 128 is needed, so that no compression window spans pages")


#: Fields of a model that are positive integers, and their keys in a ``config.json``.
_MODEL_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "rope_dim": "qk_rope_head_dim",
    "indexer_dim": "index_head_dim",
    "indexer_topk": "index_topk",
    "sliding_window": "sliding_window",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}


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

    def __post_init__(self) -> None:
        where = f"model {self.name}"
        for name, key in _MODEL_KEYS.items():
            require_integer(getattr(self, name), f"{where}: {key}")
        if self.dspark_block_size is not None:
            require_integer(self.dspark_block_size, f"{where}: dspark_block_size")
        self._check_ratios(where)
        if self.rope_dim > self.head_dim or self.rope_dim % 2:
            raise ConfigError(
                f"{where}: qk_rope_head_dim = {self.rope_dim}; "
                f"an even number up to head_dim = {self.head_dim} is needed"
            )

    def _check_ratios(self, where: str) -> None:
        ratios, layers = self.compress_ratios, self.num_layers
        if not isinstance(ratios, tuple) or not all(type(r) is int for r in ratios):
            raise ConfigError(f"{where}: compress_ratios = {ratios!r}; a list of integers is needed")
        bad = sorted({r for r in ratios if r not in SUPPORTED_RATIOS})
        if bad:
            raise ConfigError(
                f"{where}: compress_ratios holds {bad}; only {list(SUPPORTED_RATIOS)} are supported "
                "(DeepSeek-V4.1 with ratios 1 and 2 is another memory layout)"
            )
        if len(ratios) < layers:
            raise ConfigError(
                f"{where}: compress_ratios has {len(ratios)} entries; at least num_hidden_layers = {layers} are needed"
            )
        if any(ratios[layers:]):
            raise ConfigError(
                f"{where}: compress_ratios ends in {list(ratios[layers:])}; what lies beyond num_hidden_layers = "
                f"{layers} are draft stages, which must have ratio 0"
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], name: str | None = None) -> ModelSpec:
        """Build from a Hugging Face style dictionary; raises ConfigError that names the key."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"model {name or 'config'}: {type(data).__name__} given; a dictionary is needed")
        name = str(name or data.get("name") or "custom")
        missing = [key for key in (*_MODEL_KEYS.values(), "compress_ratios") if key not in data]
        if missing:
            raise ConfigError(f"model {name}: {missing[0]} is missing from the configuration")
        heads = data.get("num_key_value_heads", 1)
        if type(heads) is not int or heads != 1:
            raise ConfigError(f"model {name}: num_key_value_heads = {heads!r}; 1 is needed: a row is one head's K = V")
        ratios = data["compress_ratios"]
        return cls(
            name=name,
            **{attribute: data[key] for attribute, key in _MODEL_KEYS.items()},
            compress_ratios=tuple(ratios) if isinstance(ratios, list) else ratios,
            dspark_block_size=data.get("dspark_block_size"),
            raw=dict(data),
        )

    @classmethod
    def load(cls, source: str | Path, also: Iterable[str] = ()) -> ModelSpec:
        """A model by name (``v4_flash``, ``tiny``, ...) or by the path of a ``config.json`` or of its folder.

        ``also``: names that the caller knows besides, for the message about one that is not known.
        """
        path = configuration_file(source)
        if path is None:
            return cls.from_dict(_load(_named("models", str(source), also)), name=str(source))
        name = path.stem.split(".")[0] if path == Path(source) else path.resolve().parent.name
        return cls.from_dict(_load(path), name=name)

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

    def __post_init__(self) -> None:
        where = f"platform {self.name}"
        require_flag(self.npu, f"{where}: npu")
        _check_page_size(self.page_size, f"{where}: page_size")
        for name, allowed in (
            ("kv_row", KV_ROWS),
            ("indexer_row", INDEXER_ROWS),
            ("c4_state_owner", ("swa_page", "request")),
        ):
            _require_one_of(getattr(self, name), allowed, f"{where}: {name}")
        for name in ("vector_cores", "unified_buffer_kib"):
            if getattr(self, name) is not None:
                require_integer(getattr(self, name), f"{where}: {name}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PlatformSpec:
        """Build from a dictionary of the fields; raises ConfigError that names the key."""
        known = {f.name: f.default is MISSING for f in fields(cls)}
        missing = [key for key, needed in known.items() if needed and key not in data]
        if missing:
            raise ConfigError(f"platform {data.get('name')!r}: {missing[0]} is missing; {sorted(known)} are the keys")
        unknown = sorted(set(data) - set(known))
        if unknown:
            raise ConfigError(f"platform {data['name']!r}: {unknown[0]} is not known; {sorted(known)} are the keys")
        return cls(**data)

    @classmethod
    def load(cls, name: str) -> PlatformSpec:
        """A platform by name: a2, a3, a5 or cpu."""
        return cls.from_dict(_load(_named("platforms", name)))


@dataclass(frozen=True)
class SpeculationSpec:
    """Rows of one verify. ``draft_tokens`` is k of a chain or gamma of DSpark; D is one more (the root)."""

    kind: Literal["none", "chain", "dspark"] = "none"
    draft_tokens: int = 0
    topk: int = 1

    def __post_init__(self) -> None:
        _require_one_of(self.kind, ("none", "chain", "dspark"), "speculation kind")
        require_integer(self.draft_tokens, "draft_tokens", 0)
        if self.kind == "none" and self.draft_tokens:
            raise ConfigError(f"draft_tokens = {self.draft_tokens} without speculation; 0 is needed")
        require_integer(self.topk, "topk")
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
        for name, kind in (("model", ModelSpec), ("platform", PlatformSpec), ("speculation", SpeculationSpec)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} = {getattr(self, name)!r}; a {kind.__name__} is needed")
        for name in ("page_size", "kv_row", "indexer_row"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.platform, name))
        _check_page_size(self.page_size, "page_size")
        _require_one_of(self.kv_row, KV_ROWS, "kv_row")
        _require_one_of(self.indexer_row, INDEXER_ROWS, "indexer_row")
        for name in ("c128_page_size", "context_len", "request_rows"):
            require_integer(getattr(self, name), name)
        for name in ("emulated_kernels", "online_c128"):
            require_flag(getattr(self, name), name)
        ps = self.c128_page_size
        if ps & (ps - 1):
            raise ConfigError(f"c128_page_size = {ps}; a power of two is needed (the extend kernel shifts by it)")
        if self.platform.npu and ps % 16 and not self.emulated_kernels:
            raise ConfigError(
                f"c128_page_size = {ps} on {self.platform.name}; a multiple of 16 is needed by the NPU kernels"
            )
        if self.online_c128:
            raise ConfigError(
                f"online_c128 on {self.platform.name}: the online C128 mode is CUDA-only, the fused compressor of the "
                "NPU has none; leave it off"
            )
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
        most = self.model.max_positions
        if self.page > max(most, self.platform.page_size):
            raise ConfigError(
                f"page_size = {self.page}; at most {most} (the model's positions): a page is shared by no two requests"
            )
        if self.c128_page_size > max(16, most // addressing.C128_RATIO):
            raise ConfigError(
                f"c128_page_size = {self.c128_page_size}; at most {max(16, most // addressing.C128_RATIO)}: one page "
                f"of {self.c128_page_size} entries would cover more than the model's {most} positions"
            )
        if self.context_len > self.model.max_positions:
            raise ConfigError(
                f"context_len = {self.context_len}; 1 to {self.model.max_positions} (the model's positions) is needed"
            )
        need = addressing.ceil_to(self.context_len + self.reserve, self.page)
        if self.row_width is None:
            object.__setattr__(self, "row_width", need)
            return
        require_integer(self.row_width, "row_width")
        if self.row_width < need:
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
