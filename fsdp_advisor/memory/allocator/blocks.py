"""What the allocator keeps: blocks by address, free ones by size; and the driver it takes memory from.

Source: c10/cuda/CUDACachingAllocator.cpp (torch 2.13), struct Block, struct BlockPool.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

from fsdp_advisor.memory.allocator.conf import ROUND_LARGE, UNLIMITED

SHIFT = 80
ADDRESS = (1 << SHIFT) - 1
"""A free block's key is ``size << SHIFT | address``: in order of size, then of address (BlockComparatorSize).

Addresses of the greatest request there can be take some 70 bits; the driver's own, 48, are not enough for what fits nowhere.
"""


class Driver:
    """Gives `limit_bytes` in all; the allocator asks for no more than `allowed_bytes` (`setMemoryFraction`).

    Addresses are made up and ascend, since the driver's are not known: they decide only between free blocks of equal size.
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
        """Address space that borders on no other."""
        start = self._top
        self._top += -(-n_bytes // ROUND_LARGE) * ROUND_LARGE + ROUND_LARGE
        return start


class Blocks:
    """All blocks. `pool` is twice the stream, plus one for the large pool.

    `size` is a block's bytes, negative while it is free. `before` is the address of the block that ends where this one
    begins. `free` are the keys of free blocks, by pool.
    """

    def __init__(self) -> None:
        self.size: dict[int, int] = {}
        self.before: dict[int, int] = {}
        self.free: defaultdict[int, list[int]] = defaultdict(list)
        self.ages: dict[int, int] | None = None  # kept for garbage collection: `gc_count_base`
        self.searches = [0, 0]  # of the small and of the large pool: `get_free_blocks_call_count`

    def is_free(self, address: int | None) -> bool:
        return address is not None and self.size.get(address, 0) < 0

    def put(self, pool: int, start: int, n_bytes: int) -> None:
        """Among the free ones."""
        self.size[start] = -n_bytes
        insort(self.free[pool], n_bytes << SHIFT | start)
        if self.ages is not None:
            self.ages[start] = self.searches[pool & 1]

    def take(self, pool: int, start: int) -> int:
        """From the free ones: its bytes."""
        n_bytes = -self.size.pop(start)
        free = self.free[pool]
        del free[bisect_left(free, n_bytes << SHIFT | start)]
        return n_bytes

    def give_back(self, pool: int, start: int) -> None:
        """A block in use becomes free, one with its free neighbours. Source: free_block, try_merge_blocks."""
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
