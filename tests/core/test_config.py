"""Models, platforms and speculation: what is derived from them, and every refusal with its field, value and reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_npu import addressing
from dsv4_npu import config as config_module
from dsv4_npu.config import CacheConfig, ModelSpec, PlatformSpec, SpeculationSpec, configs_dir
from dsv4_npu.errors import ConfigError, Dsv4NpuError

A3 = PlatformSpec.load("a3")
FLASH = ModelSpec.load("v4_flash")
TINY = ModelSpec.load("tiny")

#: What the memory depends on, as the public V4-Flash checkpoint's ``config.json`` states it.
PUBLIC_FLASH = {
    "num_hidden_layers": 43,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "sliding_window": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}

#: name -> layers, hidden, heads, top-k, layers of ratio 0 / 4 / 128, list length, draft stages, DSpark block.
MODELS = {
    "v4_flash": (43, 4096, 64, 512, (2, 21, 20), 44, 1, None),
    "v4_flash_dspark": (43, 4096, 64, 512, (2, 21, 20), 46, 3, 5),
    "v4_pro": (61, 7168, 128, 1024, (0, 30, 31), 62, 1, None),
    "v4_pro_dspark": (61, 7168, 128, 1024, (0, 30, 31), 64, 3, 5),
    "tiny": (5, 64, 4, 64, (2, 2, 1), 6, 1, 5),
    "tiny_dspark": (5, 64, 4, 64, (2, 2, 1), 8, 3, 5),
}


def config(model: ModelSpec = FLASH, platform: PlatformSpec = A3, spec: SpeculationSpec | None = None, **rest: Any):
    """A deployment with 3 drafts unless ``spec`` says otherwise."""
    return CacheConfig(model, platform, spec or SpeculationSpec("chain", 3), **rest)


def refused(*parts: str):
    """Expect a ConfigError whose message holds every part."""
    return pytest.raises(ConfigError, match="(?s)" + "".join(f"(?=.*{part})" for part in parts))


# -- models -----------------------------------------------------------------------------------------------------------


def test_every_shipped_model_is_in_the_table() -> None:
    assert {path.stem for path in (configs_dir() / "models").glob("*.json")} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_model_facts(name: str) -> None:
    layers, hidden, heads, topk, of_ratio, length, stages, block = MODELS[name]
    model = ModelSpec.load(name)
    assert (model.name, model.num_layers, model.hidden_size, model.num_heads) == (name, layers, hidden, heads)
    assert (model.indexer_topk, model.dspark_block_size) == (topk, block)
    assert tuple(len(model.layers_of(ratio)) for ratio in (0, 4, 128)) == of_ratio
    assert len(model.compress_ratios) == length
    assert model.num_draft_stages == stages
    # The draft stages follow from the list's tail; num_nextn_predict_layers stays 1 on DSpark checkpoints too.
    assert model.raw["num_nextn_predict_layers"] == 1
    for ratio in (0, 4, 128):
        assert all(model.compress_ratios[i] == ratio for i in model.layers_of(ratio))
    assert sorted(i for ratio in (0, 4, 128) for i in model.layers_of(ratio)) == list(range(layers))


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("tiny")])
def test_dimensions_shared_by_the_checkpoints(name: str) -> None:
    model = ModelSpec.load(name)
    assert (model.head_dim, model.nope_dim, model.rope_dim) == (512, 448, 64)
    assert (model.indexer_dim, model.sliding_window) == (128, 128)
    assert (model.vocab_size, model.max_positions) == (129280, 1048576)


def test_ratio_lists_of_the_checkpoints() -> None:
    assert ModelSpec.load("v4_flash").compress_ratios == (0, 0, *[4, 128] * 20, 4, 0)
    assert ModelSpec.load("v4_flash_dspark").compress_ratios == (0, 0, *[4, 128] * 20, 4, 0, 0, 0)
    assert ModelSpec.load("v4_pro").compress_ratios == (128, 128, *[4, 128] * 29, 4, 0)
    assert ModelSpec.load("v4_pro_dspark").compress_ratios == (128, 128, *[4, 128] * 29, 4, 0, 0, 0)


def test_the_shipped_flash_says_what_the_public_checkpoint_says() -> None:
    shipped = ModelSpec.load("v4_flash")
    assert {key: shipped.raw[key] for key in PUBLIC_FLASH} == PUBLIC_FLASH
    assert ModelSpec.from_dict(PUBLIC_FLASH, name="v4_flash") == shipped


def test_a_checkpoints_config_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "deepseek_v4_flash.config.json"
    path.write_text(json.dumps({**PUBLIC_FLASH, "architectures": ["DeepseekV4ForCausalLM"], "unused": None}))
    model = ModelSpec.load(path)
    assert model.name == "deepseek_v4_flash"
    assert replace(model, name="v4_flash") == ModelSpec.load("v4_flash")
    assert ModelSpec.load(str(path)) == model


def test_a_folder_of_the_same_name_does_not_hide_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "v4_flash").mkdir()
    monkeypatch.chdir(tmp_path)
    assert ModelSpec.load("v4_flash") == FLASH


def test_an_unknown_model_lists_the_known_ones() -> None:
    with refused("v5", "v4_flash_dspark", "path of a JSON file"):
        ModelSpec.load("v5")


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "not valid JSON"), ("[1, 2]", "holds a list"), ("", "not valid JSON"), ('"text"', "holds a str")],
)
def test_malformed_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with refused(str(path), says):
        ModelSpec.load(path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with refused("cannot read", "missing.json", "No such file"):
        ModelSpec.load(tmp_path / "missing.json")
    (tmp_path / "folder.json").mkdir()
    with refused("cannot read", "folder.json", "directory"):
        ModelSpec.load(tmp_path / "folder.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with refused("not UTF-8 text"):
        ModelSpec.load(tmp_path / "binary.json")
    (tmp_path / "deep.json").write_text("[" * 100000)
    with refused("nested too deeply"):
        ModelSpec.load(tmp_path / "deep.json")


MODEL_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "index_head_dim",
    "index_topk",
    "sliding_window",
    "vocab_size",
    "max_position_embeddings",
)


@pytest.mark.parametrize("key", [*MODEL_KEYS, "compress_ratios"])
def test_a_missing_key_is_named(key: str) -> None:
    with refused("model m", f"{key} is missing"):
        ModelSpec.from_dict({k: v for k, v in PUBLIC_FLASH.items() if k != key}, name="m")


WRONG_INTEGERS = [0, -1, True, 4.0, 1.5, "4", None, [4], float("nan")]


@pytest.mark.parametrize("value", WRONG_INTEGERS, ids=repr)
@pytest.mark.parametrize("key", MODEL_KEYS)
def test_a_model_value_that_is_no_positive_integer_is_refused(key: str, value: object) -> None:
    with refused("model m", f"{key} = ", "an integer of at least 1 is needed"):
        ModelSpec.from_dict({**PUBLIC_FLASH, key: value}, name="m")


@pytest.mark.parametrize("value", [0, -5, True, 5.0, "5"], ids=repr)
def test_a_wrong_dspark_block_size_is_refused(value: object) -> None:
    with refused("dspark_block_size = ", "an integer of at least 1"):
        ModelSpec.from_dict({**PUBLIC_FLASH, "dspark_block_size": value})


@pytest.mark.parametrize("value", [2, 8, True, "1", None], ids=repr)
def test_more_than_one_key_value_head_is_refused(value: object) -> None:
    with refused("num_key_value_heads = ", "1 is needed"):
        ModelSpec.from_dict({**PUBLIC_FLASH, "num_key_value_heads": value})


@pytest.mark.parametrize(
    ("ratios", "bad"), [([0, 1, 2], r"\[1, 2\]"), ([4, 64, 0], r"\[64\]"), ([0, -4, 128], r"\[-4\]")]
)
def test_other_ratios_are_refused_with_the_reason(ratios: list[int], bad: str) -> None:
    with refused(f"compress_ratios holds {bad}", r"\[0, 4, 128\]", "V4.1"):
        ModelSpec.from_dict({**PUBLIC_FLASH, "num_hidden_layers": 3, "compress_ratios": ratios})


@pytest.mark.parametrize("value", ["0,4,128", None, 4, [0, 4.0], [0, "4"], [True], {"0": 4}], ids=repr)
def test_ratios_that_are_no_list_of_integers_are_refused(value: object) -> None:
    with refused("compress_ratios = ", "a list of integers is needed"):
        ModelSpec.from_dict({**PUBLIC_FLASH, "num_hidden_layers": 1, "compress_ratios": value})


def test_a_list_shorter_than_the_layers_is_refused() -> None:
    with refused("compress_ratios has 42 entries", "num_hidden_layers = 43"):
        ModelSpec.from_dict({**PUBLIC_FLASH, "compress_ratios": PUBLIC_FLASH["compress_ratios"][:42]})


def test_draft_stages_with_a_compressor_are_refused() -> None:
    with refused(r"compress_ratios ends in \[0, 4\]", "num_hidden_layers = 43", "ratio 0"):
        ModelSpec.from_dict({**PUBLIC_FLASH, "compress_ratios": [*PUBLIC_FLASH["compress_ratios"], 4]})


@pytest.mark.parametrize("rope", [63, 514])
def test_rotary_channels_must_fit_the_head(rope: int) -> None:
    with refused(f"qk_rope_head_dim = {rope}", "head_dim = 512"):
        ModelSpec.from_dict({**PUBLIC_FLASH, "qk_rope_head_dim": rope})


def test_a_model_built_by_hand_is_checked_like_one_from_a_file() -> None:
    for change in ({"num_layers": 5.0}, {"compress_ratios": [0, 4]}, {"vocab_size": "12"}, {"head_dim": 0}):
        with pytest.raises(ConfigError):
            replace(TINY, **change)
    with refused("list given", "dictionary"):
        ModelSpec.from_dict([1])  # type: ignore[arg-type]


# -- platforms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "npu", "page", "rows", "owner", "limits"),
    [
        ("a2", True, 128, ("bf16", "int8_fp16"), "swa_page", ("Ascend910B3", 40, 192)),
        ("a3", True, 128, ("bf16", "int8_fp16"), "swa_page", ("Ascend910_9382", 48, 192)),
        ("a5", True, 128, ("fp8_packed", "fp8_fp32"), "request", ("Ascend950PR_9589", 64, 248)),
        ("cpu", False, 256, ("fp32", "fp32"), "swa_page", (None, None, None)),
    ],
)
def test_platform_facts(name: str, npu: bool, page: int, rows: tuple[str, str], owner: str, limits: tuple) -> None:
    p = PlatformSpec.load(name)
    assert (p.name, p.npu, p.page_size, (p.kv_row, p.indexer_row), p.c4_state_owner) == (name, npu, page, rows, owner)
    assert (p.target, p.vector_cores, p.unified_buffer_kib) == limits
    assert {path.stem for path in (configs_dir() / "platforms").glob("*.json")} == {"a2", "a3", "a5", "cpu"}


def test_an_unknown_platform_lists_the_known_ones() -> None:
    with refused("platform 'a4'", "'a2', 'a3', 'a5', 'cpu'"):
        PlatformSpec.load("a4")


PLATFORM = {
    "name": "x",
    "npu": True,
    "page_size": 128,
    "kv_row": "bf16",
    "indexer_row": "int8_fp16",
    "c4_state_owner": "swa_page",
}


@pytest.mark.parametrize("key", sorted(PLATFORM))
def test_a_missing_platform_key_is_named(key: str) -> None:
    with refused(f"{key} is missing"):
        PlatformSpec.from_dict({k: v for k, v in PLATFORM.items() if k != key})


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("npu", "yes", "true or false"),
        ("npu", 1, "true or false"),
        ("page_size", 128.0, "an integer of at least 1"),
        ("page_size", "128", "an integer of at least 1"),
        ("page_size", 64, "multiple of 128"),
        ("kv_row", "fp16", "'bf16', 'fp8_packed', 'fp32', 'fp64'"),
        ("kv_row", None, "'bf16', 'fp8_packed', 'fp32', 'fp64'"),
        ("indexer_row", "bf16", "'int8_fp16', 'fp8_fp32', 'fp32', 'fp64'"),
        ("c4_state_owner", "page", "'swa_page', 'request'"),
        ("vector_cores", 0, "an integer of at least 1"),
        ("unified_buffer_kib", "192", "an integer of at least 1"),
    ],
)
def test_wrong_platform_values_are_refused(key: str, value: object, says: str) -> None:
    with refused("platform x", f"{key} = {value!r}", says):
        PlatformSpec.from_dict({**PLATFORM, key: value})


def test_an_unknown_platform_key_is_named() -> None:
    with refused("platform 'x'", "page_sise is not known", "page_size"):
        PlatformSpec.from_dict({**PLATFORM, "page_sise": 256})


# -- speculation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "width", "alloc", "speculative"),
    [
        (SpeculationSpec(), 1, 1, False),
        (SpeculationSpec("chain", 0), 1, 1, True),
        (SpeculationSpec("chain", 3), 4, 4, True),
        (SpeculationSpec("chain", 9), 10, 10, True),
        (SpeculationSpec("dspark", 5), 6, 6, True),
    ],
)
def test_widths_and_reserve(spec: SpeculationSpec, width: int, alloc: int, speculative: bool) -> None:
    assert (spec.verify_width, spec.alloc_len, spec.reserve) == (width, alloc, 2 * alloc)
    assert spec.speculative is speculative


def test_trees_are_refused_with_the_reason() -> None:
    with refused("topk = 4", "only 1", "absolute position", "share a state row"):
        SpeculationSpec("chain", 3, topk=4)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: SpeculationSpec("eagle", 3), ("speculation kind = 'eagle'", "'none', 'chain', 'dspark'")),
        (lambda: SpeculationSpec("none", 1), ("draft_tokens = 1", "without speculation", "0")),
        (lambda: SpeculationSpec("chain", -1), ("draft_tokens = -1", "at least 0")),
        (lambda: SpeculationSpec("chain", 3.0), ("draft_tokens = 3.0", "an integer")),
        (lambda: SpeculationSpec("chain", "3"), ("draft_tokens = '3'", "an integer")),
        (lambda: SpeculationSpec("chain", True), ("draft_tokens = True", "an integer")),
        (lambda: SpeculationSpec("dspark", None), ("draft_tokens = None", "an integer")),
        (lambda: SpeculationSpec("chain", 3, topk=0), ("topk = 0", "at least 1")),
        (lambda: SpeculationSpec("chain", 3, topk=True), ("topk = True", "an integer")),
        (lambda: SpeculationSpec("chain", 3, topk=1.0), ("topk = 1.0", "an integer")),
    ],
)
def test_wrong_speculation_is_refused(make, parts: tuple[str, ...]) -> None:
    with refused(*parts):
        make()


# -- rings and the legal width ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "rings", "pads"),
    [(SpeculationSpec(), (8, 128), (0, 0)), (SpeculationSpec("chain", 1), (16, 256), (10, 130))],
)
def test_rings_and_write_pads(spec: SpeculationSpec, rings: tuple[int, int], pads: tuple[int, int]) -> None:
    made = config(spec=spec)
    assert (made.ring(4), made.ring(128)) == rings
    assert (made.write_pad(4), made.write_pad(128)) == pads


@pytest.mark.parametrize("kind", ["chain", "dspark"])
@pytest.mark.parametrize("model", [FLASH, TINY, ModelSpec.load("v4_pro")], ids=lambda m: m.name)
def test_width_10_is_legal_and_11_is_refused(model: ModelSpec, kind: Any) -> None:
    assert config(model, spec=SpeculationSpec(kind, 9)).verify_width == 10
    with refused(
        "D = 11", r"draft_tokens = 10 \+ the root", "write pad 10", "C4 ring of 16", "at most draft_tokens = 9"
    ):
        config(model, spec=SpeculationSpec(kind, 10))


def test_without_c4_layers_the_c128_ring_sets_the_bound() -> None:
    model = replace(TINY, num_layers=2, compress_ratios=(0, 128))
    assert config(model, spec=SpeculationSpec("chain", 129)).verify_width == 130
    with refused("D = 131", "write pad 130", "C128 ring of 256", "draft_tokens = 129"):
        config(model, spec=SpeculationSpec("chain", 130))


def test_without_compressed_layers_any_width_is_legal() -> None:
    model = replace(TINY, num_layers=2, compress_ratios=(0, 0))
    assert config(model, spec=SpeculationSpec("chain", 500)).verify_width == 501


def test_a_width_check_that_is_off_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheConfig, "_check_width", lambda self: None)
    with pytest.raises(pytest.fail.Exception):
        test_width_10_is_legal_and_11_is_refused(FLASH, "chain")


# -- geometry ---------------------------------------------------------------------------------------------------------


def test_context_2048_with_reserve_8() -> None:
    made = config(context_len=2048)
    assert (made.reserve, made.width, made.sidecar_columns) == (8, 2176, 2)
    assert (made.page, made.c4_page) == (128, 32)


def expected_width(context: int, reserve: int, page: int) -> int:
    """ceil_page(context + reserve), counted up page by page."""
    width = 0
    while width < context + reserve:
        width += page
    return width


@settings(deadline=None)
@given(
    context=st.integers(1, 9000),
    drafts=st.integers(0, 9),
    page=st.sampled_from([128, 256, 384]),
    c128_page=st.sampled_from([16, 32, 64]),
)
def test_row_and_sidecar_hold_the_context_and_no_more(context: int, drafts: int, page: int, c128_page: int) -> None:
    made = config(spec=SpeculationSpec("chain", drafts), context_len=context, page_size=page, c128_page_size=c128_page)
    assert made.width == expected_width(context, 2 * (drafts + 1), page)
    tokens = 128 * c128_page
    assert made.sidecar_columns * tokens >= made.width > (made.sidecar_columns - 1) * tokens


def test_a_row_without_the_reserve_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheConfig, "reserve", property(lambda self: 0))
    with pytest.raises(AssertionError):
        test_context_2048_with_reserve_8()


def test_platform_defaults_and_overrides() -> None:
    assert (config().kv_row, config().indexer_row, config().page) == ("bf16", "int8_fp16", 128)
    made = config(kv_row="fp64", indexer_row="fp32", page_size=256)
    assert (made.kv_row, made.indexer_row, made.page, made.c4_page) == ("fp64", "fp32", 256, 64)
    assert config(platform=PlatformSpec.load("cpu")).page == 256


def test_a_context_that_does_not_fit_the_row() -> None:
    assert config(context_len=2048, row_width=2176).width == 2176
    assert config(context_len=2048, row_width=4096).sidecar_columns == 2
    with refused("context_len = 2048", "reserve 8", "2176", "row_width = 2048"):
        config(context_len=2048, row_width=2048)
    with refused("context_len = 192", "row of 256", "row_width = 200"):
        config(context_len=192, row_width=200)


def test_a_context_beyond_the_models_positions() -> None:
    assert config(context_len=1048576).width == 1048576 + 128
    with refused("context_len = 1048577", "1 to 1048576"):
        config(context_len=1048577)


@pytest.mark.parametrize("size", [3, 12, 24, 48, 17])
@pytest.mark.parametrize("platform", ["a2", "a3", "a5", "cpu"])
@pytest.mark.parametrize("emulated", [False, True])
def test_c128_page_size_is_a_power_of_two_everywhere(size: int, platform: str, emulated: bool) -> None:
    with refused(f"c128_page_size = {size}", "power of two"):
        config(platform=PlatformSpec.load(platform), c128_page_size=size, emulated_kernels=emulated)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_small_c128_pages_need_emulated_kernels_on_npu(size: int) -> None:
    for name in ("a2", "a3", "a5"):
        platform = PlatformSpec.load(name)
        with refused(f"c128_page_size = {size} on {name}", "multiple of 16"):
            config(platform=platform, c128_page_size=size)
        assert config(platform=platform, c128_page_size=size, emulated_kernels=True).c128_page_size == size
    assert config(platform=PlatformSpec.load("cpu"), c128_page_size=size).c128_page_size == size


def test_emulated_kernels_lift_nothing_else() -> None:
    for wrong in (
        {"page_size": 64},
        {"context_len": 0},
        {"online_c128": True},
        {"spec": SpeculationSpec("chain", 10)},
        {"context_len": 2048, "row_width": 2048},
    ):
        with pytest.raises(ConfigError):
            config(emulated_kernels=True, **wrong)


@pytest.mark.parametrize("platform", ["a2", "a3", "a5"])
def test_online_c128_is_refused_with_the_reason(platform: str) -> None:
    with refused(f"online_c128 on {platform}", "CUDA-only"):
        config(platform=PlatformSpec.load(platform), online_c128=True)


@pytest.mark.parametrize("page", [1, 64, 127, 192, 1000])
def test_pages_are_multiples_of_128(page: int) -> None:
    with refused(f"page_size = {page}", "multiple of 128"):
        config(page_size=page)


@pytest.mark.parametrize("value", [0, -128, True, 128.0, "128", [128]], ids=repr)
@pytest.mark.parametrize("name", ["page_size", "c128_page_size", "context_len", "request_rows", "row_width"])
def test_a_size_that_is_no_positive_integer_is_refused(name: str, value: object) -> None:
    with refused(f"{name} = ", "an integer of at least 1 is needed"):
        config(**{name: value})


@pytest.mark.parametrize("value", [1, 0, "false", None], ids=repr)
@pytest.mark.parametrize("name", ["emulated_kernels", "online_c128"])
def test_a_flag_that_is_no_bool_is_refused(name: str, value: object) -> None:
    with refused(f"{name} = {value!r}", "true or false"):
        config(**{name: value})


@pytest.mark.parametrize("value", ["fp16", "", 8, True], ids=repr)
@pytest.mark.parametrize("name", ["kv_row", "indexer_row"])
def test_an_unknown_row_format_is_refused(name: str, value: object) -> None:
    with refused(f"{name} = {value!r}", "one of", "fp64"):
        config(**{name: value})


@pytest.mark.parametrize(
    ("given_", "parts"),
    [
        (("tiny", A3, SpeculationSpec()), ("model = 'tiny'", "ModelSpec")),
        ((TINY, "a3", SpeculationSpec()), ("platform = 'a3'", "PlatformSpec")),
        ((TINY, A3, 3), ("speculation = 3", "SpeculationSpec")),
    ],
)
def test_names_in_place_of_objects_are_refused(given_: tuple, parts: tuple[str, ...]) -> None:
    with refused(*parts):
        CacheConfig(*given_)


def test_refusals_are_value_errors_of_the_package() -> None:
    with pytest.raises(ValueError, match="topk") as caught:
        SpeculationSpec("chain", 3, topk=2)
    assert isinstance(caught.value, Dsv4NpuError)


# -- mutations --------------------------------------------------------------------------------------------------------


def test_a_longer_list_of_ratios_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "SUPPORTED_RATIOS", (0, 1, 2, 4, 64, 128))
    with pytest.raises(pytest.fail.Exception):
        test_other_ratios_are_refused_with_the_reason([0, 1, 2], r"\[1, 2\]")


def test_loose_integers_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "require_integer", lambda value, name, low=1: None)
    for name in ("request_rows", "context_len"):
        with pytest.raises(pytest.fail.Exception):
            test_a_size_that_is_no_positive_integer_is_refused(name, -128)
    with pytest.raises(pytest.fail.Exception):
        test_a_model_value_that_is_no_positive_integer_is_refused("vocab_size", "4")


def test_loose_flags_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "require_flag", lambda value, name: None)
    with pytest.raises(pytest.fail.Exception):
        test_a_flag_that_is_no_bool_is_refused("emulated_kernels", "false")


def test_draft_stages_counted_from_the_checkpoints_number_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelSpec, "num_draft_stages", property(lambda self: self.raw["num_nextn_predict_layers"]))
    test_model_facts("v4_flash")
    with pytest.raises(AssertionError):
        test_model_facts("v4_flash_dspark")


def test_a_ring_that_ignores_speculation_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addressing, "ring_size", lambda ratio, speculative: {4: 8, 128: 128}[ratio])
    with pytest.raises(ConfigError):
        test_rings_and_write_pads(SpeculationSpec("chain", 1), (16, 256), (10, 130))
