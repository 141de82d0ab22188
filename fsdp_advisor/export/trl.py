"""A configuration of TRL's `sft` script: the settings of the plan, and an example data set to replace.

Source: TRL 1.16.0, scripts/sft.py, scripts/utils.py (`TrlParser`), trainer/{sft,base,model}_config.py, trainer/sft_trainer.py.
"""

from __future__ import annotations

from typing import Any

import yaml

from fsdp_advisor.export import accelerate, trainer
from fsdp_advisor.export.adapters import lora, lora_limit, weights
from fsdp_advisor.export.constants import NVME_NOTE, TRL_FILE
from fsdp_advisor.export.header import header
from fsdp_advisor.export.job import Job
from fsdp_advisor.export.losses import loss_limit
from fsdp_advisor.export.script import torchrun_line
from fsdp_advisor.export.target import Target
from fsdp_advisor.job.adaptation import LORA_LISTS, LORA_OPTIONS

DATASET_NOTE = "dataset_name is an example: replace it with your own"
LOSS_NOTE = "TRL computes the loss without all logits at once, so it needs less memory than predicted; the framework trl predicts it"
QUANTIZED_NOTE = "TRL keeps adapters on a quantized base in bf16 and does not store the other weights in fp32, so it needs less memory than predicted"


def unsupported(job: Job) -> str | None:
    """Why TRL cannot train the job; None if it can. TRL trains through the Trainer."""
    if job.task != "causal-lm":
        return (
            "its sft script trains only causal language models" if job.task else "a bare parameter count is not a model"
        )
    if trainer.replicated(job.plan):
        return "its configuration file has no mesh of replicas; use the target trainer"
    return loss_limit(job, "trl") or lora_limit(job) or accelerate.unsupported(job, "trl")


def write(job: Job) -> tuple[str, tuple[str, ...]]:
    """The configuration, and notes on what it cannot set."""
    return header(job, *TARGET.checked) + yaml.safe_dump(_config(job), sort_keys=False), tuple(notes(job))


def notes(job: Job) -> list[str]:
    found = [DATASET_NOTE, *accelerate.behaviour(job.plan)]
    if job.plan.loss_code == "full":
        found.append(LOSS_NOTE)
    if job.adaptation.quantization and job.adaptation.prepared:
        found.append(QUANTIZED_NOTE)
    if job.offloads_to_nvme:
        found.append(NVME_NOTE)
    return found


def _config(job: Job) -> dict[str, Any]:
    plan = job.plan
    arguments = trainer.arguments(job)
    checkpointing = bool(arguments.pop("activation_checkpointing", False))
    return {
        "model_name_or_path": job.model_name,
        "dtype": weights(job),
        "attn_implementation": plan.attention,
        "dataset_name": "trl-lib/Capybara",
        "output_dir": "./outputs",
        "max_length": plan.seq_len,
        "packing": False,
        "bf16": False,  # TRL's default is true
        "gradient_checkpointing": checkpointing,  # and here
        **(
            {"gradient_checkpointing_kwargs": arguments.pop("activation_checkpointing_kwargs")} if checkpointing else {}
        ),
        **arguments,
        **_adapter(job),
    }


def _adapter(job: Job) -> dict[str, Any]:
    quantization = job.adaptation.quantization
    if not job.adaptation.peft:
        return {}
    config: dict[str, Any] = {"use_peft": True}
    for name, value in lora(job).items():
        listed = name in LORA_LISTS and isinstance(value, str)
        config[LORA_OPTIONS[name]] = [value] if listed else value
    if "load_in_8bit" in quantization:
        config["load_in_8bit"] = True
    elif quantization:
        config |= {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": quantization["bnb_4bit_quant_type"],
            "use_bnb_nested_quant": quantization["bnb_4bit_use_double_quant"],
            "bnb_4bit_quant_storage": quantization["bnb_4bit_quant_storage"],
        }
    return config


TARGET = Target(
    name="trl",
    description="configuration of TRL's sft (YAML)",
    file_name=TRL_FILE,
    media_type="application/yaml",
    checked=("trl",),
    unsupported=unsupported,
    write=write,
    usage=lambda job, file: torchrun_line(job, f"-m trl.scripts.sft --config {file}"),
    framework="trl",
)
