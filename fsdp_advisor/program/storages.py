"""Sets of tensor storages: their exact bytes, and their bytes with each storage rounded up to the allocator's 512 bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

ALIGNMENT = 512
"""Source: c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize."""


def round_up(n_bytes: int) -> int:
    """A storage's bytes, rounded up to 512.

    >>> round_up(0), round_up(1), round_up(512), round_up(513)
    (0, 512, 512, 1024)
    """
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


Sizes = tuple[int | tuple["Sizes", int], ...]
"""Bytes of storages in the order of their allocation. (sizes, n) means the same sizes n times."""


@dataclass(frozen=True, slots=True)
class Storages:
    """Storages that live together: `exact` bytes of tensors, `rounded` bytes with each storage rounded up to 512."""

    exact: int = 0
    rounded: int = 0
    sizes: Sizes = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, n_bytes: int, count: int = 1) -> Storages:
        """`count` storages of `n_bytes` each."""
        return cls(n_bytes * count, round_up(n_bytes) * count, (n_bytes,) if count == 1 else (((n_bytes,), count),))

    def __add__(self, other: Storages) -> Storages:
        return Storages(self.exact + other.exact, self.rounded + other.rounded, self.sizes + other.sizes)

    def __mul__(self, count: int) -> Storages:
        return Storages(self.exact * count, self.rounded * count, ((self.sizes, count),))

    def each(self) -> Iterator[int]:
        """The bytes of each storage in order. Empty storages are left out, because nothing is allocated for them.

        >>> list((Storages.of(8) + Storages.of(4) * 2 + Storages.of(0)).each())
        [8, 4, 4]
        """
        return _each(self.sizes)


def _each(sizes: Sizes) -> Iterator[int]:
    for size in sizes:
        if isinstance(size, tuple):
            inner, count = size
            for _ in range(count):
                yield from _each(inner)
        elif size:
            yield size


NO_STORAGES = Storages()


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """The storages that rank 0 keeps on the GPU from step to step. `communication`: buffers of collectives (DDP, DeepSpeed).

    `paged`: optimizer state in CUDA's managed memory, which is on the GPU or on the host. PyTorch does not allocate it.
    """

    parameters: Storages = NO_STORAGES
    gradients: Storages = NO_STORAGES
    optimizer: Storages = NO_STORAGES
    communication: Storages = NO_STORAGES
    buffers: Storages = NO_STORAGES
    paged: Storages = NO_STORAGES

    @property
    def on_gpu(self) -> dict[str, Storages]:
        """The parts that PyTorch allocates on the GPU, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "paged"}

    @property
    def total(self) -> Storages:
        """All of `on_gpu`."""
        return sum(self.on_gpu.values(), NO_STORAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransfer:
    """Tensors that loading allocates together on rank 0's GPU.

    `temporaries` are freed once `kept` is allocated; with `frees_late` once the next transfer has allocated its own. PyTorch's
    allocator keeps their memory in its cache. `is_loaded`: whether the temporaries exist before the first transfer, as the weights of a
    model that was loaded on the GPU.
    """

    temporaries: Storages = NO_STORAGES
    kept: Storages = NO_STORAGES
    frees_late: bool = False
    is_loaded: bool = False

    @classmethod
    def of_shard(cls, temporaries: Storages, shard: Storages, *, offload: bool) -> WeightTransfer:
        """The transfer that makes a shard from `temporaries`. With `offload` the shard is temporary too, because it moves to the host at
        once.
        """
        return cls(temporaries=temporaries + shard) if offload else cls(temporaries=temporaries, kept=shard)

    @classmethod
    def of_loaded(
        cls, whole: Storages, shard: Storages, *, temporaries: Storages = NO_STORAGES, offload: bool
    ) -> tuple[WeightTransfer, WeightTransfer]:
        """The transfers that make a shard from weights that are on the GPU before, and then free these."""
        return cls.of_shard(temporaries, shard, offload=offload), cls(temporaries=whole, is_loaded=True)
