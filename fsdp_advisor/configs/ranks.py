"""The number of ranks and nodes that a launcher starts."""

from __future__ import annotations

import re

from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.configs.launchers import Launch
from fsdp_advisor.configs.slurm import Allocation

_PER_NODE = ("nproc_per_node", "num_gpus", "num_accelerators")
_NODES = ("nnodes", "num_nodes")
_VARIABLES = {
    "torchrun": {"PET_NPROC_PER_NODE": "nproc_per_node", "PET_NNODES": "nnodes"},
    "llamafactory-cli": {"NPROC_PER_NODE": "nproc_per_node", "NNODES": "nnodes"},
    "swift": {"NPROC_PER_NODE": "nproc_per_node", "NNODES": "nnodes"},
    "run_train.sh": {"NGPU": "nproc_per_node"},
}
"""Environment variable -> option of a launcher. Source: torch/distributed/argparse_util.py; LLaMA-Factory 0.9.5, launcher.py;
ms-swift 4.6.0, cli/main.py; torchtitan, run_train.sh.
"""
_EVERY = ("gpu", "auto")
"""Values with which torchrun starts a rank on every GPU of a node."""
_ONE_RANK = ("torchrun", "tune", "swift")
"""Launchers that start one rank unless a number is given. Others start one on every GPU."""


def set_ranks(found: Collector, launch: Launch, allocation: Allocation | None) -> None:
    """Set `gpus` and `nnodes` from a launcher's options, whose keys `found` has, its environment and Slurm's directives.

    Raises UsageError for a value that is not an integer.
    """
    for variable, option in _VARIABLES.get(launch.program, {}).items():
        if launch.environment.get(variable) and option not in found:
            found.replace(option, launch.environment[variable])
    visible = _visible(launch, allocation)
    if launch.program in ("accelerate", "trl", "axolotl") and not any(key in found for key in _PER_NODE):
        found.number("num_processes", "gpus")
        if visible and not found.references and "gpus" not in found.options:
            found.default("gpus", visible, f"{visible} GPUs, which the command can see")
        return
    if launch.program == "python":
        _one_process(found, launch)
        return
    per_node = _per_node(found, launch, visible)
    is_stated = any(key in found for key in _NODES)
    nodes = _nodes(found, allocation)
    if nodes is not None:
        found.options["nnodes"] = nodes
    if per_node is None:
        return
    if nodes is not None:
        found.options["gpus"] = per_node * nodes
    elif is_stated or "hostfile" in found:
        found.guess(
            "gpus", per_node, f"{per_node} GPUs of one node, because the number of nodes is not known: give --gpus"
        )
    elif launch.program in ("torchrun", "swift"):
        found.options |= {"gpus": per_node, "nnodes": 1}
    else:
        found.default("gpus", per_node, f"{per_node} GPUs on one node")


def _one_process(found: Collector, launch: Launch) -> None:
    devices = _devices(launch)
    if devices and devices > 1:
        found.omits(
            f"python starts one process, which can see {devices} GPUs: the Trainer then uses nn.DataParallel, which is not modelled"
        )


def _devices(launch: Launch) -> int | None:
    """The number of GPUs in CUDA_VISIBLE_DEVICES."""
    text = launch.environment.get("CUDA_VISIBLE_DEVICES", "")
    return len(text.split(",")) if re.fullmatch(r"\d+(,\d+)*", text) else None


def _visible(launch: Launch, allocation: Allocation | None) -> int | None:
    """The number of GPUs of a node that the launcher can see; None if the script does not say."""
    return _devices(launch) or (allocation.gpus_per_node if allocation else None)


def _per_node(found: Collector, launch: Launch, visible: int | None) -> int | None:
    """The ranks of each node; None if the script does not say."""
    key = next((key for key in _PER_NODE if key in found), None)
    if key is not None:
        if found.peek(key) not in _EVERY and not found.is_unknown(key):
            return found.number(key)
        if visible is None:
            found.omits_key(key, "the number of ranks is not known: give --gpus")
        else:
            found.replace(key, visible)
            found.take(key)
            found.assume(f"{key}: {visible}, the GPUs of a node that the script names")
        return visible
    included = found.peek("include")
    if isinstance(included, str) and re.fullmatch(r"[^@:]+:\d+(,\d+)*", included):
        found.take("include")
        return included.count(",") + 1
    if launch.program in _ONE_RANK and not launch.unknown:
        found.assume("one rank on each node, because nproc_per_node is not given")
        return 1
    return visible


def _nodes(found: Collector, allocation: Allocation | None) -> int | None:
    """The number of nodes that the launcher is given; None if it is not given or not known."""
    key = next((key for key in _NODES if key in found), None)
    if key is None:
        return None
    if found.is_unknown(key):
        nodes = allocation.nodes if allocation else None
        if nodes is None:
            found.omits_key(key, "the number of nodes is not known")
        else:
            found.replace(key, nodes)
            found.take(key)
            found.assume(f"{key}: {nodes}, from the directives of Slurm")
        return nodes
    bounds = re.fullmatch(r"(\d+):(\d+)", str(found.peek(key)))
    if bounds is not None:
        found.take(key)
        if bounds[1] != bounds[2]:
            found.assume(f"{bounds[2]} nodes, the most of {key} {bounds[0]}")
        return int(bounds[2])
    return found.number(key)
