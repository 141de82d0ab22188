"""Reads Python code that trains with Lightning: its Trainer or Fabric, their strategy and precision, and the module's model and optimizer.

Source: lightning 2.6.6, pytorch/trainer/trainer.py, strategies/{ddp,fsdp,deepspeed}.py, plugins/precision/fsdp.py, fabric/connector.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from fsdp_advisor.configs import deepspeed
from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.configs.fsdp import read_replicas
from fsdp_advisor.configs.loop_code import read_loop
from fsdp_advisor.configs.python_literals import calls_of, is_none, keywords_of, literal_of, variables_of
from fsdp_advisor.configs.sharding_code import (
    offloads_parameters,
    policy_of,
    read_precision,
    read_sharding,
    set_fsdp1,
)
from fsdp_advisor.job.unknown_options import DATA_PARALLEL

_PRECISIONS = {
    "32": ("no", None), "32-true": ("no", None), "16": ("fp16", None), "16-mixed": ("fp16", None), "bf16": ("bf16", None),
    "bf16-mixed": ("bf16", None), "bf16-true": ("no", "bfloat16"),
}  # fmt: skip
"""Lightning's precision -> (accelerate's name of the mixed precision, the dtype to which the weights are converted)."""
_DEEPSPEED = re.compile(r"deepspeed(?:_stage_([123]))?(_offload)?(_nvme)?")
_BUCKETS = {"sub_group_size": 10**12, "allgather_bucket_size": 2 * 10**8, "reduce_bucket_size": 2 * 10**8}
"""Lightning's own defaults of DeepSpeed's settings."""
_WITHOUT_EFFECT = (
    "accelerator", "callbacks", "logger", "loggers", "max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "log_every_n_steps",
    "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "default_root_dir", "val_check_interval",
    "check_val_every_n_epoch", "num_sanity_val_steps", "deterministic", "benchmark", "use_distributed_sampler",
)  # fmt: skip


def read(file: str, tree: ast.Module) -> Collector | None:
    """The settings of training with Lightning; None if the code does not import it."""
    if not _imports_lightning(tree):
        return None
    nodes = calls_of(tree)
    trainer = next((nodes[name][0] for name in ("Trainer", "Fabric") if name in nodes), None)
    if trainer is None:
        return None
    variables = variables_of(tree)
    keys = {key: value for key, value in keywords_of(trainer, variables).items() if key != "strategy"}
    found = read_loop(file, "Lightning", "torch", tree, nodes, variables, keys)
    for key in _WITHOUT_EFFECT:
        found.take(key)
    found.number("accumulate_grad_batches", "gradient_accumulation_steps")
    _read_ranks(found)
    _read_strategy(found, tree, trainer, nodes, variables)
    precision = str(found.take("precision") or "32-true")
    if precision not in _PRECISIONS:
        found.omits(f"precision: {precision}; the estimate assumes bf16-mixed")
    mixed, dtype = _PRECISIONS.get(precision, ("bf16", None))
    if not _has_policy(found, nodes):
        found.options["mixed"] = mixed
    if dtype is not None:
        found.options["dtype"] = dtype
    if found.options.get("backend") == "fsdp1" and mixed != "no" and not _has_policy(found, nodes):
        found.omits("Lightning's FSDP reduces gradients in 16 bits; the estimate in float32, which reserves more")
    if found.take("gradient_clip_val"):
        found.omits("gradient_clip_val: gradient clipping apart from the framework's")
    if "Trainer" in nodes:
        found.omits(
            "Lightning clears gradients between forward and backward: forward also has those of the step before"
        )
    return found


def _has_policy(found: Collector, nodes: Mapping[str, Sequence[ast.Call]]) -> bool:
    """Whether the code gives FSDP a mixed precision of its own, which then replaces that of Lightning's precision."""
    return {"fsdp1": "MixedPrecision", "fsdp2": "MixedPrecisionPolicy"}.get(found.options.get("backend", "")) in nodes


def _imports_lightning(tree: ast.Module) -> bool:
    names = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric") for name in names)


def _read_ranks(found: Collector) -> None:
    """Set the GPUs: the devices of a node, by number or by index, times the nodes."""
    devices, nodes = found.take("devices"), found.number("num_nodes", "nnodes") or 1
    if isinstance(devices, list | tuple):
        found.options["gpus"] = len(devices) * nodes
    elif isinstance(devices, int | str) and str(devices).isdecimal():
        found.options["gpus"] = int(devices) * nodes
    elif isinstance(devices, str) and "," in devices:
        found.options["gpus"] = len(devices.strip(" ,").split(",")) * nodes
    else:
        found.guess(
            "gpus",
            nodes,
            f"{nodes} GPU{'s' * (nodes > 1)}, because the code does not say how many devices a node has (--gpus)",
        )


