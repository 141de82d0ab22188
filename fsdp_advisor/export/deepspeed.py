"""DeepSpeed's JSON configuration: the batch, the buckets and offload that the estimate assumes.

Every value is a number, never "auto", except values that only the Trainer's arguments contain. If accelerate or the Trainer
trains, the bucket sizes are those that they fill in for "auto".

Source: deepspeed/runtime/config.py, zero/config.py, zero/offload_config.py, precision_config.py (0.19.8).
"""

from __future__ import annotations

import json
from typing import Any

from fsdp_advisor.engines.deepspeed.partitions import shard_elements
from fsdp_advisor.engines.deepspeed.settings import settings_for, stage
from fsdp_advisor.errors import assert_never
from fsdp_advisor.export.batches import script_batch_limit
from fsdp_advisor.export.checkpointing import checkpointing_note, is_of_model, script_checkpointing_limit
from fsdp_advisor.export.constants import (
    DEEPSPEED_FILE,
    HOST_FILE,
    NVME_NOTE,
    NVME_PATH,
    SCRIPT,
)
from fsdp_advisor.export.job import Job
from fsdp_advisor.export.losses import script_loss_limit
from fsdp_advisor.export.target import Target
from fsdp_advisor.job.choices import Precision
from fsdp_advisor.job.compatibility import OFFLOADS
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.policies.optimizers.interface import Refusal

SWAP_BUFFER_ELEMENTS = 100_000_000
"""DeepSpeed's default of `offload_param.buffer_size`, in elements. The shard of every parameter must fit into it."""


def unsupported(job: Job) -> str | None:
    """Why DeepSpeed cannot train the job; None if it can."""
    plan = job.plan
    if plan.backend != "deepspeed":
        able = "deepspeed" in OFFLOADS[plan.offload].get(plan.strategy, ())
        return "it shards only with DeepSpeed" + ("; use --backend deepspeed" if able else "")
    return (
        script_loss_limit(job)
        or script_batch_limit(job)
        or script_checkpointing_limit(job)
        or host_optimizer_limit(plan)
    )


def host_optimizer_limit(plan: Plan) -> str | None:
    """Why DeepSpeed cannot step the optimizer on the host: with bf16 master weights it has only AdamW there. None if it can.

    Source: deepspeed/runtime/base_optimizer.py (0.19.8), ZeROOptimizer._configure_master_weights.
    """
    on_host = plan.backend == "deepspeed" and plan.offload != "none"
    if on_host and plan.precision == "bf16" and not optimizer_of(plan).is_cpu_adam:
        return "DeepSpeed offloads bf16 master weights only with AdamW"
    return None


def write(job: Job) -> tuple[str, tuple[str, ...]]:
    """The configuration, and notes on what it cannot set."""
    optimizer = _optimizer(job.plan, job.learning_rate)
    section = {} if isinstance(optimizer, Refusal) else optimizer
    config = {**_batch(job), **engine(job), **section}
    notes: list[str] = []
    if job.offloads_to_nvme:
        notes.append(NVME_NOTE)
    if job.adaptation.text:
        notes.append(f"the script adapts the model ({job.adaptation.text}); a bundle (-o DIR/) has one that does")
    if is_of_model(job):
        notes.append(checkpointing_note(job))
    if isinstance(optimizer, Refusal):
        notes.append(optimizer.reason)
    elif not section:
        notes.append("the training loop creates the optimizer, and accelerate passes it to DeepSpeed")
    else:
        notes.append(
            "a training loop with accelerate needs accelerate.utils.DummyOptim, because this file names the optimizer"
        )
    return json.dumps(config, indent=2), tuple(notes)


def names_optimizer(plan: Plan) -> bool:
    """Whether the file has an optimizer section. If not, the training script creates the optimizer."""
    optimizer = _optimizer(plan)
    return not isinstance(optimizer, Refusal) and bool(optimizer)


def through_trainer(job: Job) -> dict[str, Any]:
    """The configuration that Hugging Face's Trainer passes to DeepSpeed.

    DeepSpeed's "auto" is replaced by the Trainer's own argument. The Trainer also creates the optimizer, with two exceptions: Muon is
    DeepSpeed's own, and for bf16 master weights on the host it would create a DeepSpeedCPUAdam with fp32 states, so the configuration names
    AdamW instead.
    """
    config = dict.fromkeys(_batch(job), "auto") | engine(job)
    return config | (_of_trainer(job.plan) if _is_named(job.plan) else {})


def _is_named(plan: Plan) -> bool:
    """Whether the configuration has to name the optimizer although accelerate or the Trainer could create one."""
    return optimizer_of(plan).is_deepspeeds or (plan.precision == "bf16" and plan.offload != "none")


