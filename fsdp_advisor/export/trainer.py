"""Arguments for Hugging Face's Trainer, as a Python file that a training script imports.

Source: transformers 5.23.0, training_args.py (`TrainingArguments`, `_process_fsdp_args`), trainer.py; accelerate 1.15.0.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from fsdp_advisor.export import accelerate, deepspeed
from fsdp_advisor.export.job import (
    WEIGHTS,
    Job,
    Target,
    comments,
    header,
    no_8bit_on_fsdp2,
    no_bf16_masters_on_the_host,
    no_single_shard,
    refused,
    transformers_optimizer,
)
from fsdp_advisor.export.rendering import render
from fsdp_advisor.export.script import AUTO
from fsdp_advisor.job.plan import Plan


def cannot(job: Job) -> str | None:
    plan = job.plan
    if job.task is None:
        return "a bare parameter count is no model"
    return (
        refused(job, "trainer") or no_8bit_on_fsdp2(plan) or no_single_shard(plan) or no_bf16_masters_on_the_host(plan)
    )


def write(job: Job) -> tuple[str, tuple[str, ...]]:
    plan = job.plan
    text = render(
        "trainer.py.jinja",
        header=comments(header(job, *TARGET.checked)),
        model=job.model_name,
        auto=AUTO[job.task or ""],
        model_arguments=_model_arguments(plan),
        arguments=_arguments(job),
        replicas=plan.replica_degree if _replicated(plan) else None,
        shards=plan.shard_degree,
    )
    notes = accelerate.behaviour(plan)
    if plan.offload_device == "nvme" and plan.offload != "none":
        notes.append(deepspeed.NVME_NOTE)
    return text, tuple(notes)


def _replicated(plan: Plan) -> bool:
    return plan.backend == "fsdp2" and plan.strategy == "hsdp" and plan.replica_degree > 1


def _model_arguments(plan: Plan) -> dict[str, Any]:
    """What `from_pretrained` is to be told. sdpa is left to transformers, which takes eager where a model has no sdpa."""
    attention = {} if plan.attention == "sdpa" else {"attn_implementation": plan.attention}
    return {"dtype": WEIGHTS[plan.precision], **attention}


def _arguments(job: Job) -> dict[str, Any]:
    plan, optimizer = job.plan, transformers_optimizer(job.plan)
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "learning_rate": deepspeed.LEARNING_RATE,
        "optim": optimizer.name,
    }
    if optimizer.options:
        arguments["optim_args"] = ",".join(f"{name}={value}" for name, value in optimizer.options.items())
    if plan.precision == "fp16-mixed":
        arguments["fp16"] = True
    elif plan.precision == "bf16-mixed" or (plan.precision == "bf16" and plan.backend == "deepspeed"):
        arguments["bf16"] = True  # DeepSpeed's section must say the same, whatever its master weights are
    checkpointing = plan.activation_checkpointing == "full"
    if plan.backend in ("fsdp1", "fsdp2"):
        arguments |= {"fsdp": True, "fsdp_config": _fsdp(job)}
        if plan.gradient_accumulation_steps > 1 and not plan.defers_reduction:
            arguments["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        return arguments
    if checkpointing:
        arguments |= {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
    if plan.backend == "deepspeed":
        arguments["deepspeed"] = deepspeed.through_trainer(job)
    return arguments


def _fsdp(job: Job) -> dict[str, Any]:
    plan = job.plan
    config: dict[str, Any] = {
        "version": 2 if plan.backend == "fsdp2" else 1,
        "reshard_after_forward": plan.strategy in ("zero3", "hsdp"),
        "auto_wrap_policy": accelerate.WRAP_POLICY[plan.wrap],
        **({"transformer_layer_cls_to_wrap": list(job.layer_classes)} if plan.wrap == "layer" else {}),
        "cpu_offload": plan.offload == "parameters",
        "activation_checkpointing": plan.activation_checkpointing == "full",
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    if plan.backend == "fsdp1":
        config |= {
            "reshard_after_forward": "full_shard",
            "backward_prefetch": accelerate.FSDP1_PREFETCH[plan.backward_prefetch].lower(),
            "forward_prefetch": False,
            "use_orig_params": True,
            "sync_module_states": True,
        }
    return config


TARGET = Target(
    name="trainer",
    description="Hugging Face TrainingArguments (Python)",
    file_name="training_arguments.py",
    media_type="text/x-python",
    checked=("transformers", "accelerate", "torch"),
    cannot=cannot,
    write=write,
    usage=lambda job, file: f"from {PurePath(file).stem} import training_arguments",
    framework="trainer",
    command=False,
)
