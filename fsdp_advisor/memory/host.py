"""Host memory of one node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes that the ranks of one node keep in host memory from step to step."""

    pinned: int = 0
    pageable: int = 0

    @property
    def steady(self) -> int:
        return self.pinned + self.pageable


def page_locked(n_bytes: int) -> int:
    """Bytes that torch locks in host memory for a pinned tensor of `n_bytes`: the next power of two.

    Setting ``pinned_max_round_threshold`` changes this; it is not set by default.
    Source: CachingHostAllocator.h (torch 2.13).

    >>> page_locked(0), page_locked(1), page_locked(4096), page_locked(4097)
    (0, 1, 4096, 8192)
    """
    return 1 << (n_bytes - 1).bit_length() if n_bytes else 0
