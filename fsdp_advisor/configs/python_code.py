"""Reads Python without running it: exported training scripts, calls of TrainingArguments and of TRL's configurations.

Only literals count. A setting that is computed is not read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from fsdp_advisor.configs import torchtitan, trainer
from fsdp_advisor.configs.adapters import METHODS, has_adapters, set_lora, set_peft_config, set_quantization
from fsdp_advisor.configs.checkpointing import set_reentrant
from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.configs.fsdp import AS_DDP, wrap_of
from fsdp_advisor.configs.liger import set_liger
from fsdp_advisor.configs.names import optimizer_called
from fsdp_advisor.engines.fsdp1.sharding import sharding_options
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.choices import Fp8

_CONSTANTS = {
    "MODEL": "model",
    "MICRO_BATCH_SIZE": "micro_batch_size",
    "SEQ_LEN": "seq_len",
    "ACCUMULATION": "gradient_accumulation_steps",
    "WORLD_SIZE": "gpus",
}
"""The constants at the top of an exported script."""
_ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments")
_OF_TRL = {
    "SFTConfig": "sft", "DPOConfig": "dpo", "KTOConfig": "kto", "GRPOConfig": "grpo", "RewardConfig": "reward",
    "ORPOConfig": "orpo", "CPOConfig": "cpo", "RLOOConfig": "rloo",
}  # fmt: skip
"""Class of a TRL configuration -> task of its trainer."""


def read(file: str, text: str, function: str | None = None) -> Collector:
    """The settings of a Python file. `function` selects a configuration function of torchtitan.

    Raises UsageError if the file is not Python or has no settings of a known kind.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not Python: {error}", hint="give a configuration or a script") from None
    sections = torchtitan.sections_of(tree, function, file)
    if sections is not None:
        return torchtitan.read_function(file, sections)
    found = _arguments(file, tree)
    if found is not None:
        return found
    constants = _constants(tree)
    if not {"MODEL", "MICRO_BATCH_SIZE", "SEQ_LEN"} & set(constants):
        raise UsageError(
            f"{file}: no TrainingArguments, no configuration of torchtitan and no exported script",
            hint="give the configuration file, or the options of the job",
        )
    return _script(file, tree, constants)


def _constants(tree: ast.Module) -> dict[str, Any]:
    """The literals that the module assigns to names in capitals."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def _calls(tree: ast.Module) -> dict[str, list[ast.Call]]:
    """The calls of each name, in the order of their lines."""
    found: dict[str, list[ast.Call]] = {}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        found.setdefault(ast.unparse(node.func).rsplit(".", 1)[-1], []).append(node)
    return found


def _variables(tree: ast.Module) -> dict[str, Any]:
    """The literals by variable name, for variables that are assigned only once in the whole file."""
    found: dict[str, Any] = {}
    assigned: set[str] = set()
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        for target in targets:
            if not isinstance(target, ast.Name) or value is None:
                continue
            if target.id in assigned:
                found.pop(target.id, None)
            elif (literal := _literal(value, {})) is not None:
                found[target.id] = literal
            assigned.add(target.id)
    return found


_HAS_BF16 = ("is_bf16_supported", "is_bfloat16_supported", "is_torch_bf16_gpu_available")
"""Functions that return whether the GPU has bf16. They count as true, because every GPU since Ampere has it."""


def _literal(node: ast.expr, variables: Mapping[str, Any]) -> Any:
    """The value of a literal, of a variable with a literal, or of dict(...); for an attribute such as torch.bfloat16 its text; None for
    others.
    """
    match node:
        case ast.Name(id=name):
            return variables.get(name)
        case ast.Attribute():
            name = ast.unparse(node)
            return name if name.startswith("torch.") or name[0].isupper() else None  # not args.batch_size
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            pairs = [
                (key.value, _literal(value, variables))
                for key, value in zip(keys, values, strict=True)
                if isinstance(key, ast.Constant)
            ]
            return {name: value for name, value in pairs if value is not None}
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            parts = [part for side in (left, right) if isinstance(part := _literal(side, variables), Mapping)]
            return {name: value for part in parts for name, value in part.items()} if parts else None
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = _literal(operand, variables)
            return None if value is None else not value
        case ast.Call() if ast.unparse(node.func).endswith(_HAS_BF16):
            return True
        case ast.Call(func=ast.Name(id="dict"), args=[]):
            return _keywords(node, variables)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _keywords(call: ast.Call, variables: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call whose values are known."""
    return _known(call.keywords, variables)


