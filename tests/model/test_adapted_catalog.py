"""What the shipped recordings of usual adapters hold, and that they answer without torch."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
from matrix import in_turn, of_today

from fsdp_advisor import estimate, recommend
from fsdp_advisor.engines.registry import not_modelled
from fsdp_advisor.job.adaptation import CONFIG_KEY, adaptation_of
from fsdp_advisor.job.choices import Strategy
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.model import cache, catalog
from fsdp_advisor.model.adapted_catalog import PATH, adapted_profile, member, members, profiles_of
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.store import load
from fsdp_advisor.recording.adapted_catalog import MODELS
from fsdp_advisor.step_figures import peak_of_step
from fsdp_advisor.tape_keys import tape_key_of

SMALL = "Qwen/Qwen2.5-0.5B"
EAGER = "google/gemma-2-9b"
"""It has no sdpa attention, and the archive no tapes of eager attention."""


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "transformers", "peft", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(cache, "installed_versions", lambda: None)


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("gpus", "options"),
    [
        (1, {"load_in_4bit": True}),
        (4, {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}),
        (8, {"framework": "trainer", "micro_batch_size": 2}),
        (8, {"framework": "trl", "activation_checkpointing": "full"}),
        (2, {"framework": "trl", "load_in_4bit": True, "activation_checkpointing": "full"}),
        (1, {"dtype": "bfloat16", "activation_checkpointing": "full"}),
        (2, {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16", "dtype": "bfloat16"}),
        (4, {"use_dora": True}),
        (8, {"lora_target_modules": "all-linear"}),
        (1, {"lora_target_modules": "all-linear", "load_in_4bit": True}),
        (8, {"lora_target_modules": "all-linear", "load_in_4bit": True, "framework": "axolotl"}),
        (8, {"lora_target_modules": "all-linear", "load_in_4bit": True, "framework": "llamafactory"}),
    ],
)
def test_usual_adapters_are_answered_without_torch(gpus: int, options: dict[str, Any]) -> None:
    report = estimate(model="meta-llama/Llama-3.1-8B", gpus=gpus, gpu="H100", use_peft=True, **options)
    assert report.adapters is not None and report.adapters.parameters > 0
    for row in report.estimates:
        assert row.needed_bytes is not None and row.peak_tensor_bytes is not None and row.step is not None


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("strategy", "use_dora", "lacks"),
    [("zero3", True, True), ("zero2", True, False), ("zero3", False, False)],  # the last one's tape is shipped
)
def test_a_row_says_that_its_tape_lacks_what_zero3_saves(strategy: Strategy, use_dora: bool, lacks: bool) -> None:
    (row,) = estimate(
        model="Qwen/Qwen2.5-7B", gpus=8, gpu="H100", use_peft=True, use_dora=use_dora, strategy=strategy,
        backend="deepspeed",
    ).estimates  # fmt: skip
    assert any("inputs of linear layers with frozen weights" in note for note in row.not_modelled) == lacks


@pytest.mark.parametrize("bits", [4, 8])
def test_only_a_base_in_8_bits_says_that_outlier_columns_are_not_counted(bits: int) -> None:
    keywords = {"model": SMALL, "gpus": 1, "use_peft": True, f"load_in_{bits}bit": True, "strategy": "ddp"}
    request = make_request(keywords, EstimateRequest)
    (plan,) = plans(request, seq_len=1000)
    profile = resolve(SMALL).profile
    assert profile is not None
    adapted = replace(profile, config={**profile.config, CONFIG_KEY: adaptation_of(request).as_dict()})
    assert any("outlier columns" in note for note in not_modelled(adapted, plan)) == (bits == 8)


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("checkpointing", ["full", "reentrant"])
def test_only_a_row_with_reentrant_checkpoints_says_that_its_tape_lacks_them(checkpointing: str) -> None:
    """accelerate's own wrappers with a frozen embedding are another step than `full`, but not a reentrant one."""
    report = estimate(
        model="meta-llama/Llama-3.1-8B", gpus=8, gpu="H100", use_peft=True, strategy="zero3", framework="accelerate",
        activation_checkpointing=checkpointing,
    )  # fmt: skip
    (row,) = report.estimates
    assert row.step is not None
    assert any("reentrant" in note for note in row.not_modelled) == (checkpointing == "reentrant")


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("model", [model for model in MODELS if model != EAGER])
def test_lora_on_one_gpu_is_answered_without_torch(model: str) -> None:
    (row,) = estimate(model=model, gpus=1, gpu="A100", use_peft=True, strategy="ddp").estimates
    assert row.needed_bytes is not None


