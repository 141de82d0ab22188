"""Configurations: hostile ones raise one line, real ones pass, and only the trained part is selected."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matrix import examples
from tiny_llama import CONFIG_HINT, LLAMA, PARAMETERS, SHIPPED, write, written

from fsdp_advisor.errors import UnreadableConfig
from fsdp_advisor.model import catalog
from fsdp_advisor.model import recorders as module
from fsdp_advisor.model.config import checkpoint_dtype, json_depth_exceeds, parse_config, trained_part
from fsdp_advisor.model.quantization import IGNORED_NOTE
from fsdp_advisor.model.resolve import resolve

pytestmark = pytest.mark.usefixtures("home")


def _deep(levels: int) -> str:
    return '{"a": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"


BAD_CONFIGS = [
    (b"", "not valid JSON (line 1, column 1)", "check that the file is complete; " + CONFIG_HINT),
    (
        b'{"model_type": "llama", "hidden',
        "not valid JSON (line 1, column 25)",
        "check that the file is complete; " + CONFIG_HINT,
    ),
    (
        b'{"a": "' + b'\\"' * 100_000,
        "not valid JSON (line 1, column 7)",
        "check that the file is complete; " + CONFIG_HINT,
    ),
    (b"\xff\xfe{}", "not UTF-8 text (byte 0)", CONFIG_HINT),
    (b"{" + b" " * 2**22 + b"}", "larger than 4 MiB, so not a config.json", CONFIG_HINT),
    (_deep(33).encode(), "nested deeper than 32 levels", CONFIG_HINT),
    (b"[" * 500_000, "nested deeper than 32 levels", CONFIG_HINT),
    (b'{"a":' * 200_000, "nested deeper than 32 levels", CONFIG_HINT),
    (b"[]", "a list, not an object", CONFIG_HINT),
    (b"null", "null, not an object", CONFIG_HINT),
    (b"7", "a number, not an object", CONFIG_HINT),
    (b"{}", "the configuration has no model_type", CONFIG_HINT),
    ({"model_type": 7}, "the configuration has an invalid model_type", CONFIG_HINT),
    ({"model_type": "../x"}, "the configuration has an invalid model_type", CONFIG_HINT),
    (
        {"_class_name": "DiTTransformer2DModel", "sample_size": 32},
        "the configuration has no model_type",
        "it is of a model of diffusers: record that in Python with fsdp_advisor.record_module (examples/diffusion_transformer.py)",
    ),
    ({"model_type": None}, "the configuration has no model_type", CONFIG_HINT),
    ({"text_config": {"vocab_size": 9}}, "the configuration has no model_type", CONFIG_HINT),
    (LLAMA | {"architectures": [7]}, "architectures must be a list of names", CONFIG_HINT),
    (LLAMA | {"architectures": "Llama"}, "architectures must be a list of names", CONFIG_HINT),
    (LLAMA | {"architectures": True}, "architectures must be a list of names", CONFIG_HINT),
    (LLAMA | {"text_config": {"architectures": True}}, "architectures must be a list of names", CONFIG_HINT),
    (LLAMA | {"hidden_size": "64"}, 'hidden_size must be an integer, not "64"', CONFIG_HINT),
    (LLAMA | {"hidden_size": "6" * 99}, "hidden_size must be an integer, not a string", CONFIG_HINT),
    (LLAMA | {"hidden_size": [64]}, "hidden_size must be an integer, not a list", CONFIG_HINT),
    (LLAMA | {"hidden_size": {"a": 1}}, "hidden_size must be an integer, not an object", CONFIG_HINT),
    (LLAMA | {"hidden_size": 64.5}, "hidden_size must be an integer, not 64.5", CONFIG_HINT),
    (LLAMA | {"hidden_size": True}, "hidden_size must be an integer, not true", CONFIG_HINT),
    (LLAMA | {"hidden_size": 0}, "hidden_size is 0, not between 1 and 1000000", CONFIG_HINT),
    (LLAMA | {"num_hidden_layers": -1}, "num_hidden_layers is -1, not between 1 and 10000", CONFIG_HINT),
    (LLAMA | {"num_hidden_layers": 10001}, "num_hidden_layers is 10001, not between 1 and 10000", CONFIG_HINT),
    (LLAMA | {"vocab_size": 10**9}, "vocab_size is 1000000000, not between 1 and 100000000", CONFIG_HINT),
    (LLAMA | {"num_attention_heads": [4, -4]}, "num_attention_heads is -4, not between 1 and 100000", CONFIG_HINT),
    (LLAMA | {"num_local_experts": 100001}, "num_local_experts is 100001, not between 0 and 100000", CONFIG_HINT),
    (LLAMA | {"num_labels": 10**9}, "num_labels is 1000000000, more than 1000000", CONFIG_HINT),
    (LLAMA | {"n_ctx": 10**13}, "n_ctx is 10000000000000, more than 1000000000000", CONFIG_HINT),
    (LLAMA | {"rope_theta": -(10**5000)}, "rope_theta has more than 64 digits", CONFIG_HINT),
    (LLAMA | {"hidden_size": float("nan")}, "hidden_size must be an integer, not NaN", CONFIG_HINT),
    (
        LLAMA | {"num_hidden_layers": {"__float__": "Infinity"}},
        "num_hidden_layers must be an integer, not Infinity",
        CONFIG_HINT,
    ),
    (b'{"__float__": "Infinity"}', "a number, not an object", CONFIG_HINT),
    (LLAMA | {"a\n" + "b" * 99: [[10**64]]}, "'a\\n" + "b" * 38 + "' has more than 64 digits", CONFIG_HINT),
    ({"text_config": LLAMA | {"n_layer": 0}}, "text_config.n_layer is 0, not between 1 and 10000", CONFIG_HINT),
    (
        LLAMA | {"num_hidden_layers": 1024, "num_local_experts": 4096},
        "1024 layers x 4096 experts = 4194304, more than 500000",
        CONFIG_HINT,
    ),
]


def _bytes(config: object) -> bytes:
    if isinstance(config, bytes):
        return config
    limit = sys.get_int_max_str_digits() if hasattr(sys, "get_int_max_str_digits") else None
    if limit is not None:
        sys.set_int_max_str_digits(0)
    try:
        return json.dumps(config).encode()
    finally:
        if limit is not None:
            sys.set_int_max_str_digits(limit)


@pytest.mark.parametrize(("config", "message", "hint"), BAD_CONFIGS, ids=[m[:40] for _, m, _ in BAD_CONFIGS])
def test_bad_configuration_raises_before_torch_is_imported(
    home: Path, config: object, message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = home / "config.json"
    path.write_bytes(_bytes(config))
    monkeypatch.setattr(module, "build_recorder", lambda *_: pytest.fail("torch was imported"))
    began = time.perf_counter()
    with pytest.raises(UnreadableConfig) as caught:
        resolve(str(path))
    assert time.perf_counter() - began < 1
    assert (caught.value.message, caught.value.hint) == (f"{path}: {message}", hint)
    assert written(home) == []


MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 64, "num_heads": 4, "head_dim": 32,
    "state_size": 16, "n_groups": 1, "num_hidden_layers": 2, "vocab_size": 100, "expand": 2, "chunk_size": 16,
}  # fmt: skip


@pytest.mark.parametrize("limit", ["Infinity", '{"__float__": "Infinity"}', "1e999"])
def test_infinity_is_a_value(home: Path, limit: str) -> None:
    path = home / "config.json"
    path.write_text(json.dumps(MAMBA2)[:-1] + f', "time_step_limit": [0.0, {limit}]}}')
    assert parse_config(path.read_bytes(), "x")["time_step_limit"] == [0.0, float("inf")]
    assert resolve(str(path)).parameters == resolve(str(write(home / "plain.json", MAMBA2))).parameters


def test_configuration_with_infinity_is_found_in_the_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(home / "config.json", LLAMA | {"time_step_limit": [0.0, float("inf")], "unused": float("nan")})
    found = resolve(str(path))
    found.tape(SHIPPED)
    monkeypatch.setattr(module, "build_recorder", lambda *_: pytest.fail("recorded again"))
    assert resolve(str(path)).parameters == found.parameters


@pytest.mark.parametrize(
    "values",
    [
        {"num_local_experts": 8192, "num_hidden_layers": 61},
        {"num_hidden_layers": 2000},
        {"model_max_length": int(1e30)},
        {"rope_theta": 10**13},
        {"id2label": {str(i): "a name of forty characters for a class" for i in range(21841)}},
    ],
    ids=lambda values: next(iter(values)),
)
def test_large_real_values_pass(values: dict[str, object]) -> None:
    assert trained_part(parse_config(json.dumps(LLAMA | values).encode(), "x"), "x")[0] == LLAMA | values


def test_text_part_of_a_model_that_needs_images_is_estimated(home: Path) -> None:
    text = {k: v for k, v in LLAMA.items() if k != "architectures"}
    outer = {"model_type": "blip-2", "vision_config": {}, "text_config": text}
    found = resolve(str(write(home / "blip.json", outer)))
    assert found.parameters == PARAMETERS
    assert found.notes == ("only the text part (llama) of a multimodal model is estimated",)


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config", "thinker_config"])
def test_language_model_is_found_under_every_name(key: str) -> None:
    inner = {"text_config": LLAMA} if key == "thinker_config" else LLAMA
    config, notes = trained_part({"model_type": "other", key: inner}, "x")
    assert config == LLAMA
    assert notes == ("only the text part (llama) of a multimodal model is estimated",)


@pytest.mark.parametrize("outer", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_thinker_of_an_omni_model_is_trained_with_its_towers(outer: str) -> None:
    thinker = {"text_config": {"hidden_size": 64}, "vision_config": {"depth": 2}, "audio_config": {"d_model": 64}}
    whole = {"model_type": outer, "thinker_config": thinker, "talker_config": {"hidden_size": 8}}
    config, notes = trained_part(whole, "x")
    assert config == {"model_type": f"{outer}_thinker", **thinker}
    assert notes[0].startswith("only the thinker is estimated")


def test_experts_of_the_language_model_are_bounded() -> None:
    outer = {"model_type": "llava", "text_config": LLAMA | {"num_hidden_layers": 1024, "num_local_experts": 4096}}
    with pytest.raises(UnreadableConfig, match="1024 layers x 4096 experts"):
        trained_part(outer, "x")


def test_text_part_inherits_model_type_and_tied_embeddings() -> None:
    outer = {"model_type": "gemma9", "tie_word_embeddings": True, "text_config": {"hidden_size": 64}}
    config, _ = trained_part(outer, "x")
    assert config == {"model_type": "gemma9_text", "tie_word_embeddings": True, "hidden_size": 64}


def test_quantization_is_ignored_with_a_note(home: Path) -> None:
    found = resolve(str(write(home / "q.json", LLAMA | {"quantization_config": {"quant_method": "fp8"}})))
    assert found.parameters == PARAMETERS
    assert found.notes == (IGNORED_NOTE,)


def test_configurations_of_the_catalog_pass_the_checks() -> None:
    import yaml

    text = (Path(catalog.__file__).parent / "architectures.yaml").read_text(encoding="utf-8")
    for row in yaml.load(text, Loader=yaml.CSafeLoader):
        trained_part(parse_config(json.dumps(row["config"]).encode(), row["id"]), row["id"])


KEYS = st.sampled_from([*LLAMA, "text_config", "quantization_config", "num_experts", "auto_map", "n_layer"]) | st.text(
    max_size=8
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=8) | st.just("llama"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=30,
)


@given(JSON.map(json.dumps), st.integers(0, 6))
def test_json_depth_equals_the_depth_of_the_parsed_value(text: str, limit: int) -> None:
    def depth(value: object) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return (1 + max(map(depth, inner), default=0)) if isinstance(value, (dict, list)) else 0

    assert json_depth_exceeds(text.encode(), limit) == (depth(json.loads(text)) > limit)


@settings(max_examples=examples(400), deadline=None)
@given(st.dictionaries(KEYS, JSON, max_size=8) | JSON)
@example({"model_type": [], "text_config": {"model_type": "llama"}})
def test_any_json_is_a_configuration_or_raises(value: object) -> None:
    try:
        config, _ = trained_part(parse_config(json.dumps(value).encode(), "x"), "x")
    except UnreadableConfig as error:
        assert error.hint
        assert "\n" not in error.message
    else:
        assert isinstance(config["model_type"], str)


@settings(max_examples=examples(400), deadline=None)
@given(st.binary(max_size=64) | st.text(alphabet='{}[]":,\\0e-ntf \n', max_size=64).map(str.encode))
def test_any_bytes_are_a_configuration_or_raise(data: bytes) -> None:
    try:
        assert isinstance(parse_config(data, "x"), dict)
    except UnreadableConfig as error:
        assert "\n" not in error.message


@pytest.mark.parametrize(
    ("stated", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}, None),
        ({"dtype": "float8_e4m3fn"}, None),
        ({}, None),
    ],
)
def test_dtype_of_the_checkpoint_is_read_from_the_configuration(stated: dict[str, object], dtype: str | None) -> None:
    assert checkpoint_dtype(stated) == dtype
