"""The mesh: a job's ranks arranged along named axes, as torchtitan's `ParallelDims` arranges them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The number of ranks of each axis, on `nnodes` nodes with the same number of GPUs.

    `dp_shard` ranks share one copy of the states, `dp_replicate` copies exist. Pipeline (`pp`), context (`cp`), tensor (`tp`)
    and expert (`ep`) parallelism are not modelled yet: these axes have one rank.

    >>> Mesh(dp_replicate=2, dp_shard=8, nnodes=2).world_size
    16
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    nnodes: int = 1

    @property
    def world_size(self) -> int:
        return prod(self.degree(axis) for axis in AXES)

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nnodes

    def degree(self, axis: Axis) -> int:
        """The number of ranks along an axis."""
        degree: int = getattr(self, axis)
        return degree


ONE_RANK = Mesh()
