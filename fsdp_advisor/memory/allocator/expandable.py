"""Expandable segments: address space whose pages are mapped when blocks need them and unmapped when the blocks are free.

Source: c10/cuda/CUDACachingAllocator.cpp (torch 2.13), ExpandableSegment and the functions named below.
"""

from __future__ import annotations

from fsdp_advisor.memory.allocator.blocks import Driver, FreeBlocks
from fsdp_advisor.memory.allocator.conf import SMALL_BUFFER, AllocatorConf

ADDRESS_SPACE_BYTES = 2**40
"""Address space of one segment. PyTorch reserves 1 1/8 of the device's memory. Both are more than can be mapped."""


class ExpandableSegments:
    """The segments of one pool, whose free blocks are `blocks`.

    `segments`: address -> bytes of address space. `unmapped`: address -> bytes of each unmapped block.
    """

    def __init__(self, blocks: FreeBlocks, driver: Driver, conf: AllocatorConf) -> None:
        self._blocks, self._driver = blocks, driver
        self._page_bytes = (
            conf.large_segment_bytes if blocks.is_large else SMALL_BUFFER
        )  # find_expandable_block, segment_size
        self.segments: dict[int, int] = {}
        self.unmapped: dict[int, int] = {}

    def choose(self, least: int) -> tuple[int, int] | None:
        """The start and bytes of the free block to use for a request of `least` bytes; None if no block has them.

        Larger blocks are preferred while each has less space than the one before. The space of a block is its bytes and the unmapped ones
        directly after it. Source: get_free_block, expandable_size.
        """
        chosen, smallest = None, 0
        for start, n_bytes in self._blocks.by_size(least):
            space = n_bytes + self.unmapped.get(start + n_bytes, 0)
            if chosen and space >= smallest:
                break
            chosen, smallest = (start, n_bytes), space
        return chosen

    def allocate(self, need: int) -> tuple[int, int] | None:
        """The start and bytes of a block of at least `need` bytes, mapped as needed; None if the driver refuses.

        Source: try_allocate_expandable_block.
        """
        start = self._find(need)
        while (have := self._blocks.starting_at(start)) < need:
            following = start + have
            if not self._map(following, min(self.unmapped[following], need - have)):
                return None
        self._blocks.take(start, have)
        return start, have

    def _find(self, need: int) -> int:
        """The lowest address at which contiguous free and unmapped blocks of at least `need` bytes begin.

        Source: find_expandable_block.
        """
        blocks, space = self._blocks, self.unmapped
        for unmapped in sorted(space):
            start = end = unmapped - blocks.ending_at(unmapped)
            while end - start < need and (n_bytes := space.get(end, 0) or blocks.starting_at(end)):
                end += n_bytes
            if end - start >= need:
                return start
        page = self._page_bytes
        n_bytes = -(-max(ADDRESS_SPACE_BYTES, need) // page) * page  # whole pages: ExpandableSegment, max_handles_
        start = self._driver.addresses(n_bytes)
        self.segments[start] = space[start] = n_bytes
        return start

    def _map(self, start: int, n_bytes: int) -> bool:
        """Map pages at the beginning of an unmapped block and merge them with free neighbours.

        Source: map_block, ExpandableSegment::map.
        """
        n_bytes = -(-n_bytes // self._page_bytes) * self._page_bytes
        if not self._driver.take(n_bytes):
            return False
        left = self.unmapped.pop(start) - n_bytes
        if left:
            self.unmapped[start + n_bytes] = left
        self._blocks.give_back(start, n_bytes)
        return True

    def unmap(self, start: int, n_bytes: int) -> None:
        """Return the whole pages of a free block to the driver. Source: unmap_block, ExpandableSegment::unmap."""
        blocks, space, page = self._blocks, self.unmapped, self._page_bytes
        end = start + n_bytes
        base = max(segment for segment in self.segments if segment <= start)
        first = base + -(-(start - base) // page) * page
        last = base + (end - base) // page * page
        if last <= first:
            return
        blocks.take(start, n_bytes)
        if start < first:  # the partial page at the beginning stays mapped
            blocks.put(start, first - start)
        if last < end:  # and the one at the end
            blocks.put(last, end - last)
        # merge with unmapped neighbours
        before = next((at for at, n_bytes in space.items() if at + n_bytes == first), first)
        space[before] = last + space.pop(last, 0) - before
        self._driver.give(last - first)
