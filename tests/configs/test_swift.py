"""Commands and files of ms-swift."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_advisor.configs import Configuration, complete, from_texts
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.parsing import make_request


def command(arguments: str, environment: str = "NPROC_PER_NODE=2") -> Configuration:
    return from_texts({"run.sh": f"{environment} swift sft --model gpt2 --dataset a b {arguments}"})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {"activation_checkpointing": "full", "micro_batch_size": 1, "gradient_accumulation_steps": 8, "gpus": 2}),
        ("--train_type full --torch_dtype bfloat16", {"precision": "bf16", "framework": "trainer", "strategy": "ddp"}),
        ("--tuner_type full --deepspeed zero3", {"precision": "bf16-mixed", "strategy": "zero3", "offload": "none"}),
        ("--tuner_type full --deepspeed zero2_offload", {"strategy": "zero2", "offload": "optimizer", "backend": "deepspeed"}),
        ("--deepspeed zero2", {"activation_checkpointing": "reentrant"}),
        ("--gradient_checkpointing false", {"activation_checkpointing": "none"}),
        ("--tuner_type full --fsdp fsdp2", {"strategy": "zero3", "backend": "fsdp2", "activation_checkpointing": "full"}),
        ("--max_length 4096 --packing true --attn_impl flash_attn", {"seq_len": 4096, "packing": "bfd", "attention": "flash_attention_2"}),
        ("--quant_bits 4 --quant_method bnb", {"load_in_4bit": True, "use_bnb_nested_quant": True}),
    ],
)  # fmt: skip
def test_a_command_of_swift_is_read(arguments: str, expected: dict[str, Any]) -> None:
    options = command(arguments).options
    assert options.items() >= expected.items()
    assert make_request(options).model == "gpt2"


@pytest.mark.parametrize(
    ("arguments", "rank", "targets"),
    [("", 8, "all-linear"), ("--lora_rank 64 --target_modules c_attn c_proj", 64, ["c_attn", "c_proj"])],
)
def test_lora_is_the_default_of_swift(arguments: str, rank: int, targets: object) -> None:
    peft = adaptation_of(make_request(command(arguments).options)).peft
    assert (peft["r"], peft["target_modules"], peft["lora_dropout"]) == (rank, targets, 0.05)


def test_a_command_for_one_process_has_reentrant_checkpoints_and_a_batch_of_16() -> None:
    found = command("", environment="")
    assert (found.options["activation_checkpointing"], found.options["gradient_accumulation_steps"]) == (
        "reentrant",
        16,
    )
    assert any("batches of 16 on 1 GPU" in text for reading in found.readings for text in reading.assumed)


def test_a_file_of_swift_is_read() -> None:
    found = from_texts(
        {"sft.yaml": "{model: gpt2, dataset: [a, b], tuner_type: full, torch_dtype: bfloat16, deepspeed: zero1}"}
    )
    assert (found.options["model"], found.options["strategy"]) == ("gpt2", "zero1")
    assert found.readings[0].format == "ms-swift"


VISION = "Qwen/Qwen2.5-VL-7B-Instruct"


@pytest.mark.parametrize(
    ("arguments", "excluded"),
    [
        ("", r".*(visual\.patch_embed|visual\.blocks|visual\.merger|patch_embed).*"),
        ("--freeze_vit false --freeze_aligner false", ".*(patch_embed).*"),
        ("--target_modules q_proj v_proj", None),
    ],
)
def test_all_linear_of_swift_gives_adapters_to_the_language_model_alone(arguments: str, excluded: str | None) -> None:
    """Source: ms-swift, utils/transformers_utils.py, `get_multimodal_target_regex`; modules that are named are those of PEFT."""
    found = from_texts({"run.sh": f"swift sft --model {VISION} --dataset a {arguments}"})
    assert adaptation_of(make_request(found.options)).peft.get("exclude_modules") == excluded


def test_full_fine_tuning_by_swift_freezes_the_vision_tower_and_the_aligner() -> None:
    found = from_texts({"run.sh": f"swift sft --model {VISION} --dataset a --tuner_type full"})
    assert any("visual" in part for part in found.options["freeze"])
    assert any("which ms-swift freezes" in text for text in found.readings[0].assumed)


def test_other_tuners_of_swift_are_refused() -> None:
    with pytest.raises(UsageError, match="tuner_type: adalora is not modelled"):
        complete(command("--tuner_type adalora"), {})
