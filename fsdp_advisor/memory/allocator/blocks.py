"""The allocator's data structures: free blocks by size and by address, and the driver that supplies memory.

Source: c10/cuda/CUDACachingAllocator.cpp (torch 2.13), struct Block, struct BlockPool.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from fsdp_advisor.memory.allocator.conf import ROUND_LARGE, UNLIMITED

_ADDRESS_SPACE = 1 << 50
"""More bytes than all requests of a job."""


class Driver:
    """The GPU's driver. It supplies at most `limit_bytes`; the allocator requests at most `allowed_bytes` (`setMemoryFraction`).

    `descends`: whether each request gets a lower address than those before, instead of a higher one. Addresses matter only for the choice
    between free blocks of equal size. `asked_peak`: the largest sum of reserved bytes and a pending request. Expandable segments may map
    less than was requested, because they have a part of it already.
    """

    def __init__(self, limit_bytes: int | None, allowed_bytes: int, *, descends: bool = False) -> None:
        self._limit = UNLIMITED if limit_bytes is None else limit_bytes
        self.allowed_bytes = allowed_bytes
        self.reserved = self.peak = self.asked_peak = self.calls = 0
        self._descends = descends
        self._next = _ADDRESS_SPACE if descends else ROUND_LARGE

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
        taken = -(-n_bytes // ROUND_LARGE) * ROUND_LARGE + ROUND_LARGE
        if self._descends:
            self._next -= taken
            return self._next
        self._next += taken
        return self._next - taken


class FreeBlocks:
    """The free blocks of one stream's small or large requests. Two of them are never adjacent, so each address has at most one.

    `sizes`: the sizes that occur, sorted. `starts`: by size, the negated addresses of its blocks, sorted: requests take the last.
    `edges`: by the address where a block begins, its size; by the address where it ends, its negated size.
    """

    def __init__(self, stream: int, is_large: bool) -> None:
        self.stream, self.is_large = stream, is_large
        self.sizes: list[int] = []
        self.starts: dict[int, list[int]] = {}
        self.edges: dict[int, int] = {}

    def by_size(self, least: int = 0) -> Iterator[tuple[int, int]]:
        """The start and bytes of the blocks of at least `least` bytes: the smallest first, and of equal ones that at the lowest address.

        Source: BlockComparatorSize.
        """
        for n_bytes in self.sizes[bisect_left(self.sizes, least) :]:
            for start in reversed(self.starts[n_bytes]):
                yield -start, n_bytes

    def starting_at(self, address: int) -> int:
        """Bytes of the free block that begins at an address; 0 if there is none."""
        return max(self.edges.get(address, 0), 0)

    def ending_at(self, address: int) -> int:
        """Bytes of the free block that ends at an address; 0 if there is none."""
        return max(-self.edges.get(address, 0), 0)

    def put(self, start: int, n_bytes: int) -> None:
        """Insert a block that has no free neighbours."""
        self.edges[start] = n_bytes
        self.edges[start + n_bytes] = -n_bytes
        equal = self.starts.get(n_bytes)
        if equal is None:
            self.starts[n_bytes] = [-start]
            insort(self.sizes, n_bytes)
        else:
            insort(equal, -start)

    def take(self, start: int, n_bytes: int) -> None:
        """Remove a block."""
        del self.edges[start], self.edges[start + n_bytes]
        self._remove(start, n_bytes)

    def take_smallest(self, least: int) -> tuple[int, int] | None:
        """Remove the first of the blocks `by_size`. Its start and bytes; None if no block has `least` bytes."""
        sizes, edges = self.sizes, self.edges
        at = bisect_left(sizes, least)
        if at == len(sizes):
            return None
        n_bytes = sizes[at]
        equal = self.starts[n_bytes]
        start = -equal.pop()
        if not equal:
            del self.starts[n_bytes], sizes[at]
        del edges[start], edges[start + n_bytes]
        return start, n_bytes

    def give_back(self, start: int, n_bytes: int) -> None:
        """Merge a block with its free neighbours and insert it. Source: free_block, try_merge_blocks."""
        edges = self.edges
        after = edges.pop(start + n_bytes, 0)
        if after:
            self._remove(start + n_bytes, after)
            n_bytes += after
        before = -edges.pop(start, 0)
        if before:
            start -= before
            self._remove(start, before)
            n_bytes += before
        self.put(start, n_bytes)

    def _remove(self, start: int, n_bytes: int) -> None:
        equal = self.starts[n_bytes]
        if len(equal) == 1:
            del self.starts[n_bytes], self.sizes[bisect_left(self.sizes, n_bytes)]
        else:
            del equal[bisect_left(equal, -start)]


class AgingBlocks(FreeBlocks):
    """Free blocks with their ages, which garbage collection needs. `searches`: the number of requests so far for blocks of this
    kind, on any stream (get_free_blocks_call_count). `freed_at`: by address, that number when the block became free
    (gc_count_base).
    """

    def __init__(self, stream: int, is_large: bool, searches: Callable[[], int]) -> None:
        super().__init__(stream, is_large)
        self._searches = searches
        self.freed_at: dict[int, int] = {}

    def put(self, start: int, n_bytes: int) -> None:
        super().put(start, n_bytes)
        self.freed_at[start] = self._searches()
