"""Windows, causality and heads of attention, compared with the classes of transformers."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from fsdp_advisor import estimate
from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.model.attention import has_window, head_dim, is_causal, mixes_head_widths
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.resolve import resolve

LAYERS = 12
OTHER_ORDERS = {
    "deepseek_v4", "dots3_note_text", "flint", "lfm3", "mimo_v2_flash", "minimax", "neomme", "qwen2_moe", "unlimited_ocr_text", "zaya",
}  # fmt: skip
"""Types whose layers have other kinds or no regular order. Without `layer_types`, all their layers count as having a window."""


def profile_of(model: str) -> Profile:
    profile = resolve(model).profile
    assert profile is not None
    return profile


def test_windows_are_those_of_transformers_configurations() -> None:
    """Of each class with a sliding window, if a configuration leaves `layer_types` open."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    models, different = Path(auto.__file__).parents[1], set()
    for model_type in auto.CONFIG_MAPPING_NAMES:
        folder = models / auto.model_type_to_module_name(model_type)
        if not any("sliding_window" in file.read_text() for file in folder.glob("configuration_*.py")):
            continue
        kind = auto.CONFIG_MAPPING[model_type]
        if kind.sub_configs or not {"sliding_window", "num_hidden_layers"} <= {field.name for field in fields(kind)}:
            continue
        given = {"num_hidden_layers": LAYERS, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 5}
        config = kind(**given).to_dict()
        kinds = config.pop("layer_types", None) or ["sliding_attention"] * LAYERS
        expected = [each == "sliding_attention" for each in kinds]
        if [has_window(config, layer) for layer in range(LAYERS)] != expected:
            different.add(model_type)
    assert different == OTHER_ORDERS


@pytest.mark.parametrize(
    ("model", "windows"),
    [
        ("allenai/Olmo-3-1025-7B", "sssfsssf"),
        ("CohereLabs/c4ai-command-r7b-12-2024", "sssfsssf"),
        ("google/gemma-2-2b", "sfsfsfsf"),
        ("google/gemma-3-1b-pt", "sssssfss"),
        ("mistralai/Mistral-7B-v0.1", "ssssssss"),
    ],
)
def test_windows_of_catalogued_models(model: str, windows: str) -> None:
    config = profile_of(model).text_config
    assert "".join("s" if has_window(config, layer) else "f" for layer in range(8)) == windows


def test_classifiers_are_causal_as_their_decoders() -> None:
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    from transformers import CONFIG_MAPPING

    llama = profile_of("meta-llama/Llama-3.2-1B")
    types = {*auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, *auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES}
    decoders = {
        *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "mistral4",
    }  # the latter has a causal class among those of images
    both_ways = {*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "xlnet"}  # XLNet reads tokens in any order
    for kind in types - {"qwen3_asr"}:  # a decoder of sound, which its configuration calls an encoder-decoder
        encodes = kind in both_ways or kind not in decoders or CONFIG_MAPPING[kind]().is_encoder_decoder
        for task in ("sequence-classification", "token-classification"):
            assert is_causal(replace(llama, task=task, config={"model_type": kind})) == (not encodes), kind


def test_embedding_models_see_tokens_on_both_sides() -> None:
    assert not is_causal(profile_of("google/embeddinggemma-300m")) and is_causal(profile_of("google/gemma-3-270m"))


def test_heads_of_latent_attention_are_those_of_its_queries() -> None:
    assert head_dim(profile_of("deepseek-ai/DeepSeek-V3")) == 192


@pytest.mark.parametrize(
    ("model", "mixes"),
    [
        ("deepseek-ai/DeepSeek-V3", True),
        ("sarvamai/sarvam-105b", True),  # its configuration leaves the width of values open
        ("skt/A.X-K1", True),  # and this one all widths
        ("zai-org/GLM-5", False),  # values are as wide as queries
        ("meta-llama/Llama-3.1-8B", False),
    ],
)
def test_latent_attention_may_mix_widths_of_heads(model: str, mixes: bool) -> None:
    assert mixes_head_widths(profile_of(model)) == mixes


@pytest.mark.parametrize("value_width", [64, 128])
def test_narrower_and_wider_values_are_of_another_width(value_width: int) -> None:
    """sdpa's flash kernel runs neither."""
    config = {"model_type": "axk2", "v_head_dim": value_width}
    assert mixes_head_widths(replace(profile_of("gpt2"), config=config))


def test_widths_of_latent_heads_are_the_defaults_of_transformers() -> None:
    """Of each class, if a configuration leaves them open."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    model, latent = profile_of("gpt2"), set()
    for model_type in auto.CONFIG_MAPPING_NAMES:
        kind = auto.CONFIG_MAPPING[model_type]
        if "qk_nope_head_dim" not in {field.name for field in fields(kind)}:
            continue
        latent.add(model_type)
        full = kind().to_dict()
        width = full["qk_nope_head_dim"] + full["qk_rope_head_dim"]
        profile = replace(model, config={"model_type": model_type})
        assert head_dim(profile) == width, model_type
        sizes = {"hidden_size": full["hidden_size"], "num_attention_heads": full["num_attention_heads"]}
        profile = replace(model, config={"model_type": model_type, **sizes})
        assert mixes_head_widths(profile) == (width != full["v_head_dim"]), model_type
    assert latent >= {"deepseek_v3", "kimi_linear", "minicpm3"}


def test_heads_too_wide_for_flash_attention_2_are_refused() -> None:
    with pytest.raises(
        AdvisorError, match="heads of the model have 512 dimensions, and FlashAttention 2 runs"
    ) as refused:
        estimate(model="google/gemma-4-E2B", gpus=1, gpu="H200", strategy="ddp", attention="flash_attention_2")
    assert "--attention sdpa" in refused.value.hint
