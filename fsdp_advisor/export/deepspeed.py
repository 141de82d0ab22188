"""DeepSpeed's JSON configuration, with integers only: the batch, the buckets and offload as the estimate assumes them.

Where accelerate or the Trainer trains, the buckets are those that they fill in for "auto".

Source: deepspeed/runtime/config.py, zero/config.py, zero/offload_config.py, precision_config.py (0.19.8).
"""

from __future__ import annotations

import json
from typing import Any

from fsdp_advisor.engines.deepspeed.partitions import shard_elements
from fsdp_advisor.engines.deepspeed.settings import settings_for, stage
from fsdp_advisor.export.job import Job, Target, global_batch_size, no_bf16_masters_on_the_host
from fsdp_advisor.job.plan import OFFLOADS, Plan
from fsdp_advisor.policies.optimizers import optimizer_named
from fsdp_advisor.policies.optimizers.interface import Refusal

FILE = "ds_config.json"
NVME_PATH = "/local_nvme"
LEARNING_RATE = 1e-5
SWAP_BUFFER_ELEMENTS = 100_000_000
"""`offload_param.buffer_size`, DeepSpeed's default; a parameter's shard must fit into it."""

NVME_NOTE = f"nvme_path is {NVME_PATH}: put the mount point of a local NVMe drive there"


def cannot(job: Job) -> str | None:
    plan = job.plan
    if plan.backend != "deepspeed":
        able = "deepspeed" in OFFLOADS[plan.offload].get(plan.strategy, ())
        return "it shards with DeepSpeed" + (": --backend deepspeed" if able else "")
    return no_bf16_masters_on_the_host(plan)


def write(job: Job) -> tuple[str, tuple[str, ...]]:
    optimizer = _optimizer(job.plan)
    section = {} if isinstance(optimizer, Refusal) else optimizer
    config = {**_batch(job.plan), **engine(job), **section}
    notes: list[str] = []
    if job.plan.offload_device == "nvme" and job.plan.offload != "none":
        notes.append(NVME_NOTE)
    if isinstance(optimizer, Refusal):
        notes.append(optimizer.reason)
    elif not section:
        notes.append("the optimizer is the training loop's own, as accelerate hands it to DeepSpeed")
    else:
        notes.append(
            "a training loop of accelerate needs accelerate.utils.DummyOptim, for the optimizer is named in this file"
        )
    return json.dumps(config, indent=2), tuple(notes)


def through_trainer(job: Job) -> dict[str, Any]:
    """What Hugging Face's Trainer hands to DeepSpeed: "auto" follows its own arguments, the optimizer is its own too.

    Only bf16 masters on the host need DeepSpeed's, for Trainer would make a DeepSpeedCPUAdam with fp32 states.
    """
    config = dict.fromkeys(_batch(job.plan), "auto") | engine(job)
    if job.plan.precision == "bf16" and job.plan.offload != "none":
        config["optimizer"] = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
    return config


def _batch(plan: Plan) -> dict[str, int]:
    """DeepSpeed asserts that the first is the product of the others and the ranks."""
    return {
        "train_batch_size": global_batch_size(plan),
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
    }


def engine(job: Job) -> dict[str, Any]:
    """Precision, ZeRO and offload: what every way into DeepSpeed takes in the same words."""
    plan = job.plan
    config: dict[str, Any] = {"zero_optimization": _zero(job), "zero_allow_untested_optimizer": True}
    if plan.offload != "none" and not optimizer_named(plan.optim).is_cpu_adam:
        config["zero_force_ds_cpu_optimizer"] = False
    match plan.precision:
        case "bf16":
            config["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        case "bf16-mixed":
            config["bf16"] = {"enabled": True}
        case "fp16-mixed":
            config["fp16"] = {"enabled": True}
    return config


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


def _optimizer(plan: Plan) -> dict[str, Any] | Refusal:
    """The plan's optimizer; AdamW on the host is DeepSpeedCPUAdam.

    Source: deepspeed/runtime/engine.py, `_configure_basic_optimizer`: AdamW with `torch_adam` is torch's and takes its arguments,
    any name DeepSpeed does not know is one of torch.optim. Under a framework it is the training loop's own, but for bf16
    masters on the host.
    """
    if plan.prepared and not (plan.precision == "bf16" and plan.offload != "none"):
        return {}
    optimizer = optimizer_named(plan.optim)
    named = optimizer.deepspeed if plan.offload == "none" else optimizer.deepspeed_offloaded
    if isinstance(named, Refusal):
        return named
    return {"optimizer": {"type": named.name, "params": {"lr": LEARNING_RATE, **named.options}}}


TARGET = Target(
    name="deepspeed",
    description="DeepSpeed configuration (JSON)",
    file_name=FILE,
    media_type="application/json",
    checked=("deepspeed", "torch"),
    cannot=cannot,
    write=write,
    usage=lambda job, file: f"deepspeed --num_gpus {job.plan.ranks_per_node} train.py --deepspeed {file}",
    backend="deepspeed",
    framework="deepspeed",
)
