"""LoRA without names of modules, for models of which PEFT has no default."""

from __future__ import annotations

import pytest

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import Adaptation
from fsdp_advisor.model import resolved
from fsdp_advisor.model.adapter_targets import WITH_DEFAULTS
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
