"""Reads accelerate's YAML, and the options of `accelerate launch`, which have the same names.

Source: accelerate 1.15.0, commands/config/config_args.py, commands/launch.py, utils/dataclasses.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.configs.fsdp import read_fsdp, read_replicas


def is_accelerate(keys: Mapping[str, Any]) -> bool:
    return "compute_environment" in keys or "distributed_type" in keys


def read(file: str, keys: Mapping[str, Any]) -> Collector:
    """The settings of a configuration of accelerate."""
    flat = dict(keys)
    for section in ("fsdp_config", "deepspeed_config", "parallelism_config"):
        if isinstance(flat.get(section), Mapping):
            flat |= flat.pop(section)
    found = Collector(file, "accelerate", flat)
    found.options["framework"] = "accelerate"
    found.number("num_processes", "gpus")
    found.number("num_machines", "nnodes")
    if (mixed := found.take("mixed_precision")) is not None:
        found.options["mixed"] = "no" if mixed is False else str(mixed)
    if mixed == "fp8":
        found.omits(
            "mixed_precision: fp8, for which accelerate has recipes of its own (torchao's leaves out the first and the last linear layer);"
            " the estimate assumes bf16"
        )
        found.options["mixed"] = "bf16"
    kind = str(found.take("distributed_type") or _kind_of_flags(found)).upper()
    match kind:
        case "FSDP":
            version = found.number("fsdp_version")
            read_fsdp(found, "fsdp_", version or 1)
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
    found.take("dynamo_config") if not found.peek("dynamo_config") else found.lacks("dynamo_config", "torch.compile")
    return found


def _kind_of_flags(found: Collector) -> str:
    """The kind of distribution that flags of a command line ask for."""
    for flag, kind in (("use_fsdp", "FSDP"), ("use_deepspeed", "DEEPSPEED"), ("multi_gpu", "MULTI_GPU")):
        if found.flag(flag):
            return kind
    return "NONE"


def _parallelism(found: Collector) -> None:
    prefix = "parallelism_config_"
    replicas, shards = (found.number(f"{prefix}dp_{name}_size") for name in ("replicate", "shard"))
    if replicas is not None or shards is not None:
        read_replicas(found, replicas, shards)
    found.lacks_active("tensor parallelism", f"{prefix}tp_size")
    found.lacks_active("context and sequence parallelism", f"{prefix}cp_size", f"{prefix}sp_size")


def _deepspeed(found: Collector) -> None:
    options = found.options
    options["backend"] = "deepspeed"
    if found.peek("deepspeed_config_file"):
        found.refer("deepspeed_config_file")
        found.take("zero3_init_flag")
        return
    stage = found.number("zero_stage")
    stage = 2 if stage is None else stage
    options["strategy"] = f"zero{stage}"
    states = str(found.take("offload_optimizer_device") or "none")
    parameters = str(found.take("offload_param_device") or "none")
    set_offload(found, states, parameters)
    found.take("zero3_init_flag")


def set_offload(found: Collector, states: str, parameters: str) -> None:
    """Set DeepSpeed's offload from the devices of optimizer states and parameters."""
    options = found.options
    options["offload"] = "parameters" if parameters != "none" else "optimizer" if states != "none" else "none"
    device = parameters if parameters != "none" else states
    if device != "none":
        options["offload_device"] = device
    if parameters != "none" and states == "none":
        found.omits("offload of parameters alone; the estimate also offloads gradients and optimizer states")
