"""Reads Python code with a training loop of its own: its batches, optimizer and model, and what it gives accelerate's `Accelerator`."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.configs.model_code import model_keys, read_model, report_computed
from fsdp_advisor.configs.names import optimizer_called, set_attention
from fsdp_advisor.configs.python_literals import calls_of, keywords_of, literal_of, variables_of
from fsdp_advisor.job.choices import Framework


def read(file: str, tree: ast.Module) -> Collector | None:
    """The settings of a training loop with accelerate; None if the code has none. Files of accelerate decide how it is sharded."""
    nodes = calls_of(tree)
    if "Accelerator" not in nodes:
        return None
    variables = variables_of(tree)
    prepared = keywords_of(nodes["Accelerator"][0], variables)
    found = read_loop(file, "loop with accelerate", "accelerate", tree, nodes, variables, prepared)
    mixed = found.take("mixed_precision")
    if mixed in ("bf16", "fp16", "no"):
        found.options["mixed"] = mixed
    else:
        found.default("mixed", "no")
    found.guess("strategy", "ddp", "DDP, because no file configures sharding")
    report_computed(found, " of Accelerator", nodes["Accelerator"][0], variables)
    return found


def read_loop(
    file: str,
    format: str,
    framework: Framework,
    tree: ast.Module,
    nodes: Mapping[str, Sequence[ast.Call]],
    variables: Mapping[str, Any],
    keys: Mapping[str, Any] | None = None,
) -> Collector:
    """The settings that loops of all libraries have: model, batch, length, optimizer, and what the code does to the model.

    `keys`: further settings, as keys of a configuration file.
    """
    found = Collector(file, format, _of_variables(variables) | dict(keys or {}) | model_keys(nodes, variables))
    options = found.options
    options["framework"] = framework
    if (model := found.take("model_name_or_path")) is not None:
        options["model"] = model
    if (batch := _batch_size(nodes, variables)) is not None:
        found.replace("batch_size", batch)
    if (steps := _steps_between_updates(tree, variables)) is not None and "gradient_accumulation_steps" not in (
        keys or {}
    ):
        found.replace("gradient_accumulation_steps", steps)
    found.number("gradient_accumulation_steps", "gradient_accumulation_steps")
    found.number("batch_size", "micro_batch_size")
    set_attention(found, "attn_implementation")
    for key in ("dtype", "torch_dtype"):
        if key in found:
            options["dtype"] = str(found.take(key)).removeprefix("torch.")
    if _casts_to_bf16(nodes, variables):
        options["dtype"] = "bfloat16"
    _set_optimizer(found, nodes, variables)
    read_model(found, tree, nodes, variables)
    if (length := found.take("seq_len")) is not None:
        found.default("seq_len", length, f"{length} tokens, which a variable of the code calls its length")
    if "clip_grad_norm_" in nodes:
        found.omits("clip_grad_norm_: gradient clipping apart from the framework's")
    return found


_VARIABLES = {
    "batch_size": ("batch_size", "micro_batch_size", "train_batch_size", "per_device_batch_size", "bs"),
    "gradient_accumulation_steps": (
        "gradient_accumulation_steps", "gradient_accumulation", "grad_accumulation_steps", "grad_accum_steps", "grad_accum",
        "accumulation_steps", "accum_steps",
    ),
    "seq_len": (
        "seq", "seq_len", "seq_length", "sequence_length", "max_length", "max_len", "max_seq_len", "max_seq_length", "block_size",
        "context_length", "cutoff_len",
    ),
}  # fmt: skip
"""Key of a reading -> what loops usually call the variable that has its value, in any case."""


def _of_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The settings whose variables have usual names, if no two of them differ."""
    found: dict[str, Any] = {}
    for key, names in _VARIABLES.items():
        values = {
            value
            for name, value in variables.items()
            if name.rpartition(".")[2].lower() in names and type(value) is int
        }
        if len(values) == 1:
            found[key] = values.pop()
    return found


def _casts_to_bf16(nodes: Mapping[str, Sequence[ast.Call]], variables: Mapping[str, Any]) -> bool:
    """Whether the code converts its model, or all that it makes, to bf16."""
    casts = [call for call in (*nodes.get("bfloat16", ()), *nodes.get("to", ())) if _is_of_model(call)]
    words = [each for call in casts for each in (*call.args, *(keyword.value for keyword in call.keywords))]
    words += [each for call in nodes.get("set_default_dtype", ()) for each in call.args]
    return "torch.bfloat16" in (literal_of(word, variables) for word in words) or any(
        _is_of_model(call) for call in nodes.get("bfloat16", ())
    )


def _is_of_model(call: ast.Call) -> bool:
    """Whether a method is called on the model, or on what loads it."""
    of = ast.unparse(call.func).rpartition(".")[0]
    return of.rsplit(".", 1)[-1] in ("model", "net") or "from_pretrained(" in of or "from_config(" in of


def _batch_size(nodes: Mapping[str, Sequence[ast.Call]], variables: Mapping[str, Any]) -> Any:
    """The batch size of the loader of the training data: the first one that shuffles, else the first one."""
    loaders = []
    for call in nodes.get("DataLoader", ()):
        second = literal_of(call.args[1], variables) if len(call.args) > 1 else None
        loaders.append(({} if second is None else {"batch_size": second}) | keywords_of(call, variables))
    loaders.sort(key=lambda loader: not loader.get("shuffle"))
    return next((loader["batch_size"] for loader in loaders if "batch_size" in loader), None)


def _steps_between_updates(tree: ast.Module, variables: Mapping[str, Any]) -> int | None:
    """The N of a condition such as `(i + 1) % N == 0` around each `optimizer.step()`; None if there is none, or if they differ."""
    updates = [node for node in ast.walk(tree) if _is_update(node)]
    steps: dict[ast.AST, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            known = {n for test in ast.walk(node.test) if (n := _period(test, variables)) is not None}
            inside = [each for statement in node.body for each in ast.walk(statement) if _is_update(each)]
            steps |= dict.fromkeys(inside, known.pop()) if len(known) == 1 else {}
    return next(iter(steps.values())) if len(steps) == len(updates) and len(set(steps.values())) == 1 else None


def _is_update(node: ast.AST) -> bool:
    """Whether a call is a step of an optimizer, perhaps by a scaler of gradients."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "step":
        return False
    return any("opt" in ast.unparse(each).lower() for each in (node.func.value, *node.args))


def _period(node: ast.AST, variables: Mapping[str, Any]) -> int | None:
    """The N of `... % N == ...` and of `not ... % N`, if it is known."""
    match node:
        case ast.Compare(left=ast.BinOp(op=ast.Mod(), right=right), ops=[ast.Eq()]):
            period = literal_of(right, variables)
        case ast.UnaryOp(op=ast.Not(), operand=ast.BinOp(op=ast.Mod(), right=right)):
            period = literal_of(right, variables)
        case _:
            return None
    return period if type(period) is int and period > 0 else None


def _set_optimizer(found: Collector, nodes: Mapping[str, Sequence[ast.Call]], variables: Mapping[str, Any]) -> None:
    """Set the optimizer that the code creates."""
    for calls in nodes.values():
        name = ast.unparse(calls[0].func)
        if (optim := optimizer_called(name, keywords_of(calls[0], variables))) is not None:
            found.options["optim"] = optim
            found.reads(name)
            return
    found.default("optim", "adamw_torch", "AdamW, because the code creates no optimizer that is known")
