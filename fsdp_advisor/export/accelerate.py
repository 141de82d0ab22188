"""A configuration for `accelerate launch --config_file`: FSDP2, FSDP1, DeepSpeed or DDP.

Source: accelerate 1.15.0, commands/config/config_args.py (ClusterConfig), commands/launch.py, utils/dataclasses.py
(FullyShardedDataParallelPlugin, DeepSpeedPlugin), parallelism_config.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_advisor.engines.deepspeed.settings import stage
from fsdp_advisor.engines.fsdp1.sharding import PREFETCH_NAMES, sharding_name
from fsdp_advisor.errors import assert_never
from fsdp_advisor.export import deepspeed
from fsdp_advisor.export.adapters import weights
from fsdp_advisor.export.batches import script_batch_limit
from fsdp_advisor.export.checkpointing import checkpointing_note, is_of_model, script_checkpointing_limit
from fsdp_advisor.export.constants import (
    ACCELERATE_FILE,
    ACCELERATE_PORT,
    DEEPSPEED_FILE,
    HEAD_NODE,
    MIXED,
    PACKAGES,
    SCRIPT,
    WRAP_POLICY,
)
from fsdp_advisor.export.header import yaml_text
from fsdp_advisor.export.job import Job
from fsdp_advisor.export.limits import framework_limit, optimizer_limit
from fsdp_advisor.export.losses import script_loss_limit
from fsdp_advisor.export.target import Target
from fsdp_advisor.job.choices import Framework
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.refusals import has_whole_replicas
from fsdp_advisor.policies.optimizers import optimizer_of


def unsupported(job: Job, framework: Framework = "accelerate") -> str | None:
    """Why `framework`, which trains through accelerate, cannot train the job; None if it can."""
    return (
        framework_limit(job, framework)
        or optimizer_limit(job.plan, framework)
        or ("replicas of one GPU each are DDP, not HSDP" if has_whole_replicas(job.plan) else None)
        or deepspeed.host_optimizer_limit(job.plan)
    )


def config_unsupported(job: Job) -> str | None:
    """Why a script under `accelerate launch` cannot train the job."""
    limit = script_checkpointing_limit(job)
    return script_loss_limit(job) or script_batch_limit(job) or limit or unsupported(job)


def write(job: Job) -> tuple[str, tuple[str, ...]]:
    """The configuration, and notes on what it cannot set."""
    return yaml_text(_config(job), job, *PACKAGES["accelerate"]), tuple(_notes(job))


def _config(job: Job) -> dict[str, Any]:
    plan = job.plan
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(plan),
        "mixed_precision": MIXED[plan.precision],
        "num_machines": plan.nnodes,
        "num_processes": plan.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
        "debug": False,
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
    }
    if plan.compile != "none":
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"}
        if plan.compile == "layer":
            config["dynamo_config"]["dynamo_use_regional_compilation"] = True
    if plan.nnodes > 1:
        config |= {"main_process_ip": HEAD_NODE, "main_process_port": ACCELERATE_PORT}
    match plan.backend:
        case "fsdp2":
            config["fsdp_config"] = _fsdp(job) | _fsdp2(plan)
            if plan.strategy == "hsdp" and plan.replica_degree > 1:
                config["parallelism_config"] = {
                    "parallelism_config_dp_replicate_size": plan.replica_degree,
                    "parallelism_config_dp_shard_size": plan.shard_degree,
                }
        case "fsdp1":
            config["fsdp_config"] = _fsdp(job) | _fsdp1(plan)
        case "deepspeed":
            config["deepspeed_config"] = _deepspeed(plan)
            if needs_a_file(plan):  # accelerate refuses a precision that is set twice
                del config["mixed_precision"]
        case "ddp":
            pass
        case _:
            assert_never(plan.backend)
    return config


def _distributed_type(plan: Plan) -> str:
    if plan.backend == "ddp":
        return "MULTI_GPU" if plan.world_size > 1 else "NO"
    return "DEEPSPEED" if plan.backend == "deepspeed" else "FSDP"


def _fsdp(job: Job) -> dict[str, Any]:
    """The options that FSDP1 and FSDP2 share. Without a class to wrap, accelerate uses the model's `_no_split_modules`."""
    plan = job.plan
    wrap: dict[str, Any] = {"fsdp_auto_wrap_policy": WRAP_POLICY[plan.wrap_policy.kind]}
    if job.wrapped_classes:
        wrap["fsdp_transformer_layer_cls_to_wrap"] = ",".join(job.wrapped_classes)
    if plan.wrap_policy.kind == "size":
        wrap["fsdp_min_num_params"] = plan.wrap_policy.number
    return {
        "fsdp_version": 2 if plan.backend == "fsdp2" else 1,
        **wrap,
        "fsdp_offload_params": plan.offload == "parameters",
        "fsdp_activation_checkpointing": plan.checkpointing != "none" and not is_of_model(job),
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": f"{plan.saves_as.upper()}_STATE_DICT",
    }


def _fsdp2(plan: Plan) -> dict[str, Any]:
    return {"fsdp_reshard_after_forward": plan.reshards}


