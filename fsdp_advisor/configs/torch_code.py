"""Reads Python code with a training loop of its own in PyTorch: with FSDP2, FSDP1, DDP, DeepSpeed, or on one GPU."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_advisor.configs import deepspeed
from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.configs.loop_code import read_loop
from fsdp_advisor.configs.python_literals import calls_of, literal_of, variables_of
from fsdp_advisor.configs.sharding_code import ONE_GPU, read_sharding

_DISTRIBUTES = ("fully_shard", "FullyShardedDataParallel", "DistributedDataParallel")


def read(file: str, tree: ast.Module) -> Collector | None:
    """The settings of a training loop in PyTorch; None if the code neither distributes a model nor trains one that it loads."""
    nodes = calls_of(tree)
    engine = next((c for c in nodes.get("initialize", ()) if ast.unparse(c.func).startswith("deepspeed.")), None)
    trains = "backward" in nodes and any(name in nodes for name in ("from_pretrained", "from_config"))
    if not (trains or engine or any(name in nodes for name in _DISTRIBUTES)):
        return None
    variables = variables_of(tree)
    found = read_loop(file, "loop in PyTorch", "torch", tree, nodes, variables)
    if engine is not None:
        _read_deepspeed(found, engine, variables)
    else:
        read_sharding(found, tree, nodes, variables)
    _read_compilation(found, nodes)
    if _clears_gradients_late(tree):
        found.omits(
            "zero_grad between forward and backward: the gradients of the step before, which forward then has too"
        )
    return found


def _read_deepspeed(found: Collector, engine: ast.Call, variables: Mapping[str, Any]) -> None:
    """Read the configuration that `deepspeed.initialize` gets as a dictionary, or note its file."""
    found.options["framework"] = "deepspeed"
    found.reads("deepspeed.initialize")
    found.guess("gpus", 1, ONE_GPU)
    words = {keyword.arg: keyword.value for keyword in engine.keywords}
    given = next((words[key] for key in ("config", "config_params") if key in words), None)
    config = None if given is None else literal_of(given, variables)
    if isinstance(config, Mapping):
        deepspeed.read_embedded(found, config)
    elif isinstance(config, str):
        found.replace("config", config)
        found.refer("config")
    else:
        found.omits(
            "the configuration of deepspeed.initialize, which the code computes; give its file with --config-file"
        )
    found.default("backend", "deepspeed")


def _read_compilation(found: Collector, nodes: Mapping[str, Sequence[ast.Call]]) -> None:
    """Set the compilation of the model by torch.compile or by the module's own method."""
    for call in nodes.get("compile", ()):
        of = ast.unparse(call.func).rpartition(".")[0]
        what = ast.unparse(call.args[0]) if of == "torch" and call.args else of
        if what.rsplit(".", 1)[-1] in ("model", "net"):
            found.options["compile"] = "model"
        elif what in ("layer", "block"):
            found.options["compile"] = "layer"


def _clears_gradients_late(tree: ast.Module) -> bool:
    """Whether the innermost loop with a backward calls the model before it clears gradients, and clears them before backward."""
    for loop in (node for node in ast.walk(tree) if isinstance(node, ast.For)):
        calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
        lines = {
            name: [call.lineno for call in calls if ast.unparse(call.func).rsplit(".", 1)[-1] == name]
            for name in ("zero_grad", "backward", "model")
        }
        if all(lines.values()) and min(lines["model"]) < min(lines["zero_grad"]) < min(lines["backward"]):
            return True
    return False
