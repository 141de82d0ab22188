"""Reads torchtitan's configurations: TOML (until 0.2), functions that return `Trainer.Config` (0.3), and its options.

Source: torchtitan 0.3.0, config/configs.py, config/manager.py, distributed/activation_checkpoint.py; 0.2.2, config/job_config.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, get_args

from fsdp_advisor.configs.collect import Collector, brief
from fsdp_advisor.configs.names import hub_name
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.choices import Fp8
from fsdp_advisor.job.frameworks import TORCHTITAN_CHUNKS

SECTIONS = (
    "training", "parallelism", "activation_checkpoint", "model", "optimizer", "compile", "quantize", "float8", "job", "checkpoint",
    "metrics", "profiling", "lr_scheduler", "comm", "validation", "debug", "experimental", "loss",
)  # fmt: skip
_TOPICS = {
    "tensor parallelism": ("parallelism.tensor_parallel_degree",),
    "pipeline parallelism": ("parallelism.pipeline_parallel_degree",),
    "context and sequence parallelism": ("parallelism.context_parallel_degree",),
    "expert parallelism": ("parallelism.expert_parallel_degree",),
    "precisions below bf16, except float8 and MXFP8 of linear layers": ("model.converters",),
}
_FLOAT8 = "quantize.linear.float8"
"""The name of torchtitan 0.2's section on torchao's float8 and of its converter. Until 0.1 both were called ``float8``."""
_MX = "quantize.linear.mx"
"""The name of torchtitan 0.2's section on torchao's MXFP8 and of its converter."""
_MEMORY_BUDGET = 0.5
"""The compiler's memory budget if a file enables it without a value. Source: torchtitan 0.3.0, distributed/activation_checkpoint.py,
`MemoryBudgetAC`.
"""


def is_torchtitan(keys: Mapping[str, Any]) -> bool:
    return isinstance(keys.get("training"), Mapping) and bool(
        {"model", "parallelism", "activation_checkpoint", "job"} & set(keys)
    )


def is_option(name: str) -> bool:
    """Whether a command's option has the form `section.key` of torchtitan's options."""
    section, dot, _ = name.partition(".")
    return bool(dot) and section in SECTIONS


def read(file: str, keys: Mapping[str, Any]) -> Collector:
    """The settings of a TOML file for torchtitan 0.2. Its loss uses whole logits."""
    found = _sections(file, keys, selective_option="2")
    found.options["loss"] = "full"
    if "activation_checkpoint" not in keys:
        found.default(
            "activation_checkpointing", "every-2", "every second layer is checkpointed, torchtitan 0.2's default"
        )
    return _completed(found)


def read_function(file: str, keys: Mapping[str, Any]) -> Collector:
    """The settings of a configuration function for torchtitan 0.3. `keys` are the literal arguments of `Trainer.Config`."""
    found = _sections(file, keys)
    _loss(found)
    _captures_graph(found)
    if "activation_checkpoint" not in keys:
        found.default("activation_checkpointing", "selective", "selective checkpointing, torchtitan's default")
    return _completed(found)


def read_command(file: str, environment: Mapping[str, str], arguments: Mapping[str, Any]) -> Collector:
    """The settings of `torchtitan.train`: its options, and the configuration that they or the variables of run_train.sh name."""
    found = _sections(file, _nested(arguments))
    module = found.take("module") or environment.get("MODULE")
    function = found.take("config") or environment.get("CONFIG")
    if module and function:
        found.references.append(f"torchtitan/models/{module}/config_registry.py:{function}")
        _captures_graph(found)
        if function.endswith("_mxfp8"):
            found.default("fp8", "mxfp8", "MXFP8 in compiled layers, by the name of the configuration")
            found.options.setdefault("compile", "layer")
        if (model := _hub_model(function)) is not None:
            found.default("model", model, f"the model is {model}, by the name of the configuration")
    elif environment.get("CONFIG_FILE"):
        found.references.append(environment["CONFIG_FILE"])
    found.default("strategy", "zero3")
    return found


def _captures_graph(found: Collector) -> None:
    """Assume that forward and backward are captured as a CUDA graph, as torchtitan 0.3 does unless a setting says otherwise."""
    found.default("cuda_graphs", True, "a CUDA graph of forward and backward, which torchtitan 0.3 captures")


def _sections(file: str, keys: Mapping[str, Any], selective_option: str = "op") -> Collector:
    """The settings of the sections. torchtitan shards with FSDP2, one unit per layer."""
    found = Collector(file, "torchtitan", keys)
    found.options["framework"] = "torchtitan"
    for section in (*SECTIONS, "quantize.linear", _FLOAT8, _MX):
        found.section(section)
    _model(found)
    _training(found)
    _checkpointing(found, selective_option)
    _compile(found)
    _fp8(found)
    _optimizer(found)
    _parallelism(found)
    for topic, names in _TOPICS.items():
        found.omits_active(topic, *names)
    return found


def _completed(found: Collector) -> Collector:
    """The settings of a complete configuration: missing values are set to torchtitan's defaults."""
    found.default("micro_batch_size", 8, "micro-batch 8, torchtitan's default of local_batch_size")
    found.default("seq_len", 2048, "2048 tokens, torchtitan's default of seq_len")
    found.default("precision", "bf16-mixed")
    found.default("optim", "adamw_torch_fused")
    found.default("strategy", "zero3")
    if found.options.get("strategy") != "ddp":
        found.default("backend", "fsdp2")
    return found


