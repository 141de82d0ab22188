"""The placement of a parameter: the part that a rank keeps along one axis of the mesh."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis keeps the whole tensor."""

    def local_shape(self, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        return shape


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank of the axis keeps a chunk of dimension `dim`."""

    dim: int = 0

    def local_shape(self, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """The chunk of rank 0, the largest one: ceil(size / ranks) rows of `dim`. A scalar becomes one element.

        Source: torch.distributed.tensor.placement_types.Shard, `_chunk_with_empty` (torch 2.13).
        >>> Shard(0).local_shape((10, 3), 4)
        (3, 3)
        """
        if not shape:
            return (1,)
        return (*shape[: self.dim], -(-shape[self.dim] // ranks), *shape[self.dim + 1 :])