def _of_trainer(plan: Plan) -> dict[str, Any]:
    """An optimizer section with "auto" values, which the Trainer fills in. (It refuses values that differ from its own arguments.)"""
    name = "Muon" if optimizer_of(plan).is_deepspeeds else "AdamW"
    return {"optimizer": {"type": name, "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}}


def _batch(job: Job) -> dict[str, int]:
    """The batch sizes. DeepSpeed asserts that `train_batch_size` is micro-batch x accumulation x ranks."""
    return {
        "train_batch_size": job.plan.global_batch_size,
        "train_micro_batch_size_per_gpu": job.plan.micro_batch_size,
        "gradient_accumulation_steps": job.plan.gradient_accumulation_steps,
    }


def engine(job: Job) -> dict[str, Any]:
    """The sections for precision, ZeRO and offload, which are the same for every training loop."""
    plan = job.plan
    config: dict[str, Any] = {"zero_optimization": _zero(job), "zero_allow_untested_optimizer": True}
    if plan.offload != "none" and not optimizer_of(plan).is_cpu_adam:
        config["zero_force_ds_cpu_optimizer"] = False
    return config | precision_section(plan.precision)


def precision_section(precision: Precision) -> dict[str, Any]:
    """The section `bf16` or `fp16` of a DeepSpeed configuration; empty for fp32."""
    match precision:
        case "bf16":
            return {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
        case "bf16-mixed":
            return {"bf16": {"enabled": True}}
        case "fp16-mixed":
            return {"fp16": {"enabled": True}}
        case "fp32":
            return {}
        case _:
            assert_never(precision)


def _zero(job: Job) -> dict[str, Any]:
    plan = job.plan
    settings = settings_for(job.hidden_size, plan)
    zero: dict[str, Any] = {"stage": stage(plan), "reduce_bucket_size": settings.reduce_bucket_size}
    if stage(plan) == 3:
        zero |= {
            "sub_group_size": settings.sub_group_size,
            "stage3_prefetch_bucket_size": settings.prefetch_bucket_size,
            "stage3_param_persistence_threshold": settings.param_persistence_threshold,
            "stage3_max_live_parameters": settings.max_live_parameters,
            "stage3_max_reuse_distance": settings.max_reuse_distance,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
        if optimizer_of(plan).is_deepspeeds:
            zero["reduce_scatter"] = False  # DeepSpeed's Muon refuses it under stage 3
    if plan.offload != "none":
        zero["offload_optimizer"] = _place(plan)
    if plan.offload == "parameters":
        zero["offload_param"] = _place(plan)
        if plan.offload_device == "nvme":
            largest = shard_elements(job.largest_parameter_elements or 0, plan.shard_degree)
            zero["offload_param"]["buffer_size"] = max(SWAP_BUFFER_ELEMENTS, largest)
    return zero


def _place(plan: Plan) -> dict[str, Any]:
    place: dict[str, Any] = {"device": plan.offload_device, "pin_memory": True}
    if plan.offload_device == "nvme":
        place["nvme_path"] = NVME_PATH
    return place


def _optimizer(plan: Plan, learning_rate: float = 0.0) -> dict[str, Any] | Refusal:
    """The optimizer section; empty if the training loop creates the optimizer, a Refusal if DeepSpeed cannot create it.

    AdamW on the host is DeepSpeedCPUAdam. accelerate and the Trainer create the optimizer, except for Muon and for bf16 master weights
    on the host. Source: deepspeed/runtime/engine.py, `_configure_basic_optimizer`: AdamW with `torch_adam` is torch's and takes
    torch's arguments; a name that DeepSpeed does not know is looked up in torch.optim.
    """
    optimizer = optimizer_of(plan)
    if plan.uses_accelerate and not _is_named(plan):
        return {}
    if plan.facts.uses_trainer:
        return _of_trainer(plan)
    named = optimizer.deepspeed if plan.offload == "none" else optimizer.deepspeed_offloaded
    if isinstance(named, Refusal):
        return named
    return {"optimizer": {"type": named.name, "params": {"lr": learning_rate, **named.options}}}


def _usage(job: Job, file: str) -> str:
    plan = job.plan
    nodes = f"--hostfile {HOST_FILE} --num_nodes {plan.nnodes} " if plan.nnodes > 1 else ""
    return f"deepspeed {nodes}--num_gpus {plan.ranks_per_node} {SCRIPT} --deepspeed {file}"


TARGET = Target(
    name="deepspeed",
    description="DeepSpeed configuration (JSON)",
    file_name=DEEPSPEED_FILE,
    media_type="application/json",
    unsupported=unsupported,
    write=write,
    usage=_usage,
    consumer=None,
    backend="deepspeed",
    framework="deepspeed",
)
