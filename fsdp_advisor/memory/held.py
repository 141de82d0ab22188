"""Tensor storages in bulk: what they hold, and what they take when each is rounded up to the allocator's 512 bytes."""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 512
"""Source: c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize."""


def round_up(n_bytes: int) -> int:
    """A storage's bytes, rounded up to 512.

    >>> round_up(0), round_up(1), round_up(512), round_up(513)
    (0, 512, 512, 1024)
    """
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Held:
    """Storages that live together: `exact` bytes of tensors, `rounded` bytes with each storage rounded up to 512."""

    exact: int = 0
    rounded: int = 0

    @classmethod
    def of(cls, n_bytes: int, count: int = 1) -> Held:
        """`count` storages of `n_bytes` each."""
        return cls(n_bytes * count, round_up(n_bytes) * count)

    def __add__(self, other: Held) -> Held:
        return Held(self.exact + other.exact, self.rounded + other.rounded)

    def __mul__(self, count: int) -> Held:
        return Held(self.exact * count, self.rounded * count)


NOTHING = Held()


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """What rank 0 keeps on the GPU from step to step. `communication` are buffers kept for collectives (DDP's, DeepSpeed's)."""

    parameters: Held = NOTHING
    gradients: Held = NOTHING
    optimizer: Held = NOTHING
    communication: Held = NOTHING
    buffers: Held = NOTHING
