"""Expandable segments: address space whose pages are mapped when blocks need them and unmapped when the blocks are free.

Source: c10/cuda/CUDACachingAllocator.cpp (torch 2.13), ExpandableSegment and the functions named below.
"""

from __future__ import annotations

from fsdp_advisor.memory.allocator.blocks import Blocks, Driver
from fsdp_advisor.memory.allocator.conf import SMALL_BUFFER, AllocatorConf

ADDRESS_SPACE_BYTES = 2**40
"""Address space of one segment. PyTorch reserves 1 1/8 of the device's memory. Both are more than can be mapped."""


class ExpandableSegments:
    """The segments of all pools. `unmapped[pool]`: address -> bytes of each unmapped block; `before` contains these blocks
    too.
    """

    def __init__(self, blocks: Blocks, driver: Driver, conf: AllocatorConf) -> None:
        self._blocks, self._driver, self._conf = blocks, driver, conf
        self.unmapped: dict[int, dict[int, int]] = {}
        self.segments: dict[int, tuple[int, int]] = {}  # address -> (bytes of address space, pool)

    def page_bytes(self, pool: int) -> int:
        """The page size of a pool. Source: find_expandable_block, segment_size."""
        return self._conf.large_segment_bytes if pool & 1 else SMALL_BUFFER

    def size_with_space(self, pool: int, start: int, n_bytes: int) -> int:
        """Bytes of a free block, with the unmapped space directly after it. Source: get_free_block, expandable_size."""
        return n_bytes + self.unmapped[pool].get(start + n_bytes, 0)

    def allocate(self, pool: int, need: int) -> tuple[int, int] | None:
        """(address, bytes) of contiguous free and unmapped space, mapped as needed; None if the driver refuses.

        Source: try_allocate_expandable_block.
        """
        start = self._find(pool, need)
        space, blocks = self.unmapped[pool], self._blocks
        if start in space and not self._map(pool, start, min(space[start], need)):
            return None
        while (have := -blocks.size[start]) < need:
            following = start + have
            if not self._map(pool, following, min(space[following], need - have)):
                return None
        return start, blocks.take(pool, start)

    def _find(self, pool: int, need: int) -> int:
        """The lowest address at which contiguous free and unmapped blocks of at least `need` bytes begin.

        Source: find_expandable_block.
        """
        blocks, space = self._blocks, self.unmapped.setdefault(pool, {})
        for start in sorted(space):
            prior = blocks.before.get(start)
            if prior is not None and blocks.is_free(prior):
                start = prior
            end = start
            while end - start < need and (end in space or blocks.is_free(end)):
                end += space[end] if end in space else -blocks.size[end]
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
        blocks, space = self._blocks, self.unmapped[pool]
        left = space.pop(start) - n_bytes
        if left:
            rest = start + n_bytes
            space[rest] = left
            blocks.before[rest] = start
            if rest + left in blocks.before:
                blocks.before[rest + left] = rest
        blocks.size[start] = n_bytes
        blocks.give_back(pool, start)
        return True

    def unmap(self, pool: int, start: int) -> None:
        """Return the whole pages of a free block to the driver. Source: unmap_block, ExpandableSegment::unmap."""
        blocks, space, page = self._blocks, self.unmapped[pool], self.page_bytes(pool)
        base = max(s for s, (_, p) in self.segments.items() if p == pool and s <= start)
        after = start - blocks.size[start]
        first = base + -(-(start - base) // page) * page
        last = base + (after - base) // page * page
        if last <= first:
            return
        blocks.take(pool, start)
        prior = blocks.before.pop(start, None)
        if start < first:  # the partial page at the beginning stays mapped
            blocks.put(pool, start, first - start)
            if prior is not None:
                blocks.before[start] = prior
            prior = start
        if last < after:  # and the one at the end
            blocks.put(pool, last, after - last)
            if after in blocks.before:
                blocks.before[after] = last
        at, end = first, last
        if end in space:  # merge with an unmapped neighbour
            end += space.pop(end)
            blocks.before.pop(last, None)
        if prior is not None and prior in space:
            at = prior
        elif prior is not None:
            blocks.before[at] = prior
        space[at] = end - at
        if at + space[at] in blocks.size:
            blocks.before[end] = at
        self._driver.give(last - first)
