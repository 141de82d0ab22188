"""Reads torchtitan's configurations: TOML (until 0.2), functions that return `Trainer.Config` (0.3), and its options.

Source: torchtitan 0.3.0, config/configs.py, config/manager.py, distributed/activation_checkpoint.py; 0.2.2, config/job_config.py.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, get_args

from fsdp_advisor.configs.collect import Collector, brief
from fsdp_advisor.configs.names import hub_name
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.choices import Fp8

SECTIONS = (
    "training", "parallelism", "activation_checkpoint", "model", "optimizer", "compile", "quantize", "float8", "job", "checkpoint",
    "metrics", "profiling", "lr_scheduler", "comm", "validation", "debug", "experimental", "loss",
)  # fmt: skip
_TOPICS = {
    "tensor parallelism": ("parallelism.tensor_parallel_degree",),
    "pipeline parallelism": ("parallelism.pipeline_parallel_degree",),
    "context and sequence parallelism": ("parallelism.context_parallel_degree",),
    "expert parallelism": ("parallelism.expert_parallel_degree",),
    "precisions below bf16, but float8 of linear layers": ("model.converters",),
}
_FLOAT8 = "quantize.linear.float8"
"""torchtitan 0.2's section on torchao's float8, and the name of its converter; until 0.1 both were ``float8``."""


def is_torchtitan(keys: Mapping[str, Any]) -> bool:
    return isinstance(keys.get("training"), Mapping) and bool(
        {"model", "parallelism", "activation_checkpoint", "job"} & set(keys)
    )


def read(file: str, keys: Mapping[str, Any]) -> Collector:
    """The settings of nested sections. torchtitan shards with FSDP2, one unit per layer."""
    found = Collector(file, "torchtitan", keys)
    options = found.options
    options["framework"] = "torch"
    for section in (*SECTIONS, "quantize.linear", _FLOAT8):
        found.section(section)
    _model(found)
    for key in ("training.local_batch_size", "training.batch_size"):
        found.number(key, "micro_batch_size")
    found.default("micro_batch_size", 8, "micro-batch 8, torchtitan's default of local_batch_size")
    found.number("training.seq_len", "seq_len")
    found.default("seq_len", 2048, "2048 tokens, torchtitan's default of seq_len")
    if (found.peek("training.global_batch_size") or -1) != -1:
        found.lacks("training.global_batch_size", "give --gradient-accumulation-steps")
    computes, weights = (str(found.take(f"training.{key}") or "") for key in ("mixed_precision_param", "dtype"))
    bf16_weights = weights == "bfloat16"
    options["precision"] = "bf16" if bf16_weights else "fp32" if computes == "float32" else "bf16-mixed"
    found.take("training.mixed_precision_reduce")
    if found.flag("training.enable_cpu_offload"):
        options["offload"] = "parameters"
    _checkpointing(found)
    _compile(found)
    _fp8(found)
    _optimizer(found)
    _parallelism(found)
    for topic, names in _TOPICS.items():
        found.lacks_active(topic, *names)
    if "Chunked" in brief(found.peek("loss")):
        found.lacks("loss", "chunked loss; the estimate assumes that all logits are in memory at once")
    return found


def _model(found: Collector) -> None:
    name, flavor = str(found.take("model.name") or ""), str(found.take("model.flavor") or "")
    assets = PurePosixPath(str(found.take("model.hf_assets_path") or found.take("hf_assets_path") or "")).name
    model = None
    if name.startswith("llama3") and flavor in ("8B", "70B", "405B"):
        model = f"meta-llama/Llama-3.1-{flavor}"
    elif name.startswith("qwen3") and flavor:
        model = f"Qwen/Qwen3-{flavor}"
    elif assets:
        model = hub_name(assets)
    if model is not None:
        found.options["model"] = model
        found.assume(f"the model is {model}")


def _checkpointing(found: Collector) -> None:
    mode = found.peek("activation_checkpoint.mode") or found.peek("activation_checkpoint")
    words = brief(mode or "").lower()
    key = "activation_checkpoint.mode" if "activation_checkpoint.mode" in found else "activation_checkpoint"
    if "budget" in words:
        found.lacks(key, "a memory budget for the compiler; the estimate assumes no activation checkpointing")
    elif "selective" in words:
        found.take(key)
        found.options["activation_checkpointing"] = _selective(found)
    elif "full" in words:
        found.take(key)
        found.options["activation_checkpointing"] = "full"
    else:
        found.take(key)


def _compile(found: Collector) -> None:
    """torch.compile of each layer, and of the loss. Source: torchtitan 0.3.0, distributed/compile.py; config/configs.py, CompileConfig."""
    if found.flag("training.compile") or found.flag("compile.enable"):
        components = found.take("compile.components") or ["model", "loss"]
        if "model" in components and found.options.get("activation_checkpointing", "none") not in ("none", "full"):
            found.omits(
                "compile.enable: torch.compile with selective checkpointing; the estimate has layers as they are"
            )
        elif "model" in components:
            found.options["compile"] = "layer"
        if "loss" in components:
            found.omits("compile.components: torch.compile of the loss; the estimate has the loss as it is")


def _fp8(found: Collector) -> None:
    """torchao's float8 of linear layers, which a converter switches on.

    Source: torchtitan 0.2.2, components/quantization/float8.py, `Float8LinearConverter`; config/job_config.py, Float8Linear.
    """
    converters = found.peek("model.converters")
    named = converters.split(",") if isinstance(converters, str) else converters or []
    section = next((name for name in (_FLOAT8, "float8") if name in named), None)
    if section is None:
        return
    if len(named) == 1:
        found.take("model.converters")
    recipe = str(found.peek(f"{section}.recipe_name") or "tensorwise")
    if recipe not in get_args(Fp8):
        found.lacks(f"{section}.recipe_name", "this recipe; the estimate has no fp8")
        return
    found.take(f"{section}.recipe_name")
    found.options["fp8"] = recipe
    if found.flag(f"{section}.enable_fsdp_float8_all_gather"):
        found.omits(f"{section}.enable_fsdp_float8_all_gather; the estimate gathers weights in the compute dtype")
    found.flag(f"{section}.precompute_float8_dynamic_scale_for_fsdp")
    left_out = found.take(f"{section}.filter_fqns") or []
    if set(left_out) != {"output"}:
        found.omits(f"{section}.filter_fqns; the estimate leaves out the head alone")


def _selective(found: Collector) -> str:
    """The policy of torchtitan 0.2's `selective_ac_option`: its operators (`op`), or one of N layers."""
    option = str(found.take("activation_checkpoint.selective_ac_option") or "op")
    if not option.isdecimal() or int(option) < 2:
        return "selective" if option == "op" else "full"
    found.assume(f"the first of each {option} layers is checkpointed; torchtitan checkpoints the last")
    return f"every-{option}"


