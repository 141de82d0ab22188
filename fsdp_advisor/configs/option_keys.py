"""The keys of users' files that are the same settings as options, for hints about jobs that come from a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fsdp_advisor.configs.files import from_paths
from fsdp_advisor.job.config_reading import ConfigReading

_TRAINER = {
    "activation-checkpointing": "gradient_checkpointing",
    "backend": "fsdp or deepspeed",
    "compile": "torch_compile",
    "gradient-accumulation-steps": "gradient_accumulation_steps",
    "micro-batch-size": "per_device_train_batch_size",
    "optim": "optim",
    "precision": "bf16 or fp16",
    "strategy": "fsdp or deepspeed",
    "use-liger-kernel": "use_liger_kernel",
}
KEYS: dict[str, dict[str, str]] = {
    "Trainer arguments": _TRAINER,
    "TRL": _TRAINER
    | {
        "attention": "attn_implementation",
        "dtype": "dtype",
        "load-in-4bit": "load_in_4bit",
        "load-in-8bit": "load_in_8bit",
        "lora-modules-to-save": "lora_modules_to_save",
        "lora-target-modules": "lora_target_modules",
        "packing": "packing",
        "padding-free": "padding_free",
        "seq-len": "max_length",
        "use-peft": "use_peft",
    },
    "LLaMA-Factory": _TRAINER
    | {
        "activation-checkpointing": "disable_gradient_checkpointing",
        "attention": "flash_attn",
        "load-in-4bit": "quantization_bit",
        "load-in-8bit": "quantization_bit",
        "lora-modules-to-save": "additional_target",
        "lora-target-modules": "lora_target",
        "packing": "packing",
        "seq-len": "cutoff_len",
        "task": "stage",
        "use-liger-kernel": "enable_liger_kernel",
        "use-peft": "finetuning_type",
    },
    "axolotl": {
        "activation-checkpointing": "gradient_checkpointing",
        "attention": "attn_implementation",
        "backend": "fsdp_config or deepspeed",
        "compile": "torch_compile",
        "gradient-accumulation-steps": "gradient_accumulation_steps",
        "load-in-4bit": "load_in_4bit",
        "load-in-8bit": "load_in_8bit",
        "lora-modules-to-save": "lora_modules_to_save",
        "lora-target-modules": "lora_target_modules",
        "micro-batch-size": "micro_batch_size",
        "optim": "optimizer",
        "packing": "sample_packing",
        "precision": "bf16 or fp16",
        "seq-len": "sequence_len",
        "strategy": "fsdp_config or deepspeed",
        "tiled-mlp": "tiled_mlp",
        "use-peft": "adapter",
    },
}
"""Format -> option -> the key, or the keys with `or` between them."""


def with_keys(hint: str, files: Sequence[Path]) -> str:
    """A hint with the keys of the files that are the same settings as the options that it names."""
    return _with_keys(hint, from_paths(files).readings)


def _with_keys(hint: str, readings: Sequence[ConfigReading]) -> str:
    """As `with_keys`.

    >>> _with_keys("give --seq-len 512", [ConfigReading(file="a/job.yaml", format="axolotl")])
    'give --seq-len 512 (in job.yaml: sequence_len)'
    """
    named = dict.fromkeys(re.findall(r"--([a-z0-9-]+)", hint))
    for reading in readings:
        keys = {option: key for option in named for key in [KEYS.get(reading.format, {}).get(option)] if key}
        if keys:
            said = [*keys.values()] if len(keys) == 1 else [f"--{option} is {key}" for option, key in keys.items()]
            hint += f" (in {Path(reading.file).name}: {', '.join(said)})"
    return hint
