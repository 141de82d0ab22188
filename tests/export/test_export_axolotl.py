"""Every axolotl export agrees with axolotl's published schema, whose keys and types are copied here.

Source: axolotl 0.19.0 (https://pypi.org/project/axolotl/0.19.0), under
axolotl/utils/schemas/: config.py (AxolotlInputConfig), model.py (ModelInputConfig), training.py
(HyperparametersConfig), peft.py (LoraConfig), fsdp.py (FSDPConfig), enums.py (CANONICAL_ATTN_IMPLS), validation.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from export_jobs import job, jobs, plan

from fsdp_advisor.errors import UsageError
from fsdp_advisor.export import export
from fsdp_advisor.job.adaptation import Adaptation

TOP: dict[str, tuple[type, ...]] = {
    "base_model": (str,),  # model.py
    "output_dir": (str,),
    "datasets": (list,),  # config.py
    "bf16": (bool,),
    "fp16": (bool,),
    "tf32": (bool,),
    "sequence_len": (int,),
    "sample_packing": (bool,),
    "pad_to_sequence_len": (bool,),
    "batch_flattening": (bool,),
    "attn_implementation": (str,),
    "gradient_checkpointing": (bool,),
    "gradient_checkpointing_kwargs": (dict,),
    "accelerator_config": (dict,),
    "deepspeed": (str, dict),
    "fsdp_config": (dict,),
    "fsdp_version": (int,),
    "dp_shard_size": (int,),
    "dp_replicate_size": (int,),
    "gradient_accumulation_steps": (int,),  # training.py
    "micro_batch_size": (int,),
    "learning_rate": (str, float),
    "optimizer": (str,),
    "optim_args": (str, dict),
    "num_epochs": (int, float),
    "adapter": (str,),  # peft.py
    "lora_r": (int,),
    "lora_alpha": (int,),
    "lora_dropout": (int, float),
    "lora_target_modules": (str, list),
    "lora_target_linear": (bool,),
    "lora_target_parameters": (str, list),
    "lora_modules_to_save": (list,),
    "peft_use_dora": (bool,),
    "peft_use_rslora": (bool,),
    "load_in_4bit": (bool,),
    "load_in_8bit": (bool,),
    "bnb_config_kwargs": (dict,),
    "quantize_moe_experts": (bool,),
    "lora_mlp_kernel": (bool,),
    "lora_qkv_kernel": (bool,),
    "lora_o_kernel": (bool,),
    "lora_embedding_kernel": (bool,),
}
FSDP: dict[str, tuple[type, ...]] = {  # fsdp.py
    "activation_checkpointing": (bool,),
    "offload_params": (bool,),
    "cpu_ram_efficient_loading": (bool,),
    "state_dict_type": (str,),
    "auto_wrap_policy": (str,),
    "transformer_layer_cls_to_wrap": (str,),
    "reshard_after_forward": (bool,),
}
REQUIRED = {"base_model", "datasets", "learning_rate"}
ATTENTION = {"eager", "sdpa", "flash_attention_2"}  # of CANONICAL_ATTN_IMPLS


def config(of: Any) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(export("axolotl", of).text)
    return loaded


LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
NF4 = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "bfloat16",
}  # fmt: skip
ADAPTED = [
    job(plan("zero3", "fsdp2", framework="axolotl"), adaptation=each)
    for each in (
        Adaptation(peft={**LORA, "modules_to_save": ["lm_head"], "use_dora": True, "use_rslora": True}),
        Adaptation(peft={**LORA, "target_modules": "all-linear", "lora_dropout": 0.1}, quantization=NF4),
        Adaptation(peft=LORA, quantization={"load_in_8bit": True}),
        Adaptation(peft=LORA, quantization={**NF4, "quantize_moe_experts": True}),
    )
]


def test_adapters_are_lora_or_qlora() -> None:
    whole, four, eight, experts = map(config, ADAPTED)
    assert [each["adapter"] for each in (whole, four, eight, experts)] == ["lora", "qlora", "lora", "qlora"]
    assert experts["quantize_moe_experts"] is True and "quantize_moe_experts" not in four
    assert (whole["lora_target_modules"], four["lora_target_linear"]) == (["q_proj"], True)
    assert four["load_in_4bit"] is True and eight["load_in_8bit"] is True
    for adaptation, reason in (
        (Adaptation(freeze=("embed_tokens",)), "it names the parameters to train"),
        (Adaptation(peft={"peft_type": "LORA", "r": 8}), "use --lora-target-modules"),
        (Adaptation(peft={"peft_type": "IA3", "target_modules": ["v_proj"]}), "it has LoRA alone"),
        (Adaptation(peft={**LORA, "layers_to_transform": [0]}), "no option for layers_to_transform of LoRA"),
    ):
        with pytest.raises(UsageError, match=reason):
            export("axolotl", job(plan("zero3", "fsdp2"), adaptation=adaptation))


def test_the_kernels_of_the_estimate_are_switched_on_and_the_others_off() -> None:
    found = config(job(plan("zero3", "fsdp2"), adaptation=Adaptation(peft=LORA), lora_kernels=("mlp", "o")))
    kernels = {key: value for key, value in found.items() if key.endswith("_kernel")}
    assert kernels == {
        "lora_mlp_kernel": True, "lora_qkv_kernel": False, "lora_o_kernel": True, "lora_embedding_kernel": False,
    }  # fmt: skip


def test_keys_and_types_match_the_schema() -> None:
    for each in (*jobs("axolotl"), *ADAPTED):
        found = config(each)
        assert set(found) >= REQUIRED
        for schema, section in ((TOP, found), (FSDP, found.get("fsdp_config", {}))):
            for key, value in section.items():
                assert type(value) in schema[key], (key, value)
        assert found["attn_implementation"] in ATTENTION


def test_configuration_matches_the_plan() -> None:
    for each in jobs("axolotl"):
        p, found = each.plan, config(each)
        assert (found["micro_batch_size"], found["sequence_len"]) == (p.micro_batch_size, p.seq_len)
        assert ("fsdp_config" in found, "deepspeed" in found) == (p.backend == "fsdp2", p.backend == "deepspeed")
        if p.backend == "fsdp2":
            assert found["fsdp_version"] == 2
            assert found["dp_shard_size"] * found.get("dp_replicate_size", 1) == p.world_size
            assert found["fsdp_config"]["reshard_after_forward"] is (p.strategy in ("zero3", "hsdp"))
            assert found["fsdp_config"]["activation_checkpointing"] is (p.activation_checkpointing == "full")
        else:
            assert found["gradient_checkpointing"] is (p.activation_checkpointing == "full")
        if p.backend == "deepspeed":
            assert found["deepspeed"]["zero_optimization"]["stage"] == int(p.strategy[-1])
        assert (found["bf16"], found["fp16"]) == (p.precision.startswith("bf16"), p.precision == "fp16-mixed")


def test_only_causal_language_models_are_supported() -> None:
    with pytest.raises(UsageError, match="it trains only causal language models"):
        export("axolotl", job(plan("zero3", "fsdp2"), task="masked-lm"))