@pytest.mark.usefixtures("without_torch")
@in_turn(1, of=5)
def test_a_search_of_methods_needs_no_torch() -> None:
    found = recommend(model="meta-llama/Llama-3.1-8B", gpus=2, gpu="rtx4090", method="any").recommendation
    assert [method.name for method in found.methods if method.advice] == ["full fine-tuning", "LoRA", "QLoRA"]
    assert found.winner is not None


@pytest.mark.usefixtures("without_torch")
def test_a_search_with_adapters_on_all_linear_layers_lacks_no_tape() -> None:
    found = recommend(
        model="Qwen/Qwen2.5-7B", gpus=2, gpu="H100", use_peft=True, lora_target_modules="all-linear", strategy="zero3",
        backend="deepspeed", offload="none",
    ).recommendation  # fmt: skip
    assert found.winner is not None and not found.rejected


@in_turn(0, of=2)
def test_full_fine_tuning_is_the_same_whether_the_job_has_adapters_or_not() -> None:
    job: dict[str, Any] = {"model": "meta-llama/Llama-3.1-8B", "gpus": 8, "gpu": "H100", "method": "any"}
    job |= {
        "strategy": "zero3",
        "backend": "fsdp2",
        "micro_batch_size": 1,
        "activation_checkpointing": "full",
        "offload": "none",
    }
    (full, *_), (same, *_) = (recommend(**job, use_peft=peft).recommendation.methods for peft in (False, True))
    assert full.advice is not None and same.advice is not None
    assert full.advice.recommendation.as_dict() == same.advice.recommendation.as_dict()


@pytest.mark.usefixtures("without_torch")
def test_other_adapters_name_what_to_install() -> None:
    with pytest.raises(Exception, match="recording it needs torch and transformers") as found:
        estimate(model="meta-llama/Llama-3.1-8B", gpu="H100", use_peft=True, lora_r=7)
    assert "adapters" in getattr(found.value, "hint", "")


def test_every_shipped_profile_is_of_a_catalog_model() -> None:
    shipped = set(members())
    assert len(shipped) >= 20 and shipped <= {member(entry.id) for entry in catalog.entries()}
    assert PATH.stat().st_size + catalog.PATH.stat().st_size <= 12e6


@in_turn(0, of=2)
@pytest.mark.slow
def test_shipped_profiles_equal_those_that_are_built_now() -> None:
    """Otherwise a step that the archive lacks, such as one with images, cannot be recorded."""
    from fsdp_advisor.model.recorders import build_recorder

    names = [(model, name) for model in members() for name in profiles_of(model)]
    vision = [name for name in names if "-VL-" in name[0]]
    for model, name in [*of_today(vision, 3), *of_today(names, 60)]:
        shipped = load(profiles_of(model)[name])
        built = build_recorder(json.dumps(shipped.config, sort_keys=True), shipped.name, shipped.task).profile
        assert (built.root, built.stacks) == (shipped.root, shipped.stacks), (model, name)


@in_turn(1, of=2)
@pytest.mark.slow
def test_shipped_tapes_predict_as_new_recordings() -> None:
    from fsdp_advisor.model.recorders import build_recorder

    request = make_request(
        {"model": SMALL, "gpus": 8, "use_peft": True, "strategy": "zero3", "activation_checkpointing": "full"},
        EstimateRequest,
    )
    shipped = adapted_profile(SMALL, adaptation_of(request))
    assert shipped is not None
    recorder = build_recorder(json.dumps(shipped.config, sort_keys=True), SMALL, shipped.task)
    assert (recorder.profile.root, recorder.profile.stacks) == (shipped.root, shipped.stacks)
    (plan,) = plans(request, seq_len=1000)
    key = tape_key_of(plan, shipped)
    assert peak_of_step(shipped, shipped.tapes[key.name], plan) == peak_of_step(shipped, recorder.tape(key), plan)
