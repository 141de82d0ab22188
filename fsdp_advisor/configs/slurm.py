"""Reads the directives of a Slurm batch script: nodes and GPUs. Source: Slurm's sbatch(1)."""

from __future__ import annotations

import re
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
    nodes = _number(given.get("nodes"))
    if nodes is None and "nodes" in given:
        found.omits(f"#SBATCH --nodes={given['nodes']}: not a number of nodes; give --nnodes and --gpus")
    tasks, total = _number(given.get("ntasks")), _count(given.get("gpus"))
    tasks_per_node = _number(given.get("ntasks-per-node"))
    if nodes is None and "nodes" not in given:
        nodes = -(-tasks // tasks_per_node) if tasks and tasks_per_node else None if (tasks or 1) > 1 or total else 1
    per_node = _count(given.get("gpus-per-node")) or _gres(given.get("gres", ""))
    per_task = _count(given.get("gpus-per-task"))
    if per_node is None and per_task and tasks_per_node:
        per_node = per_task * tasks_per_node
    if per_node is None and per_task and tasks and nodes and tasks % nodes == 0:
        per_node = per_task * tasks // nodes
    if per_node is None and total and nodes and total % nodes == 0:
        per_node = total // nodes
    if nodes is not None:
        found.default("nnodes", nodes, f"number of nodes {nodes}, from the directives of Slurm")
    gpus = total or (nodes * per_node if nodes and per_node else None)
    if gpus:
        found.default("gpus", gpus, f"{gpus} GPUs, from the directives of Slurm")
    variables = _variables(nodes, per_node, tasks, tasks_per_node)
    return Allocation(found=found, nodes=nodes, gpus_per_node=per_node, variables=variables)


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


def _variables(
    nodes: int | None, per_node: int | None, tasks: int | None, tasks_per_node: int | None
) -> dict[str, str]:
    if tasks is None and nodes and tasks_per_node:
        tasks = nodes * tasks_per_node
    values = {
        "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_GPUS_ON_NODE": per_node, "SLURM_GPUS_PER_NODE": per_node,
        "SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks, "SLURM_NTASKS_PER_NODE": tasks_per_node,
    }  # fmt: skip
    return {name: str(value) for name, value in values.items() if value is not None}