def _optimizer(found: Collector) -> None:
    name = found.peek("optimizer.name")
    implementation = str(found.take("optimizer.implementation") or "fused")
    if name in (None, "AdamW", "Adam"):
        found.take("optimizer.name")
        found.options["optim"] = "adamw_torch_fused" if implementation == "fused" else "adamw_torch"
    else:
        found.lacks("optimizer.name", "the optimizer is not modelled; the estimate assumes adamw_torch_fused")


def _parallelism(found: Collector) -> None:
    """-1 shards over all ranks that the other degrees leave."""
    options = found.options
    replicas = found.number("parallelism.data_parallel_replicate_degree") or 1
    shards = found.number("parallelism.data_parallel_shard_degree") or -1
    reshard = found.take("parallelism.fsdp_reshard_after_forward")
    if replicas > 1:
        options["strategy"] = "ddp" if shards == 1 else "hsdp"
        if shards != 1:
            found.default("nnodes", replicas, f"{replicas} nodes, one for each replica")
    else:
        options["strategy"] = "zero2" if reshard == "never" else "zero3"
    options["backend"] = "ddp" if options["strategy"] == "ddp" else "fsdp2"
    if shards > 0 and replicas * shards > 1:
        found.default("gpus", replicas * shards, f"{replicas * shards} GPUs, the size of the mesh")


def sections_of(tree: ast.Module, function: str | None, file: str) -> dict[str, Any] | None:
    """The literal arguments of `Trainer.Config(...)` in a function, as sections; None if the module has no such function.

    Raises UsageError if there are several and `function` names none of them.
    """
    calls: dict[str, ast.Call] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            for inner in ast.walk(node):
                if (
                    isinstance(inner, ast.Return)
                    and isinstance(inner.value, ast.Call)
                    and _name(inner.value.func) == "Trainer.Config"
                ):
                    calls[node.name] = inner.value
    if not calls:
        return None
    if (function is None and len(calls) > 1) or (function is not None and function not in calls):
        shown = ", ".join(sorted(calls)[:8])
        raise UsageError(f"{file}: which configuration function?", hint=f"write {file}:NAME, NAME being one of {shown}")
    return {k.arg: _value(k.value) for k in calls[function or next(iter(calls))].keywords if k.arg}


def _name(node: ast.expr) -> str:
    return ast.unparse(node)


def _value(node: ast.expr) -> Any:
    """A literal as it is, a call as the dictionary of its arguments or its name, and anything else as its source."""
    if isinstance(node, ast.Call):
        arguments = {k.arg: _value(k.value) for k in node.keywords if k.arg}
        name = _name(node.func)
        if name.endswith("AC.Config"):
            return {"mode": name.removesuffix(".Config"), **arguments}
        return (
            arguments
            if name.endswith("Config") and not name.endswith("Wrapper.Config") and arguments
            else ast.unparse(node)
        )
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