def unmodelled(options: Mapping[str, Any]) -> str | None:
    """The setting, in words, that is modelled only with PyTorch's own loop, not with torchtitan; None if there is none."""
    lacking = {
        "DDP": options.get("strategy") == "ddp",
        "checkpoints of some layers": str(options.get("activation_checkpointing")).startswith("every"),
        "fp8 recipe tensorwise": options.get("fp8") == "tensorwise",
    }
    return next((what for what, is_asked in lacking.items() if is_asked), None)


_QWEN3 = ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")
_QWEN3_5 = ("0.8B", "2B", "4B", "9B", "27B", "35B-A3B", "122B-A10B", "397B-A17B")
_HUB_MODELS = {
    **{f"llama3 {size}": f"meta-llama/Llama-3.2-{size}" for size in ("1B", "3B")},
    **{f"llama3 {size}": f"meta-llama/Llama-3.1-{size}" for size in ("8B", "70B", "405B")},
    **{f"qwen3 {size}": f"Qwen/Qwen3-{size}" for size in _QWEN3},
    **{f"qwen3.5 {size}": f"Qwen/Qwen3.5-{size}" for size in _QWEN3_5},
    **{f"gpt-oss {size}": f"openai/gpt-oss-{size}" for size in ("20b", "120b")},
    "deepseek v3 16B": "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek v3 236B": "deepseek-ai/DeepSeek-V2",
    "deepseek v3 671B": "deepseek-ai/DeepSeek-V3",
    "muse-glimmer 30B": "meta-models/Muse-Glimmer-30B",
    "moonlight 16B-A3B": "moonshotai/Moonlight-16B-A3B",
    "kimi-vl A3B": "moonshotai/Kimi-VL-A3B-Instruct",
    "kimi k2.5": "moonshotai/Kimi-K2.5",
}
"""The hub's names by torchtitan's: a module and its flavor. Source: torchtitan 0.3.0, models/*/__init__.py."""


def _nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in dotted.items():
        section, dot, key = name.partition(".")
        if dot:
            found.setdefault(section, {})[key] = value
        else:
            found[name] = value
    return found


