"""Every LLaMA-Factory export agrees with its classes of arguments. LLaMA-Factory itself is not installed.

Source: LLaMA-Factory 0.9.5 (its wheel), hparams/finetuning_args.py (FinetuningArguments), model_args.py (ModelArguments,
QuantizationArguments), data_args.py (DataArguments), extras/constants.py (AttentionFunction, QuantizationMethod). The other keys
are those of transformers' TrainingArguments.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import yaml
from export_jobs import job, jobs, plan
from transformers import TrainingArguments

from fsdp_advisor.errors import UsageError
from fsdp_advisor.export import export
from fsdp_advisor.job.adaptation import Adaptation

OWN: dict[str, tuple[type, ...]] = {
    "model_name_or_path": (str,),
    "flash_attn": (str,),
    "disable_gradient_checkpointing": (bool,),
    "use_reentrant_gc": (bool,),
    "upcast_layernorm": (bool,),
    "quantization_method": (str,),
    "quantization_bit": (int,),
    "quantization_type": (str,),
    "double_quantization": (bool,),
    "stage": (str,),
    "pure_bf16": (bool,),
    "finetuning_type": (str,),
    "lora_rank": (int,),
    "lora_alpha": (int,),
    "lora_dropout": (int, float),
    "lora_target": (str,),
    "additional_target": (str,),
    "use_dora": (bool,),
    "use_rslora": (bool,),
    "dataset": (str,),
    "template": (str,),
    "cutoff_len": (int,),
    "packing": (bool,),
}
LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
NF4 = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "bfloat16",
}  # fmt: skip


def config(adaptation: Adaptation, **changes: Any) -> dict[str, Any]:
    of = job(plan("ddp", "ddp", framework="trainer", **changes), adaptation=adaptation)
    loaded: dict[str, Any] = yaml.safe_load(export("llamafactory", of).text)
    return loaded


def test_keys_are_arguments_of_llama_factory_or_of_the_trainer() -> None:
    adapted = [config(Adaptation(peft={**LORA, "use_dora": True, "modules_to_save": ["lm_head"]}, quantization=NF4))]
    found = [yaml.safe_load(export("llamafactory", each).text) for each in jobs("llamafactory")]
    trainers = {field.name for field in fields(TrainingArguments)}
    for each in (*adapted, *found):
        for key, value in each.items():
            assert type(value) in OWN[key] if key in OWN else key in trainers, (key, value)
        assert each["flash_attn"] in ("sdpa", "disabled", "fa2")
        assert each["finetuning_type"] == ("full" if each in found else "lora")


@pytest.mark.parametrize(
    ("model", "template"),
    [
        ("Qwen/Qwen3-8B", "qwen3"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3_nothink"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3"),
        ("google/gemma-2-9b-it", "gemma2"),
        ("google/gemma-3-1b-it", "gemma2"),
        ("google/gemma-3-4b-it", "gemma3"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral"),
        ("Qwen/Qwen3-8B-Base", "default"),
        ("meta-llama/Llama-3.1-8B", "default"),
        ("/models/Qwen3-8B", "default"),
    ],
)
def test_the_template_is_the_one_that_llama_factory_has_for_the_model(model: str, template: str) -> None:
    found = export("llamafactory", job(plan("ddp", "ddp", framework="trainer"), model_name=model))
    assert yaml.safe_load(found.text)["template"] == template
    assert any("template" in note for note in found.notes) == (template == "default")


def test_adapters_and_the_quantized_base_are_named() -> None:
    found = config(Adaptation(peft={**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}, quantization=NF4))
    assert (found["lora_rank"], found["lora_alpha"], found["lora_target"]) == (8, 16, "q_proj,v_proj")
    assert found["additional_target"] == "embed_tokens,lm_head"
    assert (found["quantization_bit"], found["quantization_type"], found["double_quantization"]) == (4, "nf4", True)
    assert config(Adaptation(peft={**LORA, "target_modules": "all-linear"}))["lora_target"] == "all"


@pytest.mark.parametrize(
    ("adaptation", "reason"),
    [
        (Adaptation(freeze=("embed_tokens",)), "no option for the parameters to freeze"),
        (Adaptation(peft={"peft_type": "LORA", "r": 8}), "use --lora-target-modules"),
        (Adaptation(peft={**LORA, "target_parameters": ["experts.down_proj"]}), "no option for target_parameters"),
        (
            Adaptation(peft=LORA, quantization={**NF4, "bnb_4bit_quant_storage": "uint8"}),
            "--bnb-4bit-quant-storage bfloat16",
        ),
    ],
)
def test_what_it_cannot_say_is_refused(adaptation: Adaptation, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        config(adaptation)


def test_fsdp_is_refused() -> None:
    with pytest.raises(UsageError, match="from a file of accelerate"):
        export("llamafactory", job(plan("zero3", "fsdp2")))
