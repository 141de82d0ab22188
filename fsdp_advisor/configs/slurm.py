"""Reads the directives of a Slurm batch script: nodes and GPUs. Source: Slurm's sbatch(1)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_advisor.configs.collect import Collector

_DIRECTIVE = re.compile(r"^#SBATCH\s+(.*?)\s*$", re.MULTILINE)
_OPTION = re.compile(r"(?:^|\s)(--[\w-]+|-[A-Za-z])(?:\s*=\s*|\s+|(?<=-[A-Za-z]))([^\s#-]\S*)")
_LONG = {"N": "nodes", "n": "ntasks", "G": "gpus"}
"""Short options that affect the number of GPUs -> their long names."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The resources that a batch script requests; None: unknown. `variables`: environment variables that Slurm sets."""

    found: Collector
    nodes: int | None = None
    gpus_per_node: int | None = None
    variables: dict[str, str] = field(default_factory=dict)


def read(file: str, text: str) -> Allocation | None:
    """Nodes and GPUs in the directives; None for a script without directives. The launcher in the script may use fewer."""
    lines = _DIRECTIVE.findall(text)
    if not lines:
        return None
    given: dict[str, str] = {}
    for line in lines:
        for name, value in _OPTION.findall(line):
            plain = name.lstrip("-")
            given[_LONG.get(plain, plain)] = value
    found = Collector(file, "Slurm", {})
    nodes = _nodes(given)
    if nodes is None and "nodes" in given:
        found.omits(f"#SBATCH --nodes={given['nodes']}: not a number of nodes; give --nnodes and --gpus")
    per_node = _gpus_per_node(given, nodes)
    if nodes is not None:
        found.default("nnodes", nodes, f"number of nodes {nodes}, from the directives of Slurm")
    gpus = _count(given.get("gpus")) or (nodes * per_node if nodes and per_node else None)
    if gpus:
        found.default("gpus", gpus, f"{gpus} GPUs, from the directives of Slurm")
    return Allocation(found=found, nodes=nodes, gpus_per_node=per_node, variables=_variables(given, nodes, per_node))


def _nodes(given: Mapping[str, str]) -> int | None:
    """The number of nodes: the given one, or else as many as hold the tasks. Without tasks and GPUs it is one."""
    if "nodes" in given:
        return _number(given["nodes"])
    tasks, per_node = _number(given.get("ntasks")), _number(given.get("ntasks-per-node"))
    if tasks and per_node:
        return -(-tasks // per_node)
    return None if (tasks or 1) > 1 or _count(given.get("gpus")) else 1


def _gpus_per_node(given: Mapping[str, str], nodes: int | None) -> int | None:
    """The number of GPUs of a node: the given one, or else that of its tasks, or its share of all GPUs."""
    known = _count(given.get("gpus-per-node")) or _gres(given.get("gres", ""))
    if known is not None:
        return known
    per_task, tasks_per_node = _count(given.get("gpus-per-task")), _number(given.get("ntasks-per-node"))
    if per_task and tasks_per_node:
        return per_task * tasks_per_node
    tasks, total = _number(given.get("ntasks")), _count(given.get("gpus"))
    if per_task and tasks and nodes and tasks % nodes == 0:
        return per_task * tasks // nodes
    return total // nodes if total and nodes and total % nodes == 0 else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _count(text: str | None) -> int | None:
    """The number of GPUs in `8` or `a100:8`."""
    return None if text is None else _number(text.rpartition(":")[2])


def _gres(text: str) -> int | None:
    """The number of GPUs of generic resources, such as `gpu:a100:8,tmpdisk:100`."""
    for item in text.split(","):
        name, _, rest = item.partition(":")
        if name in ("gpu", "gres/gpu"):
            return _count(re.sub(r"\(.*\)", "", rest)) if rest else 1
    return None


def _variables(given: Mapping[str, str], nodes: int | None, per_node: int | None) -> dict[str, str]:
    tasks, tasks_per_node = _number(given.get("ntasks")), _number(given.get("ntasks-per-node"))
    if tasks is None and nodes and tasks_per_node:
        tasks = nodes * tasks_per_node
    values = {
        "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_GPUS_ON_NODE": per_node, "SLURM_GPUS_PER_NODE": per_node,
        "SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks, "SLURM_NTASKS_PER_NODE": tasks_per_node,
    }  # fmt: skip
    return {name: str(value) for name, value in values.items() if value is not None}