def _training(found: Collector) -> None:
    """The section `training`: the batch and the precision."""
    options = found.options
    for key in ("training.local_batch_size", "training.batch_size"):
        found.number(key, "micro_batch_size")
    found.number("training.seq_len", "seq_len")
    if (found.peek("training.global_batch_size") or -1) != -1:
        found.omits_key("training.global_batch_size", "give --gradient-accumulation-steps")
    computes, weights = (str(found.take(f"training.{key}") or "") for key in ("mixed_precision_param", "dtype"))
    if weights == "bfloat16":
        options["precision"] = "bf16"
    elif computes:
        options["precision"] = "fp32" if computes == "float32" else "bf16-mixed"
    found.take("training.mixed_precision_reduce")
    if found.flag("training.enable_cpu_offload"):
        options["offload"] = "parameters"
    if found.flag("training.disable_cuda_graphs"):
        options["cuda_graphs"] = False


def _loss(found: Collector) -> None:
    """Set the loss: in chunks, or with whole logits. Source: torchtitan 0.3.0, components/loss.py, ChunkedLossWrapper."""
    words = str(found.peek("loss") or "")
    if "Chunked" in words:
        chunks = re.search(r"num_chunks=(\d+)", words)
        if chunks is not None and int(chunks[1]) != TORCHTITAN_CHUNKS:
            found.omits_key("loss", f"the estimate assumes {TORCHTITAN_CHUNKS} chunks of the loss")
        else:
            found.take("loss")
    elif words:
        found.take("loss")
        found.options["loss"] = "full"


def _hub_model(named: str) -> str | None:
    """The hub's name of the model that torchtitan's module and flavor name, or a function of its config_registry.py; None if unknown.

    >>> _hub_model("qwen3_5 4B"), _hub_model("qwen3_30b_a3b"), _hub_model("kimi_k2_5_debugmodel")
    ('Qwen/Qwen3.5-4B', 'Qwen/Qwen3-30B-A3B', None)
    """
    words = _without_separators(named)
    if "debug" in words:
        return None
    return next((model for name, model in _HUB_MODELS.items() if _without_separators(name) in words), None)


