"""Configurations of models of the catalog are recognized, so that they need no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn

from fsdp_advisor import estimate, recommend
from fsdp_advisor.errors import MissingExtra
from fsdp_advisor.model import cache, catalog
from fsdp_advisor.model.same_shapes import entry_of

PUBLISHED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
    "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
"""The config.json of Llama 3.1 8B Instruct."""
CLASSES = {
    "causal-lm": "XForCausalLM", "masked-lm": "XForMaskedLM", "image-classification": "XForImageClassification",
}  # fmt: skip


def test_published_configuration_is_the_catalogs_model() -> None:
    entry = entry_of(PUBLISHED)
    assert entry is not None and entry.id == "meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 33},
        {"vocab_size": 128258},
        {"num_key_value_heads": 32},
        {"tie_word_embeddings": True},
        {"attention_dropout": 0.1},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
        {"head_dim": 64},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"a_key_that_is_not_known": 1},
        {"model_type": "mistral"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_configuration_with_another_value_matches_no_model(change: dict[str, Any]) -> None:
    assert entry_of(PUBLISHED | change) is None


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 128},
        {"rope_theta": 1e6},
        {"rms_norm_eps": 1e-6},
        {"pad_token_id": 0},
        {"dtype": "float32"},
        {"hidden_act": "silu"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_configuration_with_the_same_shapes_is(change: dict[str, Any]) -> None:
    entry = entry_of(PUBLISHED | change)
    assert entry is not None and entry.id == "meta-llama/Llama-3.1-8B"


def test_values_left_out_are_the_defaults_of_the_class() -> None:
    usual = ("attention_bias", "attention_dropout", "hidden_act", "mlp_bias", "tie_word_embeddings")
    entry = entry_of({key: value for key, value in PUBLISHED.items() if key not in usual})
    assert entry is not None and entry.id == "meta-llama/Llama-3.1-8B"
    assert entry_of({key: value for key, value in PUBLISHED.items() if key != "num_key_value_heads"}) is None


@in_turn(0, of=2)
def test_every_configuration_of_the_catalog_is_one_of_its_models() -> None:
    configs = catalog.configurations()["configs"]
    assert list(configs) == [entry.id for entry in catalog.entries()]
    for entry in catalog.entries():
        found = entry_of({**configs[entry.id], "architectures": [CLASSES.get(entry.task, "XForConditionalGeneration")]})
        assert found is not None and found.parameters == entry.parameters, entry.id


def test_published_configuration_is_answered_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_ADVISOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "installed_versions", lambda: None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED))
    job: dict[str, Any] = {"gpus": 8, "gpu": "H100", "strategy": "zero3", "nnodes": 1}
    ours, named = estimate(model=str(path), **job), estimate(model="meta-llama/Llama-3.1-8B", **job)
    assert ours.model_source == "config"
    assert any("has the shapes of meta-llama/Llama-3.1-8B" in note for note in ours.notes)
    assert [row.as_dict() for row in ours.estimates] == [row.as_dict() for row in named.estimates]


@pytest.mark.parametrize(("dtype", "copies"), [("bfloat16", 0), ("float32", 8)])
def test_weights_in_the_dtype_of_the_file_take_no_memory_of_the_host(tmp_path: Path, dtype: str, copies: int) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**PUBLISHED, "torch_dtype": dtype}))
    (row,) = estimate(model=str(path), gpus=8, gpu="H100", strategy="ddp", precision="bf16").estimates
    assert row.job_peaks is not None
    ways = {method.way: method.host_bytes_per_node for method in row.job_peaks.load_methods}
    assert ways["every_rank"] == copies * 2 * 8_030_261_248


def test_model_without_tapes_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_ADVISOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "installed_versions", lambda: None)
    report = estimate(model="NX-AI/xLSTM-7b", gpus=8, gpu="512GiB", strategy="all", nnodes=1)
    assert report.parameters == 6_865_424_896
    assert any("install torch and transformers" in note for note in report.notes)
    for row in report.estimates:
        assert row.fits is None and row.peak_tensor_bytes is None and row.states["parameters"] >= 0
        assert "recording it needs torch" in row.not_modelled[0]


@pytest.mark.parametrize("options", [{"loss": "liger"}, {"loss": "liger", "find": "batch"}], ids=["plan", "sweep"])
def test_a_recommendation_without_recordings_asks_for_torch_instead_of_saying_that_nothing_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setenv("FSDP_ADVISOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "installed_versions", lambda: None)
    with pytest.raises(MissingExtra, match="recording it needs torch") as error:
        recommend(model="Qwen/Qwen3-8B", gpus=8, gpu="H100", **options)
    assert "pip install" in str(error.value.hint)


@pytest.mark.parametrize(
    "model",
    ["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "ibm-granite/granite-4.0-h-small", "tiiuae/Falcon-H1-7B-Base"],
)
def test_limits_of_time_steps_in_the_files_of_mamba_2_hybrids_change_no_shape(model: str) -> None:
    """Files of the hub have the limits as JSON has no number for them: `[0.0, Infinity]`."""
    entry = catalog.find(model)
    assert entry is not None
    config = catalog.configurations()["configs"][model]
    published = {**config, "time_step_limit": [0.0, float("inf")], "time_step_floor": 1e-4, "num_logits_to_keep": 1}
    assert entry_of(published) == entry
    assert entry_of({**published, "vocab_size": 7}) is None
