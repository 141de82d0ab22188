"""Reads Python code with a training loop of its own: its batches, optimizer and model, and what it gives accelerate's `Accelerator`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
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
    """The N of a condition such as `if (i + 1) % N == 0` around each `optimizer.step()`, or of `if (i + 1) % N: continue` before it; None
    if there is none, or if they differ.

    The condition has to guard the step alone: not the loop over the batches, nor the backward pass of its batch.
    """
    epochs = _counters_of_outer_loops(tree)
    steps: dict[ast.AST, int] = {}
    for block in _blocks(tree):
        for place, node in enumerate(block):
            if not isinstance(node, ast.If):
                continue
            skipped = block[place + 1 :] if isinstance(node.body[-1], ast.Continue) else []
            branches = ((node.body, node.orelse, False), ([*node.orelse, *skipped], node.body, True))
            for guarded, other, skips in branches:
                periods = set(_periods(node.test, variables, epochs, skips=skips))
                if len(periods) == 1 and (not _calls_backward(guarded) or _calls_backward(other)):
                    steps |= dict.fromkeys(filter(_is_update, _outside_loops(guarded)), periods.pop())
    updates = [node for node in ast.walk(tree) if _is_update(node)]
    return next(iter(steps.values())) if len(steps) == len(updates) and len(set(steps.values())) == 1 else None


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """The blocks of statements of the code, outer ones first."""
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def _outside_loops(block: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """The nodes of a block, without those in its loops and functions."""
    left: list[ast.AST] = list(block)
    while left:
        node = left.pop()
        if not isinstance(node, (*_LOOPS, ast.FunctionDef)):
            yield node
            left.extend(ast.iter_child_nodes(node))


_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def _counters_of_outer_loops(tree: ast.Module) -> set[str]:
    """The variables of loops around a loop with updates, such as epochs."""
    found = set()
    for loop in ast.walk(tree):
        inner = [node for node in ast.walk(loop) if isinstance(node, _LOOPS) and node is not loop]
        if isinstance(loop, ast.For) and any(_is_update(node) for each in inner for node in ast.walk(each)):
            found |= {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    return found


def _calls_backward(block: Sequence[ast.stmt]) -> bool:
    """Whether a block has a backward pass."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
        for node in _outside_loops(block)
    )


_OPTIMIZER = re.compile(r"opts?|optims?|optimi[sz]ers?", re.IGNORECASE)
"""A part of the name of an optimizer: `opt_d`, `self.optimizer`, `optimizerG`."""


def _is_update(node: ast.AST) -> bool:
    """Whether a call is a step of an optimizer, perhaps by a scaler of gradients."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "step":
        return False
    parts = [part for each in (node.func.value, *node.args) for part in _PARTS.findall(ast.unparse(each))]
    return any(_OPTIMIZER.fullmatch(part) for part in parts)


_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
"""The parts of a name: those of `self.myOptimizer_1` are self, my and Optimizer."""


def _periods(test: ast.expr, variables: Mapping[str, Any], epochs: set[str], *, skips: bool) -> Iterator[int]:
    """The known N of a condition that holds once in N batches (`... % N == ...`, `not ... % N`), or that `skips`: it holds in all batches
    but one of N (`... % N != ...`, `... % N`).
    """
    match test:
        case ast.BoolOp(values=values):
            for value in values:
                yield from _periods(value, variables, epochs, skips=skips)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _periods(operand, variables, epochs, skips=not skips)
        case ast.Compare(left=ast.BinOp(op=ast.Mod()) as remainder, ops=[ast.Eq() | ast.NotEq() as op]) if (
            isinstance(op, ast.NotEq) == skips
        ):
            yield from _periods(remainder, variables, epochs, skips=True)
        case ast.BinOp(op=ast.Mod(), left=left, right=right) if skips:
            period = literal_of(right, variables)
            counts_epochs = any(isinstance(node, ast.Name) and node.id in epochs for node in ast.walk(left))
            if type(period) is int and period > 0 and not counts_epochs:
                yield period


def _set_optimizer(found: Collector, nodes: Mapping[str, Sequence[ast.Call]], variables: Mapping[str, Any]) -> None:
    """Set the optimizer that the code creates."""
    for calls in nodes.values():
        name = ast.unparse(calls[0].func)
        if (optim := optimizer_called(name, keywords_of(calls[0], variables))) is not None:
            found.options["optim"] = optim
            found.reads(name)
            return
    found.default("optim", "adamw_torch", "AdamW, because the code creates no optimizer that is known")