def _without_separators(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _model(found: Collector) -> None:
    name, flavor = str(found.take("model.name") or ""), str(found.take("model.flavor") or "")
    assets = PurePosixPath(str(found.take("model.hf_assets_path") or found.take("hf_assets_path") or "")).name
    model = _hub_model(f"{name} {flavor}") or (hub_name(assets) if assets else None)
    if model is not None:
        found.options["model"] = model
        found.assume(f"the model is {model}")


def _checkpointing(found: Collector, selective_option: str) -> None:
    mode = found.peek("activation_checkpoint.mode") or found.peek("activation_checkpoint")
    words = brief(mode or "").lower()
    key = "activation_checkpoint.mode" if "activation_checkpoint.mode" in found else "activation_checkpoint"
    if "budget" in words:
        found.take(key)
        found.options["activation_checkpointing"] = "none"
        written = re.search(r"memory_budget=([\d.]+)", words)
        found.options["memory_budget"] = (
            written[1] if written else found.take("activation_checkpoint.memory_budget") or _MEMORY_BUDGET
        )
    elif "selective" in words:
        found.take(key)
        found.options["activation_checkpointing"] = _selective(found, selective_option)
    elif "full" in words:
        found.take(key)
        found.options["activation_checkpointing"] = "full"
    elif key in found:
        found.take(key)
        found.options["activation_checkpointing"] = "none"


def _compile(found: Collector) -> None:
    """Set torch.compile, of each layer and of the loss. Source: torchtitan 0.3.0, distributed/compile.py; config/configs.py,
    CompileConfig.
    """
    if found.flag("training.compile") or found.flag("compile.enable"):
        components = found.take("compile.components") or ["model", "loss"]
        if "model" in components:
            found.options["compile"] = "layer"
            if "loss" not in components:
                found.assume("the loss is compiled too, as compile.components has it by default")
        elif "loss" in components:
            found.omits("compile.components: torch.compile of the loss; the estimate assumes an uncompiled loss")


def _fp8(found: Collector) -> None:
    """Set torchao's float8 for linear layers, which a converter switches on.

    Source: torchtitan 0.2.2, components/quantization/float8.py, `Float8LinearConverter`; config/job_config.py, Float8Linear.
    """
    named = found.peek_names("model.converters")
    section = next((name for name in (_FLOAT8, "float8", _MX) if name in named), None)
    if section is None:
        return
    if len(named) == 1:
        found.take("model.converters")
    if section == _MX:
        _mxfp8(found)
        return
    recipe = str(found.peek(f"{section}.recipe_name") or "tensorwise")
    if recipe not in get_args(Fp8):
        found.omits_key(f"{section}.recipe_name", "this recipe; the estimate assumes no fp8")
        return
    found.take(f"{section}.recipe_name")
    found.options["fp8"] = recipe
    if found.flag(f"{section}.enable_fsdp_float8_all_gather"):
        found.omits(f"{section}.enable_fsdp_float8_all_gather; the estimate gathers weights in the compute dtype")
    found.flag(f"{section}.precompute_float8_dynamic_scale_for_fsdp")
    left_out = found.take(f"{section}.filter_fqns") or []
    if set(left_out) != {"output"}:
        found.omits(f"{section}.filter_fqns; the estimate excludes only the head")


def _mxfp8(found: Collector) -> None:
    """Set MXFP8 for linear layers.

    Source: torchtitan 0.2.2, components/quantization/mx.py, `MXLinearConverter`; config/job_config.py, MXLinear.
    """
    recipe = found.peek(f"{_MX}.recipe_name") or "mxfp8_cublas"
    if not str(recipe).startswith("mxfp8_cublas"):
        found.omits_key(f"{_MX}.recipe_name", "this recipe; the estimate assumes no fp8")
        return
    for key in ("recipe_name", "mxfp8_dim1_cast_kernel_choice"):
        found.take(f"{_MX}.{key}")
    found.options["fp8"] = "mxfp8"
    left_out = found.take(f"{_MX}.filter_fqns")
    if left_out != []:
        found.omits(
            f"{_MX}.filter_fqns; the estimate converts all linear layers, also the head, as torchtitan 0.3 does"
        )


def _selective(found: Collector, usual: str) -> str:
    """The policy that torchtitan 0.2's `selective_ac_option` selects: selective by operators (`op`), or one of N layers."""
    option = str(found.take("activation_checkpoint.selective_ac_option") or usual)
    if not option.isdecimal() or int(option) < 2:
        return "selective" if option == "op" else "full"
    found.assume(f"the first of each {option} layers is checkpointed; torchtitan checkpoints the last")
    return f"every-{option}"


def _optimizer(found: Collector) -> None:
    name = found.peek("optimizer.name")
    implementation = found.take("optimizer.implementation")
    if name in (None, "AdamW", "Adam"):
        found.take("optimizer.name")
        if implementation is not None or name is not None:
            found.options["optim"] = "adamw_torch_fused" if implementation in (None, "fused") else "adamw_torch"
    else:
        found.omits_key("optimizer.name", "the optimizer is not modelled; the estimate assumes adamw_torch_fused")


def _parallelism(found: Collector) -> None:
    """Set the strategy from the degrees of parallelism. A degree of -1 means all ranks that the other degrees leave."""
    options = found.options
    replicas = found.number("parallelism.data_parallel_replicate_degree") or 1
    shards = found.number("parallelism.data_parallel_shard_degree") or -1
    reshard = found.take("parallelism.fsdp_reshard_after_forward")
    if replicas > 1:
        options["strategy"] = "ddp" if shards == 1 else "hsdp"
        if shards != 1:
            found.default("nnodes", replicas, f"{replicas} nodes, one for each replica")
    elif reshard is not None:
        options["strategy"] = "zero2" if reshard == "never" else "zero3"
    if "strategy" in options:
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
    """The value of an expression: of a literal its value, of a call the dictionary of its arguments or its name, of others the source
    text.
    """
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
