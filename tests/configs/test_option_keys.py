"""The keys of users' files that hints name beside options."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from fsdp_advisor.configs import from_texts
from fsdp_advisor.configs.option_keys import KEYS
from fsdp_advisor.job.fields import fields_of
from fsdp_advisor.job.request import EstimateRequest

FILES: dict[str, dict[str, Any]] = {
    "Trainer arguments": {"model_name_or_path": "gpt2"},
    "TRL": {"model_name_or_path": "gpt2", "use_peft": True},
    "LLaMA-Factory": {"model_name_or_path": "gpt2", "finetuning_type": "lora"},
    "axolotl": {"base_model": "gpt2", "adapter": "lora"},
}
VALUES: dict[str, Any] = {
    "additional_target": "lm_head",
    "attn_implementation": "eager",
    "cutoff_len": 64,
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "dtype": "bfloat16",
    "flash_attn": "fa2",
    "fsdp": "full_shard",
    "fsdp_config": {"reshard_after_forward": True},
    "gradient_accumulation_steps": 2,
    "lora_modules_to_save": ["lm_head"],
    "lora_target": "c_attn",
    "lora_target_modules": ["c_attn"],
    "max_length": 64,
    "micro_batch_size": 2,
    "optim": "sgd",
    "optimizer": "sgd",
    "per_device_train_batch_size": 2,
    "quantization_bit": 4,
    "sequence_len": 64,
    "stage": "dpo",
}


@pytest.mark.parametrize(
    ("format", "key"), sorted({(f, k) for f in KEYS for keys in KEYS[f].values() for k in keys.split(" or ")})
)
def test_readers_read_the_keys_that_hints_name(format: str, key: str) -> None:
    text = yaml.safe_dump({**FILES[format], key: FILES[format].get(key, VALUES.get(key, True))})
    reading = from_texts({"job.yaml": text}).readings[0]
    assert reading.format.startswith(format)
    assert any(read.partition(":")[0].partition(".")[0] == key for read in reading.read), reading


def test_keys_are_given_for_options_that_exist() -> None:
    assert {option.replace("-", "_") for keys in KEYS.values() for option in keys} <= fields_of(EstimateRequest).keys()
