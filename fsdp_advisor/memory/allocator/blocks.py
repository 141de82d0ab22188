"""The allocator's data structures: blocks by address, free blocks by size, and the driver that supplies memory.

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


class Driver:
    """The driver supplies at most `limit_bytes`; the allocator requests at most `allowed_bytes` (`setMemoryFraction`).

    The driver's addresses are unknown, so ascending addresses stand in for them. They matter only for the choice between free
    blocks of equal size.
    """

    def __init__(self, limit_bytes: int | None, allowed_bytes: int) -> None:
        self._limit = UNLIMITED if limit_bytes is None else limit_bytes
        self.allowed_bytes = allowed_bytes
        self.reserved = self.peak = self.calls = 0
        self._top = ROUND_LARGE

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


class Blocks:
    """All blocks. A `pool` number is twice the stream's number, plus one for the large pool.

    `size`: a block's bytes, negative while the block is free. `before`: the address of the block that ends where this one
    begins. `free`: the keys of free blocks, by pool.
    """

    def __init__(self) -> None:
        self.size: dict[int, int] = {}
        self.before: dict[int, int] = {}
        self.free: defaultdict[int, list[int]] = defaultdict(list)
        self.ages: dict[int, int] | None = None  # kept for garbage collection: `gc_count_base`
        self.searches = [0, 0]  # for the small and the large pool: `get_free_blocks_call_count`

    def is_free(self, address: int | None) -> bool:
        return address is not None and self.size.get(address, 0) < 0

    def put(self, pool: int, start: int, n_bytes: int) -> None:
        """Insert a block into the free list."""
        self.size[start] = -n_bytes
        insort(self.free[pool], n_bytes << SHIFT | start)
        if self.ages is not None:
            self.ages[start] = self.searches[pool & 1]

    def take(self, pool: int, start: int) -> int:
        """Remove a block from the free list and return its bytes."""
        n_bytes = -self.size.pop(start)
        free = self.free[pool]
        del free[bisect_left(free, n_bytes << SHIFT | start)]
        return n_bytes

    def give_back(self, pool: int, start: int) -> None:
        """Free a block and merge it with its free neighbours. Source: free_block, try_merge_blocks."""
        size, before, free = self.size, self.before, self.free[pool]
        n_bytes = size[start]
        end = start + n_bytes
        other = size.get(end, 0)
        if other < 0:
            del free[bisect_left(free, -other << SHIFT | end)]
            del size[end], before[end]
            n_bytes -= other
        prior = before.get(start)
        if prior is not None:
            other = size.get(prior, 0)
            if other < 0:
                del free[bisect_left(free, -other << SHIFT | prior)]
                del size[start], before[start]
                start = prior
                n_bytes -= other
        size[start] = -n_bytes
        end = start + n_bytes
        if end in before:
            before[end] = start
        insort(free, n_bytes << SHIFT | start)
        if self.ages is not None:
            self.ages[start] = self.searches[pool & 1]