def _known(keywords: Sequence[ast.keyword], variables: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for keyword in keywords:
        value = _literal(keyword.value, variables)
        if keyword.arg is None and isinstance(value, Mapping):  # **name
            found |= value
        elif keyword.arg is not None and (value is not None or _is_none(keyword.value)):
            found[keyword.arg] = value
    return found


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _arguments(file: str, tree: ast.Module) -> Collector | None:
    """The arguments of a Trainer, given to its class or collected in a dictionary that is passed on to it."""
    nodes = _calls(tree)
    name = next((n for n in (*_OF_TRL, *_ARGUMENTS) if n in nodes), None)
    if name is None:
        return None
    variables = _variables(tree)
    calls = {n: _keywords(found[0], variables) for n, found in nodes.items()}
    keys = dict(calls[name])
    constants = _constants(tree)
    loads = [_loading(call, variables) for call in nodes.get("from_pretrained", ()) if _loads_a_model(call)]
    loaded = constants.get("MODEL_ARGUMENTS") or next(iter(loads), {})
    given = keys.get("model_init_kwargs")
    for source in (loaded, given if isinstance(given, Mapping) else {}):
        keys |= {key: value for key, value in source.items() if key in _LOADING}
    model = constants.get("MODEL") or _model(nodes, variables)
    if isinstance(model, str):
        keys["model_name_or_path"] = model
    found = trainer.read(file, keys, trl=name in _OF_TRL, task=_OF_TRL.get(name))
    _adapted_calls(found, calls)
    _adapted_constants(found, constants)
    if not has_adapters(found.options) and (text := _unread_adapters(nodes)) is not None:
        found.omits(f"{text} (the code has no configuration of a known PEFT method; the estimate has no adapters)")
    if computed := _computed(nodes[name][0], variables):
        found.omits(f"arguments that the code computes: {', '.join(computed)}")
    if "ParallelismConfig" in calls:
        trainer.mesh(found, calls["ParallelismConfig"])
    return found


def _loading(call: ast.Call, variables: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `from_pretrained`, with the checkpoint's dtype if none is given. Source: transformers 5.23."""
    names = {keyword.arg for keyword in call.keywords}
    return ({} if names & {"dtype", "torch_dtype", None} else {"dtype": "auto"}) | _keywords(call, variables)


def _loads_a_model(call: ast.Call) -> bool:
    """Whether a call of `from_pretrained` loads a model, and not a tokenizer, a processor or an adapter."""
    name = ast.unparse(call.func)
    return not any(word in name for word in ("Tokenizer", "Processor", "Config.", "FeatureExtractor", "Peft"))


def _model(nodes: Mapping[str, Sequence[ast.Call]], variables: Mapping[str, Any]) -> str | None:
    """The name of the model that the code loads, or that it passes to a TRL trainer."""
    candidates = [call.args[0] for call in nodes.get("from_pretrained", ()) if call.args and _loads_a_model(call)]
    trainers = [call for name, calls in nodes.items() if name.endswith("Trainer") for call in calls]
    candidates += [keyword.value for call in trainers for keyword in call.keywords if keyword.arg == "model"]
    for node in candidates:
        value = variables.get(node.id) if isinstance(node, ast.Name) else getattr(node, "value", None)
        if isinstance(value, str):
            return value
    return None


_LOADING = ("dtype", "torch_dtype", "attn_implementation", "experts_implementation")
"""Arguments of `from_pretrained` that a reader of the Trainer's arguments knows."""


def _computed(call: ast.Call, variables: Mapping[str, Any]) -> list[str]:
    """The keywords of a call whose values are not known literals."""
    return [k.arg or f"**{ast.unparse(k.value)}" for k in call.keywords if not _known([k], variables)]


_LIGER = "_apply_liger_kernel_to_instance"
"""Liger's function that replaces the loss and kernels of a model."""
_OFFLOADS = "offload=torch.cuda.is_available()"
"""The text in an exported script that switches activation offload on."""


def _script(file: str, tree: ast.Module, constants: dict[str, Any]) -> Collector:
    """The plan of an exported training script: its constants, and the calls that shard, checkpoint and step."""
    found = Collector(file, "training script", constants)
    for key, option in _CONSTANTS.items():
        if key in found:
            found.options[option] = found.take(key)
    loaded = found.take("MODEL_ARGUMENTS") or {}
    nodes = _calls(tree)
    calls = {name: _keywords(found[-1], {}) for name, found in nodes.items()}
    loaded = loaded or calls.get("from_config", {})
    found.options["dtype"] = str(loaded.get("dtype", "float32")).removeprefix("torch.")
    found.options["attention"] = loaded.get("attn_implementation", "sdpa")
    if "experts_implementation" in loaded:
        found.options["experts_implementation"] = loaded["experts_implementation"]
    if "MLP_SHARDS" in constants:
        found.take("MLP_SHARDS")
        found.options["tiled_mlp"] = str(constants["MLP_SHARDS"] or "auto")
    _adapted_constants(found, constants)
    source = ast.unparse(tree)
    if _LIGER in calls:
        set_liger(found, calls[_LIGER])
    _compiled(found, source)
    _converted(found, nodes)
    enabled = calls.get("activation_checkpointing_enable", calls.get("gradient_checkpointing_enable"))
    if enabled is not None:
        every = f"every-{enabled['every_n_layers']}" if enabled.get("every_n_layers", 1) != 1 else "full"
        found.options["activation_checkpointing"] = "selective" if "'context_fn': selective" in source else every
        found.options["activation_offload"] = enabled.get("offload") is True or _OFFLOADS in source
        if enabled.get("use_reentrant") is True or "'use_reentrant': True" in source:
            set_reentrant(found)
    elif "save_on_cpu" in calls:
        found.options["activation_offload"] = True
    _optimizer(found, calls)
    if "fully_shard" in calls:
        _fsdp2(found, tree, source, constants)
    elif "FullyShardedDataParallel" in calls:
        _fsdp1(found, source, calls, constants)
    elif "DistributedDataParallel" in calls:
        found.options |= _ddp(_half(source, "autocast"))
    found.take("LAYERS")
    found.take("REPLICAS")
    return found


def _compiled(found: Collector, source: str) -> None:
    """Set the compilation of each layer or of the whole model, and the compiler's memory budget."""
    compiled = re.search(r"^ *(layer|model)\.compile\(", source, re.MULTILINE)
    if compiled is None:
        return
    found.options["compile"] = compiled[1]
    if budget := re.search(r"\.activation_memory_budget = ([\d.]+)", source):
        found.options["memory_budget"] = budget[1]


def _converted(found: Collector, nodes: Mapping[str, Sequence[ast.Call]]) -> None:
    """Set the recipe by which torchao converts linear layers to fp8."""
    if "convert_to_mxfp8" in nodes:
        found.options["fp8"] = "mxfp8"
    elif "convert_to_float8_training" in nodes:
        recipe = next((_literal(word, {}) for call in nodes.get("from_recipe_name", ()) for word in call.args), None)
        if recipe in get_args(Fp8):
            found.options["fp8"] = recipe
        else:
            found.omits(
                "fp8 by another configuration than torchao's tensorwise or rowwise; the estimate is of steps in bf16"
            )


def _optimizer(found: Collector, calls: dict[str, dict[str, Any]]) -> None:
    for name, arguments in calls.items():
        if (optim := optimizer_called(name, arguments)) is not None:
            found.options["optim"] = optim


def _half(source: str, marker: str) -> str:
    """The dtype in which the script computes, as accelerate's mixed_precision."""
    if marker not in source:
        return "no"
    return "fp16" if "torch.float16" in source else "bf16"


def _ddp(mixed: str) -> dict[str, str]:
    return {"strategy": "ddp", "backend": "ddp", "framework": "torch", "mixed": mixed}


def _fsdp2(found: Collector, tree: ast.Module, source: str, constants: dict[str, Any]) -> None:
    reshard: object = True
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if (
                    isinstance(key, ast.Constant)
                    and key.value == "reshard_after_forward"
                    and isinstance(value, ast.Constant)
                ):
                    reshard = value.value
    strategy = "zero3" if reshard else "zero2"
    if reshard and not isinstance(reshard, bool):  # a number of ranks
        found.options["reshard_after_forward"] = str(reshard)
    if constants.get("REPLICAS"):
        strategy = "hsdp"
        if not reshard:
            found.options["reshard_after_forward"] = "false"
        _replicas(found, constants)
    found.options |= {
        "strategy": strategy,
        "backend": "fsdp2",
        "framework": "torch",
        "offload": "parameters" if "CPUOffloadPolicy(" in source else "none",
        "wrap": _wrap(found, source, constants),
        "mixed": _half(source, "MixedPrecisionPolicy("),
    }


def _replicas(found: Collector, constants: Mapping[str, Any]) -> None:
    found.default("nnodes", constants["REPLICAS"], f"{constants['REPLICAS']} nodes, one for each replica")


def _wrap(found: Collector, source: str, constants: dict[str, Any]) -> str:
    least = found.number("MIN_NUM_PARAMS")
    if least:
        return f"size:{least}"
    if not constants.get("LAYERS"):
        return "none"
    groups = re.search(r"range\(0, len\(stack\), (\d+)\)", source)
    return f"every:{groups[1]}" if groups is not None else wrap_of(constants["LAYERS"])


def _fsdp1(found: Collector, source: str, calls: dict[str, dict[str, Any]], constants: dict[str, Any]) -> None:
    keywords = calls["FullyShardedDataParallel"]
    sharding = str(keywords.get("sharding_strategy", "ShardingStrategy.FULL_SHARD")).rsplit(".", 1)[-1]
    prefetch = str(keywords.get("backward_prefetch", "BackwardPrefetch.BACKWARD_PRE")).rsplit("_", 1)[-1].lower()
    options = sharding_options(sharding)
    if options is None:
        found.omits(f"sharding_strategy: {sharding} (the estimate assumes full sharding)")
        options = {"strategy": "zero3"}
    if options["strategy"] == "ddp":
        found.omits(f"sharding_strategy: {sharding} ({AS_DDP})")
        found.options |= _ddp(_half(source, "MixedPrecision("))
        return
    found.options |= options
    found.options |= {
        "backend": "fsdp1",
        "framework": "torch",
        "offload": "parameters" if calls.get("CPUOffload", {}).get("offload_params") else "none",
        "backward_prefetch": prefetch if prefetch in ("pre", "post") else "none",
        "use_orig_params": keywords.get("use_orig_params", False) is not False,  # PyTorch's default is False
        "wrap": _wrap(found, source, constants),
        "mixed": _half(source, "MixedPrecision("),
    }
    if keywords.get("forward_prefetch") is True:
        found.options["forward_prefetch"] = True
    if constants.get("REPLICAS"):
        _replicas(found, constants)
    elif found.options["strategy"] == "hsdp":
        found.assume("one replica per node")


def _adapted_constants(found: Collector, constants: Mapping[str, Any]) -> None:
    """The adapter, the quantized base and the frozen parameters of an exported script, which are constants."""
    for name in ("ADAPTER", "QUANTIZATION", "FREEZE"):
        found.take(name)
    adapter = constants.get("ADAPTER")
    if isinstance(adapter, Mapping):
        values = {name: value for name, value in adapter.items() if name != "peft_type"}
        if adapter.get("peft_type") == "LORA":
            set_lora(found, {"r": 8, "lora_alpha": 8, **values})
        else:
            set_peft_config(found, str(adapter.get("peft_type")), values)
    if isinstance(constants.get("QUANTIZATION"), Mapping):
        set_quantization(found, constants["QUANTIZATION"])
    if isinstance(constants.get("FREEZE"), list):
        found.options["freeze"] = tuple(map(str, constants["FREEZE"]))


def _adapted_calls(found: Collector, calls: Mapping[str, Mapping[str, Any]]) -> None:
    """Set options from configurations of PEFT and bitsandbytes that the code creates. `calls`: class -> the literal keywords of its
    call.
    """
    name = next((name for name in METHODS if name in calls), None)
    if name == "LoraConfig":
        set_lora(found, {"r": 8, "lora_alpha": 8, **calls[name]})
    elif name is not None:
        set_peft_config(found, METHODS[name], calls[name])
    if calls.get("get_peft_model", {}).get("autocast_adapter_dtype") is False:
        found.omits("autocast_adapter_dtype=False (adapters in the base's dtype; the estimate has them in fp32)")
    if "BitsAndBytesConfig" in calls:
        set_quantization(found, calls["BitsAndBytesConfig"])


def _unread_adapters(nodes: Mapping[str, Sequence[ast.Call]]) -> str | None:
    """The first call that gives the model adapters, or the argument for a trainer that does; None if there is none."""
    for call in (*nodes.get("get_peft_model", ()), *nodes.get("from_pretrained", ())):
        name = ast.unparse(call.func)
        if name.endswith("get_peft_model") or ("Peft" in name and _keywords(call, {}).get("is_trainable")):
            return f"{name}(...)"
    keywords = [k for calls in nodes.values() for call in calls for k in call.keywords if k.arg == "peft_config"]
    return next((f"peft_config={ast.unparse(k.value)}" for k in keywords if not _is_none(k.value)), None)
