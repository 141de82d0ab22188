"""Adapters whose code in PEFT looks at values of tensors, which a recording does not have."""

from __future__ import annotations

from typing import Any

import pytest
from vision_models import config_of

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from tiny_llama import LLAMA  # after the checks for the packages

from fsdp_advisor.errors import NotRecordable, UsageError
from fsdp_advisor.job.adaptation import CONFIG_KEY, Adaptation
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.recording import Recorder, source_of

pytestmark = pytest.mark.slow

TARGETS = {"target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("peft", "trained_per_layer"),
    [
        # blocks (factors, H / 4, 4, 4) and a scale of each output
        ({"peft_type": "BOFT", "boft_block_size": 4, "boft_n_butterfly_factor": 1}, lambda hidden: 4 * hidden + hidden),
        # logits of rank 4 for H / 16 tiles on both sides, over 16 vectors; the vectors are shared
        ({"peft_type": "VBLORA", "num_vectors": 16, "vector_length": 16}, lambda hidden: 2 * 4 * hidden // 16 * 16),
        ({"peft_type": "WAVEFT", "n_frequency": 32}, lambda _: 32),
        ({"peft_type": "WAVEFT", "n_frequency": 32, "use_idwt": False}, lambda _: 32),
        ({"peft_type": "UNILORA", "theta_d_length": 256}, lambda _: 0),  # all entries are shared
    ],
)
def test_methods_that_look_at_values_are_recorded(peft: dict[str, Any], trained_per_layer: Any) -> None:
    config = {**LLAMA, CONFIG_KEY: Adaptation(peft={**peft, **TARGETS}).as_dict()}
    recorder = Recorder(source_of(config, name="x"))
    profile = recorder.profile
    shared = {"VBLORA": 16 * 16, "UNILORA": 256}.get(peft["peft_type"], 0)
    assert profile.trainable_parameters == LLAMA["num_hidden_layers"] * trained_per_layer(LLAMA["hidden_size"]) + shared
    assert recorder.tape(TapeKey("plain", "bf16", "sdpa", "none", at=(1, 64))).segments


CPT = {"num_virtual_tokens": 2, "cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 1]}


@pytest.mark.parametrize(
    ("peft", "reason"),
    [
        ({"peft_type": "SHIRA", "r": 8, **TARGETS}, "SHIRA multiplies by sparse tensors"),
        ({"peft_type": "FROD", **TARGETS}, "FROD decomposes the weights"),
        ({"peft_type": "CPT", **CPT}, "CPT weighs the loss by the type of each token"),
        ({"peft_type": "XLORA"}, "XLORA mixes LoRA adapters that were trained before"),
        ({"peft_type": "POLY", **TARGETS}, "POLY selects its matrices by the task of each example"),
        ({"peft_type": "ADAMSS", **TARGETS}, "ADAMSS divides decomposed weights into clusters"),
        (
            {"peft_type": "MULTITASK_PROMPT_TUNING", "num_virtual_tokens": 2, "num_tasks": 2},
            "MULTITASK_PROMPT_TUNING multiplies its prompts by matrices of the task",
        ),
        (
            {"peft_type": "LORA", "arrow_config": {"top_k": 2}, **TARGETS},
            "arrow_config routes each token to LoRA adapters",
        ),
        ({"peft_type": "LORA", "monteclora_config": {}, **TARGETS}, "monteclora_config draws its weights"),
        (
            {"peft_type": "LORA", "megatron_config": {"a": 1}, **TARGETS},
            "megatron_config adapts the layers of megatron.core",
        ),
    ],
)
def test_a_method_that_cannot_be_recorded_says_why(peft: dict[str, Any], reason: str) -> None:
    config = {**LLAMA, CONFIG_KEY: Adaptation(peft=peft).as_dict()}
    with pytest.raises(NotRecordable, match=reason):
        Recorder(source_of(config, name="x"))


LORA = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"]}
DEPTH = LLAMA["num_hidden_layers"]
PER_LAYER = 8 * (64 + 64) + 8 * (64 + 32)
"""Elements of LoRA's four matrices in a layer of `LLAMA`."""


@pytest.mark.parametrize(
    ("more", "elements"),
    [
        ({"layers_to_transform": [0], "layers_pattern": "layers"}, PER_LAYER),
        ({"rank_pattern": {"q_proj": 32}}, DEPTH * (32 * (64 + 64) + 8 * (64 + 32))),
        ({"exclude_modules": ["v_proj"]}, DEPTH * 8 * (64 + 64)),
        ({"lora_bias": True}, DEPTH * (PER_LAYER + 64 + 32)),
        ({"trainable_token_indices": [1, 2]}, DEPTH * PER_LAYER + 2 * 64),
        ({"new_switch_of_a_newer_version": False, "qalora_group_size": 16}, DEPTH * PER_LAYER),
    ],
)
def test_keys_of_lora_change_what_is_trained(more: dict[str, Any], elements: int) -> None:
    config = {**LLAMA, CONFIG_KEY: Adaptation(peft={**LORA, **more}).as_dict()}
    assert Recorder(source_of(config, name="x")).profile.trainable_parameters == elements


@pytest.mark.parametrize(
    ("more", "hint"),
    [
        ({"switch_of_a_newer_version": 2}, "the values in its configuration"),
        (
            {"target_modules": ["query"]},
            "all-linear (all linear layers but the head), or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
        ),
    ],
)
def test_what_peft_refuses_has_a_hint_about_its_cause(more: dict[str, Any], hint: str) -> None:
    config = {**LLAMA, CONFIG_KEY: Adaptation(peft={**LORA, **more}).as_dict()}
    with pytest.raises(UsageError) as refused:
        Recorder(source_of(config, name="x"))
    assert hint in str(refused.value.hint)


def test_the_linear_layers_of_a_tower_are_named_last() -> None:
    config = {**config_of("qwen3_vl"), CONFIG_KEY: Adaptation(peft={**LORA, "target_modules": ["query"]}).as_dict()}
    with pytest.raises(UsageError) as refused:
        Recorder(source_of(config, name="x"))
    assert "some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, qkv, proj" in str(refused.value.hint)


def test_linear_layers_that_peft_adapts_next_to_mamba_are_named() -> None:
    hybrid = {
        "model_type": "falcon_h1", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512,
        "num_attention_heads": 2, "num_key_value_heads": 2, "mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32,
    }  # fmt: skip
    every = {"peft_type": "LORA", "r": 8, "target_modules": "all-linear"}
    with pytest.raises(UsageError, match="Mamba") as refused:
        Recorder(source_of({**hybrid, CONFIG_KEY: Adaptation(peft=every).as_dict()}, name="x"))
    names = str(refused.value.hint).removeprefix("--lora-target-modules ").split(",")
    assert "in_proj" in names and "out_proj" not in names
    named = Adaptation(peft={**every, "target_modules": names})
    assert Recorder(source_of({**hybrid, CONFIG_KEY: named.as_dict()}, name="x")).profile.adapter_parameters
