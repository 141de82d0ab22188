"""A LLaMA-Factory configuration: the settings of the plan, and an example data set to replace.

Source: LLaMA-Factory 0.9.5, hparams/{model,data,finetuning}_args.py, hparams/parser.py (`_parse_train_args`, `get_train_args`),
data/dataset_info.json of its repository, model/adapter.py (`init_adapter`), model/model_utils/{quantization,checkpointing}.py, launcher.py.
"""

from __future__ import annotations

from typing import Any

from fsdp_advisor.export import accelerate, deepspeed, trainer
from fsdp_advisor.export.adapters import lora, lora_limit, weights
from fsdp_advisor.export.batches import llamafactory_keys, llamafactory_limit
from fsdp_advisor.export.checkpointing import checkpointing_limit
from fsdp_advisor.export.constants import LLAMAFACTORY_FILE, NVME_NOTE, PACKAGES
from fsdp_advisor.export.evaluation import evaluation_limit
from fsdp_advisor.export.header import yaml_text
from fsdp_advisor.export.job import Job
from fsdp_advisor.export.llamafactory_images import DATA_SET, images_keys, images_limit, images_notes, template
from fsdp_advisor.export.losses import loss_limit
from fsdp_advisor.export.model_arguments import experts_limit
from fsdp_advisor.export.script import torchrun_line
from fsdp_advisor.export.target import Target
from fsdp_advisor.job.choices import TrainingTask, compute_dtype
from fsdp_advisor.job.request import EstimateRequest

_ATTENTION = {"sdpa": "sdpa", "eager": "disabled", "flash_attention_2": "fa2"}
_DATA_SETS: dict[TrainingTask, str] = {"sft": "alpaca_en_demo", "dpo": "dpo_en_demo", "kto": "kto_en_demo"}
"""Task -> data set of LLaMA-Factory's own example. The task is its `stage`."""
_LEARNING_RATES: dict[TrainingTask, tuple[float, float]] = {
    "sft": (1e-5, 1e-4),
    "dpo": (1e-6, 5e-6),
    "kto": (1e-6, 5e-6),
}
"""Task -> learning rates of a whole model and of adapters. Source: LLaMA-Factory, examples/train_full and examples/train_lora. It has no
example of a whole model and preferences, whose trainers derive from TRL's: the rate is TRL's default.
"""
_LORA = {
    "r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "use_dora": "use_dora",
    "use_rslora": "use_rslora",
}
"""Keyword of PEFT's LoraConfig -> LLaMA-Factory's key, without the keywords that are lists of names."""


def unsupported(job: Job) -> str | None:
    """Why LLaMA-Factory cannot train the job; None if it can. It trains through the Trainer and accelerate."""
    plan, adaptation = job.plan, job.adaptation
    if (limit := images_limit(job)) is not None:
        return limit
    if plan.backend in ("fsdp1", "fsdp2"):
        return "its configuration cannot describe FSDP: LLaMA-Factory reads that from a file of accelerate; use --backend deepspeed"
    if plan.precision == "bf16" and plan.backend == "deepspeed":
        return "its pure_bf16 contradicts bf16 in DeepSpeed's section; use --precision bf16-mixed"
    if adaptation.peft and "target_modules" not in adaptation.peft:
        return "it needs the modules that get adapters: use --lora-target-modules"
    if adaptation.peft.get("target_parameters"):
        return "it has no option for target_parameters of LoRA"
    if "load_in_4bit" in adaptation.quantization and adaptation.quantization["bnb_4bit_quant_storage"] != weights(job):
        return f"it stores packed weights as {weights(job)}; use --bnb-4bit-quant-storage {weights(job)}"
    if job.plan.use_liger_kernel and job.plan.loss_code != "liger":
        return "it runs Liger's kernels with Liger's loss; use --loss auto"
    return (
        _task_limit(job)
        or experts_limit(job)
        or llamafactory_limit(job)
        or checkpointing_limit(job, "reentrant")
        or evaluation_limit(job)
        or lora_limit(job, freezes=job.plan.images is not None)
        or accelerate.unsupported(job, "llamafactory")
    )


def _task_limit(job: Job) -> str | None:
    """Why LLaMA-Factory cannot train the task with its loss."""
    plan = job.plan
    if plan.task not in _DATA_SETS or (plan.task != "sft" and plan.reference == "none"):
        return f"its {plan.task} without a reference in the step is not estimated; use the target trl"
    if plan.task != "sft" and plan.loss_code != "full":
        return f"its {plan.task} computes all logits at once; use --framework llamafactory"
    return None if plan.task != "sft" else loss_limit(job, "liger")


def write(job: Job) -> tuple[str, tuple[str, ...]]:
    """The configuration, and notes on what it cannot set."""
    return yaml_text(_config(job), job, *PACKAGES["llamafactory"]), tuple(notes(job))


