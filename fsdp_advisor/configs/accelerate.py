"""Reads accelerate's YAML, and the options of `accelerate launch`, which have the same names.

Source: accelerate 1.15.0, commands/config/config_args.py, commands/launch.py, utils/dataclasses.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.configs.compilation import read_dynamo
from fsdp_advisor.configs.fsdp import OF_ACCELERATE, read_fsdp, read_replicas
from fsdp_advisor.configs.zero_buckets import DEFAULT_SIZES, set_buckets
from fsdp_advisor.errors import UsageError

OF_TRL: dict[str, dict[str, Any]] = {
    "single_gpu": {"distributed_type": "NO", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 1},
    "multi_gpu": {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 8},
    "fsdp1": {
        "distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 8, "fsdp_version": 1,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_forward_prefetch": True,
        "fsdp_reshard_after_forward": "FULL_SHARD",
    },
    "fsdp2": {
        "distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 8, "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True,
    },
    **{
        f"zero{stage}": {
            "distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 8, "zero_stage": stage,
        }
        for stage in (1, 2, 3)
    },
}  # fmt: skip
"""The configurations that `trl --accelerate_config NAME` names, without keys that have no effect. Source: TRL, accelerate_configs/."""


def is_accelerate(keys: Mapping[str, Any]) -> bool:
    return "compute_environment" in keys or "distributed_type" in keys


def read(file: str, keys: Mapping[str, Any]) -> Collector:
    """The settings of a configuration of accelerate."""
    flat = dict(keys)
    for section in ("fsdp_config", "deepspeed_config", "parallelism_config"):
        if isinstance(flat.get(section), Mapping):
            flat |= flat.pop(section)
    if isinstance(flat.get("dynamo_config"), Mapping):
        flat |= {
            f"dynamo_{str(key).removeprefix('dynamo_')}": value for key, value in flat.pop("dynamo_config").items()
        }
    found = Collector(file, "accelerate", flat)
    found.options["framework"] = "accelerate"
    found.number("num_processes", "gpus")
    found.number("num_machines", "nnodes")
    _precision(found)
    kind = str(found.take("distributed_type") or _kind_of_flags(found)).upper()
    match kind:
        case "FSDP":
            version = found.number("fsdp_version")
            read_fsdp(found, OF_ACCELERATE, version or 1, "none")
            _parallelism(found)
        case "DEEPSPEED":
            _deepspeed(found)
        case "MULTI_GPU" | "NO":
            found.options |= {"strategy": "ddp", "backend": "ddp"}
            if kind == "NO":
                found.default("gpus", 1, "1 GPU, because distributed_type is NO")
        case "NONE":
            pass
        case _:
            found.omits(f"distributed_type: {kind}")
    found.number("gradient_accumulation_steps", "gradient_accumulation_steps")
    read_dynamo(found)
    return found


def _precision(found: Collector) -> None:
    """Set the precision. If the file has no mixed precision, the Trainer's arguments may still switch it on."""
    mixed = found.take("mixed_precision")
    if mixed == "fp8":
        found.omits(
            "mixed_precision: fp8, for which accelerate has recipes of its own (torchao's leaves out the first and the last linear layer);"
            " the estimate assumes bf16"
        )
        mixed = "bf16"
    if mixed in ("bf16", "fp16"):
        found.options["mixed"] = mixed
    else:
        found.default("mixed", "no")


def _kind_of_flags(found: Collector) -> str:
    """The type of distributed training that the flags of a command line select."""
    for flag, kind in (("use_fsdp", "FSDP"), ("use_deepspeed", "DEEPSPEED"), ("multi_gpu", "MULTI_GPU")):
        if found.flag(flag):
            return kind
    return "NONE"


def _parallelism(found: Collector) -> None:
    prefix = "parallelism_config_"
    replicas, shards = (found.number(f"{prefix}dp_{name}_size") for name in ("replicate", "shard"))
    if replicas is not None or shards is not None:
        read_replicas(found, replicas, shards)
    found.omits_active("tensor parallelism", f"{prefix}tp_size")
    found.omits_active("context and sequence parallelism", f"{prefix}cp_size", f"{prefix}sp_size")


def _deepspeed(found: Collector) -> None:
    options = found.options
    options["backend"] = "deepspeed"
    if found.peek("deepspeed_config_file"):
        found.refer("deepspeed_config_file")
        found.take("zero3_init_flag")
        return
    states = str(found.take("offload_optimizer_device") or "none")
    parameters = str(found.take("offload_param_device") or "none")
    set_stage(found, found.number("zero_stage"), 2)
    set_buckets(options, DEFAULT_SIZES)  # without a file the plugin has no "auto" that accelerate would fill in
    set_offload(found, states, parameters)
    found.take("zero3_init_flag")


def set_stage(found: Collector, stage: int | None, default: int) -> None:
    """Set the strategy from DeepSpeed's ZeRO stage. None: the file has no stage, so `default` is assumed.

    Raises UsageError for a stage that does not exist.
    """
    if stage is None:
        found.default("strategy", _STRATEGIES[default], f"ZeRO stage {default}, the default")
    elif stage not in _STRATEGIES:
        raise UsageError(f"{found.file}: ZeRO stage {stage}", hint="stages are 0, 1, 2 and 3")
    if (default if stage is None else stage) == 0:
        found.options |= {"strategy": "ddp", "backend": "ddp"}
        found.omits(STAGE_0)
    elif stage is not None:
        found.options["strategy"] = _STRATEGIES[stage]


_STRATEGIES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
STAGE_0 = (
    "ZeRO stage 0: the estimate is of DDP, which also keeps everything on each rank; unlike DDP, DeepSpeed keeps fp32 masters of bf16"
    " or fp16 weights, and reduces gradients in flat copies after the backward"
)
"""Note on the differences between DeepSpeed without ZeRO and DDP, by which it is estimated. Source: deepspeed 0.19.8, runtime/engine.py,
_do_optimizer_sanity_check, _configure_fp16_optimizer, buffered_allreduce_fallback.
"""


def set_offload(found: Collector, states: str, parameters: str) -> None:
    """Set DeepSpeed's offload from the devices of optimizer states and parameters."""
    options = found.options
    if options.get("strategy") == "ddp":  # stage 0 ignores offload
        return
    options["offload"] = "parameters" if parameters != "none" else "optimizer" if states != "none" else "none"
    device = parameters if parameters != "none" else states
    if device != "none":
        options["offload_device"] = device
    if parameters != "none" and states == "none":
        found.omits("offload of parameters alone; the estimate also offloads gradients and optimizer states")