def _read_strategy(
    found: Collector,
    tree: ast.Module,
    trainer: ast.Call,
    nodes: Mapping[str, Sequence[ast.Call]],
    variables: Mapping[str, Any],
) -> None:
    """Set strategy, backend, units, offload and checkpoints from the strategy's name or from the object that the code makes."""
    given = next((keyword.value for keyword in trainer.keywords if keyword.arg == "strategy"), None)
    name = "auto" if given is None else literal_of(given, variables)
    made = next((nodes[kind][0] for kind in _CLASSES if kind in nodes), None)
    if isinstance(name, str):
        found.reads(f"strategy: {name}")
    if name in ("fsdp", "fsdp_cpu_offload") or (name is None and "FSDPStrategy" in nodes):
        _read_fsdp(found, made, nodes, variables, offloads=name == "fsdp_cpu_offload")
    elif isinstance(name, str) and (of_name := _DEEPSPEED.fullmatch(name)) is not None:
        stage, offload, nvme = of_name.groups()
        parameters = bool(offload) and stage == "3"
        settings = {"stage": int(stage or 2), "offload_optimizer": bool(offload), "offload_parameters": parameters}
        devices = {"offload_optimizer_device": "nvme", "offload_params_device": "nvme"} if nvme else {}
        _read_deepspeed(found, settings | devices)
    elif name is None and "DeepSpeedStrategy" in nodes and made is not None:
        _read_deepspeed(found, keywords_of(made, variables))
    elif name is None and "ModelParallelStrategy" in nodes and made is not None:
        sizes = keywords_of(made, variables)
        if sizes.get("tensor_parallel_size") not in (None, "auto", 1):
            found.refuses(f"tensor_parallel_size: {sizes['tensor_parallel_size']} (tensor parallelism)", DATA_PARALLEL)
        read_sharding(found, tree, nodes, variables)
    else:
        found.options |= {"strategy": "ddp", "backend": "ddp"}
        if isinstance(name, str) and "find_unused_parameters_true" in name:
            found.omits("find_unused_parameters: DDP's search for parameters without a gradient")
        elif name is None and "DDPStrategy" not in nodes:
            found.assume("DDP, because the code computes its strategy")


_CLASSES = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "DDPStrategy")


def _read_fsdp(
    found: Collector,
    made: ast.Call | None,
    nodes: Mapping[str, Sequence[ast.Call]],
    variables: Mapping[str, Any],
    *,
    offloads: bool,
) -> None:
    """Set the options of FSDPStrategy, which is FSDP1 with original parameters. `made`: its call, if there is one."""
    keywords = {"use_orig_params": True} | ({} if made is None else keywords_of(made, variables))
    arguments = {} if made is None else {keyword.arg: keyword.value for keyword in made.keywords}
    set_fsdp1(found, keywords, offloads=offloads or offloads_parameters(nodes, keywords))
    if "MixedPrecision" in nodes:
        read_precision(found, nodes, variables)
    found.reads(", ".join(("FSDPStrategy", *(f"{key}: {ast.unparse(value)}" for key, value in arguments.items()))))
    if found.options["strategy"] != "ddp":
        found.options["wrap"] = policy_of(found, arguments.get("auto_wrap_policy"), nodes, variables)
        if "auto_wrap_policy" not in arguments and "wrap" in nodes:
            found.options["wrap"] = "layer"
            found.assume("one FSDP unit per layer, because the module calls wrap")
    mesh = keywords.get("device_mesh")
    if isinstance(mesh, tuple) and len(mesh) == 2 and prod(mesh) > 1:
        read_replicas(found, *mesh)
    policies = [arguments.get(key) for key in ("activation_checkpointing_policy", "activation_checkpointing")]
    if any(policy is not None and not is_none(policy) for policy in policies):
        found.options["activation_checkpointing"] = "full"


def _read_deepspeed(found: Collector, keywords: Mapping[str, Any]) -> None:
    """Read the configuration that Lightning makes from the keywords of DeepSpeedStrategy, or the one that it gets."""
    if isinstance(keywords.get("config"), str):
        found.replace("config", keywords["config"])
        found.refer("config")
        found.default("backend", "deepspeed")
        return
    if isinstance(keywords.get("config"), Mapping):
        deepspeed.read_embedded(found, keywords["config"])
        return
    zero: dict[str, Any] = {"stage": keywords.get("stage", 2)}
    for option, section, device in (
        ("offload_optimizer", "offload_optimizer", "offload_optimizer_device"),
        ("offload_parameters", "offload_param", "offload_params_device"),
    ):
        if keywords.get(option):
            zero[section] = {"device": keywords.get(device, "cpu")}
    zero |= {key: keywords.get(key, usual) for key, usual in _BUCKETS.items()}
    deepspeed.read_embedded(found, {"zero_optimization": zero, "bf16": {"enabled": "auto"}})