def _fsdp1(plan: Plan) -> dict[str, Any]:
    return {
        "fsdp_sharding_strategy": sharding_name(plan),
        "fsdp_backward_prefetch": PREFETCH_NAMES[plan.backward_prefetch],
        "fsdp_forward_prefetch": plan.forward_prefetch,
        "fsdp_use_orig_params": plan.use_orig_params,
        "fsdp_sync_module_states": True,
    }


def needs_a_file(plan: Plan) -> bool:
    """Whether the plan needs settings that only DeepSpeed's own configuration file can express.

    These are bf16 master weights, the NVMe path, optimizers other than AdamW on the host, DeepSpeed's Muon, and bucket sizes other than
    DeepSpeed's defaults. (accelerate's launcher ignores `offload_*_nvme_path`: utils/launch.py, prepare_deepspeed_cmd_env.)
    Without a file, the plugin does not write the bucket sizes that it would fill in for "auto" (utils/dataclasses.py,
    DeepSpeedPlugin.__post_init__).
    """
    if plan.precision == "bf16" or plan.uses_accelerate or plan.zero_buckets or optimizer_of(plan).is_deepspeeds:
        return True
    return plan.offload != "none" and (plan.offload_device == "nvme" or not optimizer_of(plan).is_cpu_adam)


def _deepspeed(plan: Plan) -> dict[str, Any]:
    launcher = {"deepspeed_multinode_launcher": "standard"} if plan.nnodes > 1 else {}
    if needs_a_file(plan):
        return {"deepspeed_config_file": DEEPSPEED_FILE, "zero3_init_flag": stage(plan) == 3, **launcher}
    return {
        "zero_stage": stage(plan),
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "offload_optimizer_device": plan.offload_device if plan.offload != "none" else "none",
        "offload_param_device": plan.offload_device if plan.offload == "parameters" else "none",
        "zero3_init_flag": stage(plan) == 3,
        "zero3_save_16bit_model": stage(plan) == 3,
        **launcher,
    }


def usage(job: Job, file: str) -> str:
    """The command that starts the training on one node. Placeholders stand for the node's rank and the first node."""
    nodes = ""
    if job.plan.nnodes > 1:
        nodes = f" --machine_rank RANK --main_process_ip {HEAD_NODE} --main_process_port {ACCELERATE_PORT}"
    return f"accelerate launch --config_file {file}{nodes} {SCRIPT}"


def _notes(job: Job) -> list[str]:
    plan = job.plan
    notes = difference_notes(plan)
    if job.adaptation.text:
        notes.append(f"the script adapts the model ({job.adaptation.text}); a bundle (-o DIR/) has one that does")
    if plan.backend == "ddp" or (plan.backend != "deepspeed" and (not plan.mixed or plan.dtype != "auto")):
        notes.append(f"load the model with dtype=torch.{weights(job)}: accelerate leaves the weights as they are")
    if plan.nnodes > 1:
        notes.append(f"on every node, pass --machine_rank RANK --main_process_ip HOST; HOST replaces {HEAD_NODE}")
    if plan.backend == "deepspeed" and needs_a_file(plan):
        notes.append(f"it reads {DEEPSPEED_FILE}: {job.command('deepspeed', DEEPSPEED_FILE)}")
    if is_of_model(job):
        notes.append(checkpointing_note(job))
    if plan.gradient_accumulation_steps > 1 and plan.backend in ("fsdp1", "fsdp2"):
        notes.append(_accumulation(plan))
    return notes


def _accumulation(plan: Plan) -> str:
    plugin = f"GradientAccumulationPlugin(num_steps={plan.gradient_accumulation_steps}, sync_each_batch=True)"
    if plan.defers_reduction:
        return (
            "gradients stay unsharded until the last micro-batch, as predicted; "
            f"to reduce them after each micro-batch and save memory, pass {plugin}"
        )
    return f"the estimate assumes that gradients are reduced after each micro-batch: pass {plugin}"


def difference_notes(plan: Plan) -> list[str]:
    """Notes on how training through accelerate differs from plain PyTorch. Empty if accelerate was estimated, for
    DDP and DeepSpeed, and for FSDP1 without mixed precision.
    """
    if plan.uses_accelerate:
        return []
    differs = plan.mixed and replace(plan, framework="accelerate").reduce_bytes != plan.reduce_bytes
    reduction = [f"reduces gradients in {MIXED[plan.precision]}, not fp32"] if differs else []
    match plan.backend:
        case "fsdp2":
            differences = ["wraps the embedding and the head as separate units", *reduction]
        case "fsdp1":
            differences = [*reduction, "runs the model under autocast as well"] if plan.mixed else []
        case "ddp" | "deepspeed":
            differences = []
        case _:
            assert_never(plan.backend)
    return [f"accelerate {', and '.join(differences)}; the estimate is for plain PyTorch"] if differences else []


TARGET = Target(
    name="accelerate",
    description="accelerate launch configuration (YAML)",
    file_name=ACCELERATE_FILE,
    media_type="application/yaml",
    unsupported=config_unsupported,
    write=write,
    usage=usage,
    consumer="accelerate",
    framework="accelerate",
    compiles="regions",
)
