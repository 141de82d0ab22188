"""Multimodal configurations: the whole model is counted, and its language model is recorded on text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from tiny_llama import write

pytest.importorskip("torch")

from fsdp_advisor import estimate
from fsdp_advisor.job.adaptation import CONFIG_KEY, Adaptation
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.multimodal import TRAINED_WHOLE
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.recording import Recorder, TransformersSource, source_of
from fsdp_advisor.step_figures import peak_of_step
from fsdp_advisor.tape_keys import tape_key_of
from fsdp_advisor.validation.simulate import simulate

pytestmark = pytest.mark.usefixtures("home")

TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 1000,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": TEXT, "vision_config": VISION},
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model"},
    },
    "mistral3": {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": VISION | {"model_type": "pixtral"}},
    "qwen3_vl": {"text_config": TEXT, "vision_config": QWEN | {"deepstack_visual_indexes": [0]}},
}
PLAN = Plan(
    strategy="zero3", backend="fsdp2", mesh=Mesh(dp_shard=2), precision="bf16-mixed", micro_batch_size=2, seq_len=64
)


@pytest.mark.parametrize("model_type", MODELS)
def test_all_parameters_of_a_multimodal_model_are_counted(home: Path, model_type: str) -> None:
    config = {"model_type": model_type, **MODELS[model_type]}
    found = resolve(str(write(home / "config.json", config)))
    whole = TransformersSource(config, name="x").build(TransformersSource.inventory_dtype)
    assert found.parameters == sum(p.numel() for p in whole.parameters())
    assert any("visi" in name or "visual" in name for name, _ in whole.named_parameters())
    assert found.profile is not None and found.profile.task in ("causal-lm", "image-text-to-text")
    (note,) = found.notes
    assert note.startswith(f"{model_type} is estimated for training on text only")


@pytest.mark.parametrize(
    ("model_type", "freeze"),
    taken(
        [("llava", ("*vision_tower*", "*multi_modal_projector*")), ("qwen3_vl", ())],
        [("llava", ()), ("qwen3_vl", ("*visual*",))],
    ),
    ids=taken(["llava frozen", "qwen3_vl"], ["llava", "qwen3_vl frozen"]),
)
def test_step_on_text_equals_pytorchs_whose_vision_tower_gets_no_gradient(
    model_type: str, freeze: tuple[str, ...]
) -> None:
    frozen = Adaptation(freeze=freeze)
    config = {"model_type": model_type, **MODELS[model_type], CONFIG_KEY: frozen.as_dict()}
    recorder = Recorder(source_of(config, name=model_type))
    tape = recorder.tape(replace(tape_key_of(PLAN, recorder.profile), at=(PLAN.micro_batch_size, PLAN.seq_len)))
    assert peak_of_step(recorder.profile, tape, PLAN).phase_peaks == simulate(recorder.source, PLAN).phase_peaks


def test_kept_layers_keep_their_kinds_if_the_vision_tower_is_as_deep() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    text = TEXT | {"num_hidden_layers": 4, "layer_types": kinds, "full_attention_interval": 4}
    source = TransformersSource(
        {"model_type": "qwen3_5", "text_config": text, "vision_config": QWEN | {"depth": 4}},
        name="x",
        task="image-text-to-text",
    )
    model = source.build(TransformersSource.inventory_dtype)
    vision, language = (stack.path for stack in source.stacks(model))
    source.keep_layers(model, {vision: [0], language: [0, 3]})
    assert model.get_submodule(language.rpartition(".")[0]).config.layer_types == [kinds[0], kinds[3]]


@in_turn(0, of=2)
@pytest.mark.parametrize("backend", ["fsdp1", "fsdp2", "ddp", "deepspeed"])
def test_every_engine_trains_a_multimodal_model(home: Path, backend: str) -> None:
    path = write(home / "config.json", {"model_type": "llava", **MODELS["llava"]})
    report = estimate(model=str(path), gpus=4, gpu="H100", backend=backend, seq_len=64)
    assert report.estimates
    assert all(row["needed_bytes"] and row["tokens_per_second_per_gpu"] for row in report.as_dict()["estimates"])


def test_models_that_train_whole_are_image_text_models_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    assert set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) >= TRAINED_WHOLE
