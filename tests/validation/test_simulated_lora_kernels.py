"""Predicted peaks with axolotl's kernels for adapters against its own autograd functions under fake tensors.

They are equal to the byte except for scalars of accelerate and the Trainer. The functions' Triton and CUDA kernels have stand-ins that
allocate the same tensors (`axolotl_kernels`).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from adapter_peaks import SCALARS_BYTES
from matrix import in_turn, taken

torch = pytest.importorskip("torch")
pytest.importorskip("axolotl")
pytest.importorskip("bitsandbytes")

from axolotl_kernels import KEYS, axolotls_kernels, patches  # after the checks
from compared_peaks import predicted_and_simulated, tape_for

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model.lora_kernels import OWN_CODE_TYPES, PATCHED_TYPES
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.validation import frameworks
from fsdp_advisor.validation import simulate as simulation

pytestmark = pytest.mark.slow

CONFIG = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
PACKED = {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}
NESTED = {**PACKED, "use_bnb_nested_quant": True}
FULL = {"activation_checkpointing": "full"}
SHARDED = {"strategy": "zero3", "gpus": 4}

Case = tuple[str, dict[str, Any]]
CASES: tuple[Case, ...] = (
    ("llama", {**NESTED, "micro_batch_size": 2}),
    ("qwen2", {**SHARDED, **PACKED, **FULL}),
)
MORE: tuple[Case, ...] = (
    ("llama", {}),
    ("llama", {"gpus": 4, **NESTED, **FULL}),
    ("llama", {"load_in_4bit": True, "lora_dropout": 0.1, **FULL}),
    ("llama", {"lora_dropout": 0.1, "lora_kernels": "o"}),
    ("llama", {"lora_target_modules": "q_proj,v_proj"}),
    ("llama", {"lora_kernels": "none"}),
    ("llama", SHARDED),
    ("llama", {**SHARDED, "lora_kernels": "mlp"}),
    ("llama", {**SHARDED, "lora_target_modules": "q_proj,k_proj,v_proj,down_proj", **FULL}),
    ("llama", {**SHARDED, "strategy": "zero2", "gradient_accumulation_steps": 2}),
    ("qwen2", {"gpus": 2, "gradient_accumulation_steps": 2}),
    ("qwen3", {"lora_kernels": "qkv"}),
    ("qwen3", {**SHARDED, "gpus": 3, "lora_dropout": 0.1}),
    ("mistral", {"precision": "fp32", "lora_kernels": "mlp,o"}),
    ("gemma", {"lora_dropout": 0.1}),
    ("gemma3_text", {"gpus": 2, "lora_dropout": 0.1, **FULL}),
    ("gemma3_text", {**SHARDED, "precision": "fp32"}),
    ("mixtral", {"gpus": 2, "lora_target_modules": "q_proj,k_proj,v_proj,o_proj"}),
    (
        "mixtral",
        {**SHARDED, **FULL, "gradient_accumulation_steps": 2, "lora_target_modules": "q_proj,k_proj,v_proj,o_proj"},
    ),
    ("mixtral", {**SHARDED, **FULL, "gpus": 2, "seq_len": 128, "lora_kernels": "none"}),
    ("glm", {"gpus": 2, **NESTED}),
    ("cohere2", {}),
    ("nemotron", {}),
    ("olmo2", {"lora_kernels": "mlp"}),
)


@in_turn(0, of=4)
@pytest.mark.parametrize("case", taken(CASES, MORE, days=3), ids=str)
def test_a_step_with_axolotls_kernels_has_the_predicted_peaks(case: Case, tmp_path: Path) -> None:
    model_type, options = case
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CONFIG, "model_type": model_type}))
    usual = {
        "strategy": "ddp", "framework": "axolotl", "seq_len": 64, "use_peft": True, "lora_target_modules": "all-linear",
    }  # fmt: skip
    request = make_request({**usual, **options, "model": str(config)})
    prepare = frameworks.transformers_trainer
    on = {"auto": ("mlp", "qkv", "o", "embedding")}.get(request.lora_kernels, request.lora_kernels.split(","))
    with axolotls_kernels() as use:

        def prepared(source: Any, module: Any, *rest: Any) -> Any:
            if request.lora_kernels != "none":
                use(module, **{key: key.split("_")[1] in on for key in KEYS})
            return prepare(source, module, *rest)

        with (
            mock.patch.object(frameworks, "transformers_trainer", prepared),
            mock.patch.object(simulation, "use_lora_kernels", lambda *_: None),
        ):
            predicted, simulated = predicted_and_simulated(request)
    for phase, n_bytes in simulated.items():
        assert 0 <= n_bytes - predicted[phase] <= SCALARS_BYTES, (phase, n_bytes, predicted[phase])


@in_turn(1, of=3)
def test_axolotl_replaces_the_attention_of_the_listed_models() -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    module, found = patches(), set()
    settings = SimpleNamespace(fused_attn_kernel=None)
    types = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    for model_type in types:
        configuration = SimpleNamespace(model_type=model_type)
        with mock.patch.object(module.AutoConfig, "from_pretrained", lambda _, it=configuration: it):
            try:
                attention = module.get_attention_cls_from_config({"base_model": ""})
            except ValueError:  # it cannot import the class
                continue
        forward = attention.forward
        with mock.patch.object(module, "get_attention_cls_from_config", lambda _, it=attention: it):
            try:
                module.patch_self_attn_lora(settings)
            except AssertionError:  # it does not find the projections
                continue
            finally:
                replaced, attention.forward = attention.forward is not forward, forward
                if "_original_forward" in vars(attention):
                    del attention._original_forward
        if replaced:
            found.add(model_type)
    assert found - OWN_CODE_TYPES == PATCHED_TYPES & types.keys()  # 5.23 lacks lara_mini


@pytest.mark.parametrize(
    ("values", "options", "reason", "hint"),
    [
        (
            {"model_type": "gemma4_text"},
            {},
            "has code of its own, which is not modelled, for models of type gemma4_text",
            "--lora-kernels none",
        ),
        ({"model_type": "phi3"}, {"lora_kernels": "qkv"}, "stops for models of type phi3", "--lora-kernels none"),
        ({"model_type": "llama", "hidden_act": "relu"}, {}, "does not support the activation relu", "qkv,o,embedding"),
        (
            {"model_type": "llama"},
            {"lora_target_modules": "q_proj,embed_tokens"},
            "adapters of embeddings",
            "mlp,qkv,o",
        ),
    ],
)
def test_a_model_with_which_axolotls_kernels_fail_is_refused(
    values: dict[str, Any], options: dict[str, Any], reason: str, hint: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CONFIG, **values}))
    job = {
        "framework": "axolotl",
        "strategy": "ddp",
        "seq_len": 64,
        "use_peft": True,
        "lora_target_modules": "all-linear",
    }
    request = make_request({**job, **options, "model": str(config)})
    (plan,) = plans(request, seq_len=64)
    with pytest.raises(NotRecordable, match=reason) as refused:
        tape_for(resolve(request.model).adapted(adaptation_of(request)), plan)
    assert hint in str(refused.value.hint)
