"""Expandable segments: address space whose pages are mapped when blocks need them and unmapped when the blocks are free.

Source: c10/cuda/CUDACachingAllocator.cpp (torch 2.13), ExpandableSegment and the functions named below.
"""

from __future__ import annotations

from fsdp_advisor.memory.allocator.blocks import ADDRESS, SHIFT, Driver, FreeBlocks
from fsdp_advisor.memory.allocator.conf import SMALL_BUFFER, AllocatorConf

ADDRESS_SPACE_BYTES = 2**40
"""Address space of one segment. PyTorch reserves 1 1/8 of the device's memory. Both are more than can be mapped."""


class ExpandableSegments:
    """The segments of all pools. `unmapped[pool]`: address -> bytes of each unmapped block. `pool`: twice the number of the stream, plus 1
    for large blocks.
    """

    def __init__(self, blocks: FreeBlocks, driver: Driver, conf: AllocatorConf) -> None:
        self._blocks, self._driver, self._conf = blocks, driver, conf
        self.unmapped: dict[int, dict[int, int]] = {}
        self.segments: dict[int, tuple[int, int]] = {}  # address -> (bytes of address space, pool)

    def page_bytes(self, pool: int) -> int:
        """The page size of a pool. Source: find_expandable_block, segment_size."""
        return self._conf.large_segment_bytes if pool & 1 else SMALL_BUFFER

    def size_with_space(self, pool: int, key: int) -> int:
        """Bytes of a free block, with the unmapped space directly after it. Source: get_free_block, expandable_size."""
        n_bytes = key >> SHIFT
        return n_bytes + self.unmapped[pool].get((key & ADDRESS) + n_bytes, 0)

    def allocate(self, pool: int, need: int) -> int | None:
        """The key of a free block with at least `need` bytes, mapped as needed; None if the driver refuses.

        Source: try_allocate_expandable_block.
        """
        start = self._find(pool, need)
        space, blocks = self.unmapped[pool], self._blocks
        while (have := blocks.starting_at(start)) < need:
            following = start + have
            if not self._map(pool, following, min(space[following], need - have)):
                return None
        return blocks.edges[start]

    def _find(self, pool: int, need: int) -> int:
        """The lowest address at which contiguous free and unmapped blocks of at least `need` bytes begin.

        Source: find_expandable_block.
        """
        blocks, space = self._blocks, self.unmapped.setdefault(pool, {})
        for unmapped in sorted(space):
            before = blocks.ending_at(unmapped)
            start = end = unmapped if before is None else before
            while end - start < need and (n_bytes := space.get(end, 0) or blocks.starting_at(end)):
                end += n_bytes
            if end - start >= need:
                return start
        page = self.page_bytes(pool)
        n_bytes = -(-max(ADDRESS_SPACE_BYTES, need) // page) * page  # whole pages: ExpandableSegment, max_handles_
        start = self._driver.addresses(n_bytes)
        self.segments[start] = (n_bytes, pool)
        space[start] = n_bytes
        return start

    def _map(self, pool: int, start: int, n_bytes: int) -> bool:
        """Map pages at the beginning of an unmapped block and merge them with free neighbours.

        Source: map_block, ExpandableSegment::map.
        """
        page = self.page_bytes(pool)
        n_bytes = -(-n_bytes // page) * page
        if not self._driver.take(n_bytes):
            return False
        space = self.unmapped[pool]
        left = space.pop(start) - n_bytes
        if left:
            space[start + n_bytes] = left
        self._blocks.give_back(pool, self._blocks.keys[pool], start, start + n_bytes)
        return True

    def unmap(self, pool: int, key: int) -> None:
        """Return the whole pages of a free block to the driver. Source: unmap_block, ExpandableSegment::unmap."""
        blocks, space, page = self._blocks, self.unmapped[pool], self.page_bytes(pool)
        start = key & ADDRESS
        end = start + (key >> SHIFT)
        base = max(s for s, (_, p) in self.segments.items() if p == pool and s <= start)
        first = base + -(-(start - base) // page) * page
        last = base + (end - base) // page * page
        if last <= first:
            return
        blocks.take(pool, key)
        if start < first:  # the partial page at the beginning stays mapped
            blocks.put(pool, start, first)
        if last < end:  # and the one at the end
            blocks.put(pool, last, end)
        # merge with unmapped neighbours
        before = next((at for at, n_bytes in space.items() if at + n_bytes == first), first)
        space[before] = last + space.pop(last, 0) - before
        self._driver.give(last - first)
