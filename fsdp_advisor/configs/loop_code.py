"""Reads Python code whose training loop is prepared by accelerate: what it gives `Accelerator`, its batches, optimizer and model."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.configs.model_code import model_keys, read_model, report_computed
from fsdp_advisor.configs.names import optimizer_called, set_attention
from fsdp_advisor.configs.python_literals import calls_of, keywords_of, variables_of


def read(file: str, tree: ast.Module) -> Collector | None:
    """The settings of a training loop with accelerate; None if the code has none. Files of accelerate decide how it is sharded."""
    nodes = calls_of(tree)
    if "Accelerator" not in nodes:
        return None
    variables = variables_of(tree)
    keys = keywords_of(nodes["Accelerator"][0], variables) | model_keys(nodes, variables)
    if (batch := _batch_size(nodes, variables)) is not None:
        keys["batch_size"] = batch
    found = Collector(file, "loop with accelerate", keys)
    options = found.options
    options["framework"] = "accelerate"
    if (model := found.take("model_name_or_path")) is not None:
        options["model"] = model
    mixed = found.take("mixed_precision")
    if mixed in ("bf16", "fp16", "no"):
        options["mixed"] = mixed
    else:
        found.default("mixed", "no")
    found.number("gradient_accumulation_steps", "gradient_accumulation_steps")
    found.number("batch_size", "micro_batch_size")
    set_attention(found, "attn_implementation")
    for key in ("dtype", "torch_dtype"):
        if key in found:
            options["dtype"] = str(found.take(key)).removeprefix("torch.")
    _set_optimizer(found, nodes, variables)
    read_model(found, tree, nodes, variables)
    if "clip_grad_norm_" in nodes:
        found.omits("clip_grad_norm_: gradient clipping apart from the framework's")
    found.guess("strategy", "ddp", "DDP, because no file configures sharding")
    report_computed(found, " of Accelerator", nodes["Accelerator"][0], variables)
    return found


def _batch_size(nodes: Mapping[str, Sequence[ast.Call]], variables: Mapping[str, Any]) -> Any:
    """The batch size of the loader of the training data: the first one that shuffles, else the first one."""
    loaders = [keywords_of(call, variables) for call in nodes.get("DataLoader", ())]
    loaders.sort(key=lambda loader: not loader.get("shuffle"))
    return next((loader["batch_size"] for loader in loaders if "batch_size" in loader), None)


def _set_optimizer(found: Collector, nodes: Mapping[str, Sequence[ast.Call]], variables: Mapping[str, Any]) -> None:
    """Set the optimizer that the code creates."""
    for calls in nodes.values():
        name = ast.unparse(calls[0].func)
        if (optim := optimizer_called(name, keywords_of(calls[0], variables))) is not None:
            found.options["optim"] = optim
            return
    found.default("optim", "adamw_torch", "AdamW, because the code creates no optimizer that is known")
