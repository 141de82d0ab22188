"""Reads Python without running it: exported training scripts, calls of TrainingArguments and of TRL's configurations.

Only literals count. A setting that is computed is not read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from fsdp_advisor.configs import lightning_code, loop_code, other_trainers, torch_code, torchtitan, trainer_code
from fsdp_advisor.configs.adapters import set_adapted_constants
from fsdp_advisor.configs.checkpointing import set_reentrant
from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.configs.fsdp import wrap_of
from fsdp_advisor.configs.liger import set_liger
from fsdp_advisor.configs.names import optimizer_called
from fsdp_advisor.configs.python_literals import calls_of, constants_of, keywords_of, literal_of
from fsdp_advisor.configs.sharding_code import set_fsdp1
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
    found = trainer_code.read(file, tree)
    if found is not None:
        return found
    constants = constants_of(tree)
    if not _is_exported(constants):
        for read_code in (loop_code.read, lightning_code.read, torch_code.read):
            if (loop := read_code(file, tree)) is not None:
                return loop
        raise _unknown_code(file, tree)
    return _script(file, tree, constants)


def _is_exported(constants: Mapping[str, Any]) -> bool:
    """Whether a script has the constants of an exported one. Users' own scripts may have some of them, such as SEQ_LEN."""
    return {"MICRO_BATCH_SIZE", "SEQ_LEN", "ACCUMULATION", "WORLD_SIZE"} <= set(constants) or {
        "MODEL",
        "LAYERS",
    } <= set(constants)


def _unknown_code(file: str, tree: ast.Module) -> UsageError:
    """The error about code in which no job is found."""
    if (name := other_trainers.of_code(tree)) is not None:
        return other_trainers.not_read(file, name)
    if "HfArgumentParser" in calls_of(tree):
        return UsageError(
            f"{file} takes its arguments from the command line",
            hint="give the script that launches it, or the options of the job",
        )
    if "SentenceTransformerTrainer" in calls_of(tree):
        return UsageError(
            f"{file} trains with sentence-transformers, whose losses compare embeddings of several texts; they are not modelled",
            hint=f"fsdp-advisor rehearse -- python {file} counts the memory of the script",
        )
    return UsageError(
        f"{file}: no TrainingArguments, no Accelerator, no Trainer of Lightning, and no loop that trains a model it loads",
        hint="give the file that has it, a configuration file, or the options of the job",
    )


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
    nodes = calls_of(tree)
    calls = {name: keywords_of(found[-1], {}) for name, found in nodes.items()}
    loaded = loaded or calls.get("from_config", {})
    found.options["dtype"] = str(loaded.get("dtype", "float32")).removeprefix("torch.")
    found.options["attention"] = loaded.get("attn_implementation", "sdpa")
    if "experts_implementation" in loaded:
        found.options["experts_implementation"] = loaded["experts_implementation"]
    if "MLP_SHARDS" in constants:
        found.take("MLP_SHARDS")
        found.options["tiled_mlp"] = str(constants["MLP_SHARDS"] or "auto")
    set_adapted_constants(found, constants)
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
        recipe = next((literal_of(word, {}) for call in nodes.get("from_recipe_name", ()) for word in call.args), None)
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
    offloads = calls.get("CPUOffload", {}).get("offload_params") is True
    set_fsdp1(found, calls["FullyShardedDataParallel"], offloads=offloads)
    found.options |= {"framework": "torch", "mixed": _half(source, "MixedPrecision(")}
    if found.options["strategy"] == "ddp":
        return
    found.options["wrap"] = _wrap(found, source, constants)
    if constants.get("REPLICAS"):
        _replicas(found, constants)
    elif found.options["strategy"] == "hsdp":
        found.assume("one replica per node")