def notes(job: Job) -> list[str]:
    found = ["dataset is an example: replace it with your own"]
    found += images_notes(job)
    if template(job) is None:
        found.append(
            "template is LLaMA-Factory's default, which a chat model was not trained with: replace it with the model's"
        )
    examples = job.plan.task == "sft" or job.adaptation.method
    source = "LLaMA-Factory's examples" if examples else "TRL, from whose trainer LLaMA-Factory's derives"
    found.append(f"learning_rate is that of {source}; LLaMA-Factory's default is the Trainer's, 5e-05")
    found += accelerate.difference_notes(job.plan)
    if job.adaptation.peft and job.plan.mixed and not job.adaptation.quantization and weights(job) == "float32":
        found.append("LLaMA-Factory loads the base in 16 bits, so it needs less memory than predicted for fp32 weights")
    if job.adaptation.quantization:
        found.append("LLaMA-Factory leaves embeddings in 16 bits, so it needs less memory than predicted")
    if job.plan.loss_code == "liger" and not job.plan.use_liger_kernel:
        found.append("LLaMA-Factory runs all of Liger's kernels, so it needs less memory than predicted")
    if job.offloads_to_nvme:
        found.append(NVME_NOTE)
    return found


def _config(job: Job) -> dict[str, Any]:
    plan, optimizer = job.plan, trainer.named_optimizer(job.plan)
    checkpoints = plan.activation_checkpointing != "none"
    return {
        "model_name_or_path": job.model_name,
        "stage": plan.task,
        "do_train": True,
        **_adapter(job),
        **({} if plan.task == "sft" else {"pref_beta": 0.1}),
        "dataset": _DATA_SETS[plan.task] if plan.images is None else DATA_SET,
        "template": template(job) or "default",
        **images_keys(job),
        "cutoff_len": plan.seq_len,
        **llamafactory_keys(plan),
        "output_dir": "./outputs",
        "per_device_train_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "learning_rate": _LEARNING_RATES[plan.task][bool(job.adaptation.method)],
        "optim": optimizer.name,
        **({"optim_args": optimizer.arguments} if optimizer.arguments else {}),
        **({"optim_target_modules": optimizer.targets} if optimizer.targets else {}),
        "bf16": plan.precision == "bf16-mixed",
        "fp16": plan.precision == "fp16-mixed",
        **({"pure_bf16": True} if plan.precision == "bf16" else {}),
        **({"enable_liger_kernel": True} if plan.loss_code == "liger" else {}),
        "flash_attn": _ATTENTION[plan.attention],
        "disable_gradient_checkpointing": not checkpoints,
        **({"use_reentrant_gc": plan.checkpointing == "reentrant"} if checkpoints else {}),
        **({"deepspeed": deepspeed.through_trainer(job)} if plan.backend == "deepspeed" else {}),
    }


def _adapter(job: Job) -> dict[str, Any]:
    quantization = job.adaptation.quantization
    if not job.adaptation.peft:
        return {"finetuning_type": "full"}
    values = lora(job)
    config: dict[str, Any] = {"finetuning_type": "lora"}
    config |= {_LORA[name]: value for name, value in values.items() if name in _LORA}
    modules = values["target_modules"]
    config["lora_target"] = (
        "all" if modules == "all-linear" else modules if isinstance(modules, str) else ",".join(modules)
    )
    if values.get("modules_to_save"):
        config["additional_target"] = ",".join(values["modules_to_save"])
    if quantization:
        config |= {"quantization_method": "bnb", "upcast_layernorm": True}
        config["quantization_bit"] = 8 if "load_in_8bit" in quantization else 4
    if "load_in_4bit" in quantization:
        config["quantization_type"] = quantization["bnb_4bit_quant_type"]
        config["double_quantization"] = quantization["bnb_4bit_use_double_quant"]
    return config


def _fixes(request: EstimateRequest) -> dict[str, Any]:
    """The storage of packed weights that LLaMA-Factory sets, and the only engine that its configuration describes for a strategy."""
    fixed: dict[str, Any] = {}
    if request.load_in_4bit:
        fixed["bnb_4bit_quant_storage"] = compute_dtype(request.precision)
    if request.backend == "auto" and request.strategy in ("zero2", "zero3"):
        fixed["backend"] = "deepspeed"
    return fixed


TARGET = Target(
    name="llamafactory",
    description="LLaMA-Factory configuration (YAML)",
    file_name=LLAMAFACTORY_FILE,
    media_type="application/yaml",
    unsupported=unsupported,
    write=write,
    usage=lambda job, file: torchrun_line(job, f"-m llamafactory.launcher {file}"),
    consumer="llamafactory",
    framework="llamafactory",
    fixes=_fixes,
)
