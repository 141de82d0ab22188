"""LoRA without names of modules, for models of which PEFT has no default."""

from __future__ import annotations

import pytest

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import Adaptation
from fsdp_advisor.model import resolved
from fsdp_advisor.model.adapter_targets import WITH_DEFAULTS, absent_targets
from fsdp_advisor.model.resolve import resolve

ADAPTERS = Adaptation(peft={"peft_type": "LORA", "r": 16})


@pytest.mark.parametrize(
    ("model", "model_type", "modules"),
    [
        ("openai/gpt-oss-20b", "gpt_oss", "q_proj, k_proj, v_proj, o_proj"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_5_vl", "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
    ],
)
def test_adapters_without_targets_are_refused_before_anything_is_recorded(
    model: str, model_type: str, modules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(resolved, "recorder_for")
    with pytest.raises(UsageError) as refused:
        resolve(model).adapted(ADAPTERS)
    assert str(refused.value.message) == (
        "--lora-target-modules (in a file: target_modules) has to name the modules that get adapters: PEFT has no default"
        f" for {model}, of type {model_type}"
    )
    assert refused.value.hint == (
        f"--lora-target-modules all-linear (all linear layers but the head), or some of {modules}"
    )


def test_the_model_types_with_default_targets_are_those_of_peft() -> None:
    constants = pytest.importorskip("peft.utils.constants")
    assert set(constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING) == WITH_DEFAULTS


@pytest.mark.parametrize(
    ("settings", "notes"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, ()),
        ({"target_modules": ["layers.0.self_attn.q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}, ()),
        ({"target_modules": "all-linear"}, ()),
        (
            {"target_modules": ["q_proj", "o_prj"]},
            ("{} has no module o_prj, which target_modules names (did you mean o_proj?): PEFT leaves it out",),
        ),
        (
            {"target_modules": ["q_proj", "query_key_value"], "modules_to_save": ["lm_hed"]},
            (
                "{} has no module query_key_value, which target_modules names: PEFT leaves it out",
                "{} has no module lm_hed, which modules_to_save names (did you mean lm_head?): PEFT leaves it out",
            ),
        ),
    ],
)
def test_names_of_modules_that_the_model_lacks_are_noted(settings: dict[str, object], notes: tuple[str, ...]) -> None:
    profile = resolve("meta-llama/Llama-3.1-8B").profile
    assert profile is not None
    found = absent_targets(Adaptation(peft={"peft_type": "LORA", **settings}), profile)
    assert found == tuple(note.format(profile.name) for note in notes)
