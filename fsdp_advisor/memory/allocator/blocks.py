"""The allocator's data structures: free blocks by size and by address, and the driver that supplies memory.

Source: c10/cuda/CUDACachingAllocator.cpp (torch 2.13), struct Block, struct BlockPool.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

from fsdp_advisor.memory.allocator.conf import ROUND_LARGE, UNLIMITED

SHIFT = 80
ADDRESS = (1 << SHIFT) - 1
"""A free block's key is ``size << SHIFT | address``, which sorts by size, then by address (BlockComparatorSize).

The largest possible request needs addresses of about 70 bits. The driver's 48 bits are too few for requests that fit no GPU.
"""
NO_KEY = 1 << 2 * SHIFT
"""Larger than every key."""


class Driver:
    """The GPU's driver. It supplies at most `limit_bytes`; the allocator requests at most `allowed_bytes` (`setMemoryFraction`).

    The driver's addresses are unknown, so ascending addresses stand in for them. They matter only for the choice between free
    blocks of equal size. `asked_peak`: the largest sum of reserved bytes and a pending request. Expandable segments may map less
    than was requested, because they have a part of it already.
    """

    def __init__(self, limit_bytes: int | None, allowed_bytes: int) -> None:
        self._limit = UNLIMITED if limit_bytes is None else limit_bytes
        self.allowed_bytes = allowed_bytes
        self.reserved = self.peak = self.asked_peak = self.calls = 0
        self._top = ROUND_LARGE

    def allows(self, n_bytes: int) -> bool:
        """Whether the allocator may request `n_bytes` more."""
        asked = self.reserved + n_bytes
        self.asked_peak = max(self.asked_peak, asked)
        return asked <= self.allowed_bytes

    def take(self, n_bytes: int) -> bool:
        if self.reserved + n_bytes > self._limit:
            return False
        self.calls += 1
        self.reserved += n_bytes
        self.peak = max(self.peak, self.reserved)
        return True

    def give(self, n_bytes: int) -> None:
        self.calls += 1
        self.reserved -= n_bytes

    def addresses(self, n_bytes: int) -> int:
        """The start of new address space that is not adjacent to any other."""
        start = self._top
        self._top += -(-n_bytes // ROUND_LARGE) * ROUND_LARGE + ROUND_LARGE
        return start


class FreeBlocks:
    """The free blocks. A `pool` number is twice the stream's number, plus one for the large pool.

    `keys`: the negated keys by pool, sorted: the largest block is the first. Free blocks that are larger than requests accumulate; in this
    order an insertion or removal does not move them. `edges`: the key of the block that begins or ends at an address. Two free blocks
    are never adjacent, so each address has at most one key.
    """

    def __init__(self) -> None:
        self.keys: defaultdict[int, list[int]] = defaultdict(list)
        self.edges: dict[int, int] = {}
        self.keeps_ages = False  # only garbage collection needs them
        self.ages: dict[int, int] = {}  # by address: `gc_count_base`
        self.searches = [0, 0]  # for the small and the large pool: `get_free_blocks_call_count`

    def by_size(self, pool: int) -> list[int]:
        """The keys of a pool's blocks, the smallest first."""
        return [-key for key in reversed(self.keys[pool])]

    def starting_at(self, address: int) -> int:
        """Bytes of the free block that begins at an address; 0 if there is none."""
        key = self.edges.get(address, 0)
        return key >> SHIFT if key & ADDRESS == address else 0

    def ending_at(self, address: int) -> int | None:
        """The start of the free block that ends at an address; None if there is none."""
        key = self.edges.get(address)
        return None if key is None or key & ADDRESS == address else key & ADDRESS

    def age(self, pool: int, start: int) -> None:
        """Note when the block at an address became free. Only garbage collection needs it."""
        self.ages[start] = self.searches[pool & 1]

    def put(self, pool: int, start: int, end: int) -> int:
        """Insert a block that has no free neighbours, and return its key."""
        key = (end - start) << SHIFT | start
        self.edges[start] = self.edges[end] = key
        insort(self.keys[pool], -key)
        if self.keeps_ages:
            self.age(pool, start)
        return key

    def take(self, pool: int, key: int) -> None:
        """Remove a block."""
        keys, start = self.keys[pool], key & ADDRESS
        del keys[bisect_left(keys, -key)], self.edges[start], self.edges[start + (key >> SHIFT)]

    def give_back(self, pool: int, keys: list[int], start: int, end: int) -> None:
        """Merge a block with its free neighbours and insert it into `keys`, those of its pool. Source: free_block, try_merge_blocks."""
        edges = self.edges
        after = edges.pop(end, None)
        if after is not None:
            del keys[bisect_left(keys, -after)]
            end += after >> SHIFT
        before = edges.pop(start, None)
        if before is not None:
            del keys[bisect_left(keys, -before)]
            start = before & ADDRESS
        edges[start] = edges[end] = key = (end - start) << SHIFT | start
        insort(keys, -key)
        if self.keeps_ages:
            self.age(pool, start)
