"""PyTorch's CUDA caching allocator, rule by rule, over numbered storages.

The driver supplies segments, which are divided into blocks without gaps. The allocator keeps free blocks per stream and pool
(small: requests up to 1 MiB; large: all others), sorted by size and address.

Source: c10/cuda/CUDACachingAllocator.cpp, DeviceCachingAllocator (torch 2.13); each rule names its function there.
Not modelled: private pools other than those of one captured step (`keep_pools`), `MemPool`, callbacks that free memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp_advisor.memory.allocator.blocks import ADDRESS, NO_KEY, SHIFT, Driver, FreeBlocks
from fsdp_advisor.memory.allocator.conf import (
    DEFAULT_CONF,
    MIN_LARGE_ALLOC,
    ROUND_LARGE,
    SMALL_BUFFER,
    SMALL_SIZE,
    UNLIMITED,
    AllocatorConf,
)
from fsdp_advisor.memory.allocator.expandable import ExpandableSegments
from fsdp_advisor.program.storages import ALIGNMENT, round_up

MALLOC, FREE, FREE_LATER, WAIT = range(4)
"""The kinds of operation. An operation is ``storage * 4 + kind``; WAIT has the number of late frees that have ended by then
instead of a storage.
"""


def operation(kind: int, storage: int) -> int:
    """The number that stands for an operation. Loops over all operations of a step compute it and its parts in place: as calls they would
    take 2 % of the time of an estimate.

    >>> kind_of(operation(FREE, 7)) == FREE, storage_of(operation(FREE, 7))
    (True, 7)
    """
    return storage * 4 + kind


def kind_of(operation: int) -> int:
    """The kind of an operation: MALLOC, FREE, FREE_LATER or WAIT."""
    return operation & 3


def storage_of(operation: int) -> int:
    """The storage of an operation; of a WAIT, the number of late frees that have ended."""
    return operation >> 2


STREAM_MASK = ALIGNMENT - 1
"""A request is its size (a multiple of 512) with the stream's number in the lowest bits."""


def round_size(n_bytes: int, conf: AllocatorConf) -> int:
    """The bytes of a request's block: a multiple of 512, or a step between two powers of two.

    Source: round_size, roundup_power2_next_division.
    >>> round_size(1200 * 2**20, AllocatorConf.parse("roundup_power2_divisions:4")) // 2**20
    1280
    """
    divisions = conf.divisions_for(n_bytes)
    if n_bytes < ALIGNMENT or divisions <= 1 or n_bytes <= ALIGNMENT * divisions:
        return max(round_up(n_bytes), ALIGNMENT)
    step = (1 << (n_bytes.bit_length() - 1)) // divisions
    return -(-n_bytes // step) * step


def allocation_size(n_bytes: int, conf: AllocatorConf) -> int:
    """The bytes requested from the driver when no cached block is large enough. Source: get_allocation_size."""
    if n_bytes <= SMALL_SIZE:
        return SMALL_BUFFER
    if n_bytes < MIN_LARGE_ALLOC:
        return conf.large_segment_bytes
    return -(-n_bytes // ROUND_LARGE) * ROUND_LARGE


class OutOfMemory(Exception):
    """The driver refused a request even after the allocator released its cache."""

    def __init__(self, storage: int, asked_bytes: int) -> None:
        super().__init__(storage, asked_bytes)
        self.storage, self.asked_bytes = storage, asked_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSegment:
    """A segment as in `torch.cuda.memory_snapshot()`: its blocks in order, as (bytes, whether in use)."""

    stream: int
    is_large: bool
    is_expandable: bool
    address: int
    blocks: tuple[tuple[int, bool], ...]

    @property
    def n_bytes(self) -> int:
        return sum(size for size, _ in self.blocks)


_Need = tuple[int, list[int], int, int, int]
"""What a request needs: its pool, the pool's list in `FreeBlocks.keys`, its bytes, the least key of a block that is large enough,
and the least key of a block that is split.
"""


class CachingAllocator:
    """One device's allocator. The driver supplies at most `limit_bytes`. `device_bytes`: the device's memory, to which
    fractions refer.

    `requests[storage]` is each storage's request: its size and stream. `run` executes operations on storages. `address` is each storage's
    address. `gpu_keeps_up`: whether other streams have finished with a freed block by the next malloc; if not, a WAIT
    operation says when.
    """

    def __init__(
        self,
        requests: Sequence[int],
        conf: AllocatorConf = DEFAULT_CONF,
        *,
        limit_bytes: int | None = None,
        device_bytes: int | None = None,
        gpu_keeps_up: bool = False,
    ) -> None:
        self.conf = conf
        device = device_bytes if device_bytes is not None else limit_bytes
        allowed = UNLIMITED if device is None else conf.allowed_bytes(device)
        self.driver = Driver(limit_bytes, allowed)
        self.free_blocks = FreeBlocks()
        self._expandable = ExpandableSegments(self.free_blocks, self.driver, conf) if conf.expandable_segments else None
        self._takes_first_fit = self._expandable is None and conf.max_split_bytes == UNLIMITED
        self._collects = conf.collects_garbage and device is not None
        self.free_blocks.keeps_ages = self._collects
        self.allocated = self.allocated_peak = self.requested = self.requested_peak = self.retries = 0
        self._segments: dict[int, tuple[int, int]] = {}  # address -> (bytes, pool)
        self.delays_frees = False  # whether another stream ever delayed a free
        self._late: deque[int] = deque()  # freed storages that another stream still uses
        self._late_over = 0
        self._gpu_keeps_up = gpu_keeps_up
        self.address: list[int] = []
        self._block_bytes: list[int] = []  # of each storage's block; 0 while the storage has none
        self._needs: list[_Need] = []  # of each storage
        self.extend(requests)

    def extend(self, requests: Sequence[int]) -> None:
        """Add storages, which get the next numbers."""
        needs = {request: self._need(request & ~STREAM_MASK, request & STREAM_MASK) for request in set(requests)}
        self._needs += [needs[request] for request in requests]
        self.address += [0] * len(requests)
        self._block_bytes += [0] * len(requests)

    def _need(self, n_bytes: int, stream: int) -> _Need:
        """The pool and sizes that a request needs. Source: get_pool, should_split."""
        if any(self.conf.roundup_power2_divisions):
            n_bytes = round_size(n_bytes, self.conf)
        is_large = n_bytes > SMALL_SIZE
        least_rest = SMALL_SIZE + 1 if is_large and self._expandable is None else ALIGNMENT
        stays_whole = is_large and self._expandable is None and n_bytes >= self.conf.max_split_bytes
        split_from = NO_KEY if stays_whole else (n_bytes + least_rest) << SHIFT
        pool = 2 * stream + is_large
        return pool, self.free_blocks.keys[pool], n_bytes, n_bytes << SHIFT, split_from

    # Running operations

    def run(self, operations: Sequence[int]) -> None:
        """Execute operations in order. Raises OutOfMemory."""
        needs, address, block_bytes = self._needs, self.address, self._block_bytes
        malloc, give_back = self._malloc, self.free_blocks.give_back
        for operation in operations:
            kind = operation & 3
            number = operation >> 2
            if kind == MALLOC:
                malloc(number)
            elif kind == FREE:
                pool, keys, need, _, _ = needs[number]
                start = address[number]
                n_bytes = block_bytes[number]
                block_bytes[number] = 0
                self.allocated -= n_bytes
                self.requested -= need
                give_back(pool, keys, start, start + n_bytes)
            elif kind == FREE_LATER:  # free, insert_events: another stream still uses it
                self.allocated -= block_bytes[number]
                self._late.append(number)
                self.delays_frees = True
            else:
                self._end_late(number - self._late_over)

    def _malloc(self, number: int) -> None:
        """Allocate the storage `number`: take the front of the smallest free block that is large enough, or get a new block from the
        driver.

        Source: malloc, get_free_block, alloc_found_block.
        """
        if self._gpu_keeps_up and self._late:  # process_events
            self._end_late(len(self._late))
        pool, keys, need, least_key, split_from = self._needs[number]
        blocks = self.free_blocks
        edges = blocks.edges
        if self._collects:
            blocks.searches[pool & 1] += 1
        at = bisect_right(keys, -least_key) - 1  # the smallest block that is large enough, at the lowest address
        if at < 0 or not (self._takes_first_fit or (at := self._choose(pool, at, need)) >= 0):
            at = bisect_left(keys, -self._new_block(number, pool, need))
        key = -keys[at]
        start = key & ADDRESS
        n_bytes = key >> SHIFT
        del edges[start]
        if key < split_from:  # the whole block
            del keys[at], edges[start + n_bytes]
        else:  # its front
            rest = key - least_key + need
            edges[start + need] = edges[start + n_bytes] = rest
            n_bytes = need
            if at + 1 < len(keys) and keys[at + 1] < -rest:
                del keys[at]
                insort(keys, -rest, at)
            else:
                keys[at] = -rest
            if self._collects:
                blocks.age(pool, start + need)
        self.address[number] = start
        self._block_bytes[number] = n_bytes
        self.allocated += n_bytes
        self.requested += need
        if self.allocated > self.allocated_peak:
            self.allocated_peak = self.allocated
        if self.requested > self.requested_peak:
            self.requested_peak = self.requested

    def synchronize(self) -> None:
        """Free all blocks that another stream still uses; the host waits for the GPU. Source: synchronize_and_free_events."""
        self._end_late(len(self._late))

    def begin_step(self, carried_over: Iterable[tuple[int, int]] = ()) -> None:
        """Begin a step: count late frees from zero. `carried_over`: pairs of a storage's number in the last step and in this one."""
        self.synchronize()
        self._late_over = 0
        for before, now in carried_over:
            self.address[now] = self.address[before]
            self._block_bytes[now], self._block_bytes[before] = self._block_bytes[before], 0

    def _end_late(self, count: int) -> None:
        """End the first `count` late frees. Their bytes count as requested until now (free_block)."""
        for _ in range(count):
            self._late_over += 1
            number = self._late.popleft()
            pool, keys, need, _, _ = self._needs[number]
            start = self.address[number]
            self.requested -= need
            self.free_blocks.give_back(pool, keys, start, start + self._block_bytes[number])
            self._block_bytes[number] = 0

    # Cached blocks

    def _choose(self, pool: int, at: int, need: int) -> int:
        """The index of the free block to use: `at` or that of a larger one; -1 if none is suitable. Source: get_free_block."""
        cached, conf, expandable = self.free_blocks.keys[pool], self.conf, self._expandable
        if expandable is not None:
            smallest = expandable.size_with_space(pool, -cached[at])
            while at and (size := expandable.size_with_space(pool, -cached[at - 1])) < smallest:
                smallest, at = size, at - 1
        have = -cached[at] >> SHIFT
        if need < conf.max_split_bytes <= have:
            return -1
        if need >= conf.max_split_bytes and have >= need + conf.non_split_rounding_bytes:
            return -1
        return at

    def _new_block(self, number: int, pool: int, need: int) -> int:
        """The key of a new free block from the driver, after garbage collection. If the driver refuses, release the cache and
        retry. Source: malloc.
        """
        asked = allocation_size(need, self.conf)
        if self._collects:
            self._collect_garbage()
        block = self._alloc_block(pool, need, asked)
        if block is None and self._release_available(pool, need):
            block = self._alloc_block(pool, need, asked)
        if block is None:
            self.release_cached()
            self.retries += 1
            block = self._alloc_block(pool, need, asked)
        if block is None:
            raise OutOfMemory(number, asked)
        return block

    def _alloc_block(self, pool: int, need: int, asked: int) -> int | None:
        """The key of a new free block for a request of `need` bytes. Asks the driver for `asked` bytes; None if the driver refuses.

        Source: alloc_block.
        """
        if not self.driver.allows(asked):
            return None
        if self._expandable is not None:
            return self._expandable.allocate(pool, need)
        if not self.driver.take(asked):
            return None
        start = self.driver.addresses(asked)
        self._segments[start] = (asked, pool)
        return self.free_blocks.put(pool, start, start + asked)

    # Giving back to the driver

    def release_cached(self) -> None:
        """Release every segment that is entirely free, and every free page of expandable ones. Source: release_cached_blocks."""
        self.synchronize()
        for pool in sorted(self.free_blocks.keys, key=lambda pool: (not pool & 1, pool)):
            for key in self.free_blocks.by_size(pool):
                if self._expandable is not None:
                    self._expandable.unmap(pool, key)
                elif self._is_whole(key):
                    self._release(pool, key)

    def _is_whole(self, key: int) -> bool:
        """Whether a free block is its entire segment: `!block->is_split()`."""
        return self._segments.get(key & ADDRESS, (0, 0))[0] == key >> SHIFT

    def _release(self, pool: int, key: int) -> None:
        """Return the segment of a free block to the driver. Source: release_block."""
        self.free_blocks.take(pool, key)
        self.driver.give(key >> SHIFT)
        del self._segments[key & ADDRESS]

    def _release_available(self, pool: int, need: int) -> bool:
        """Release oversize blocks of this stream, only as many as needed. Source: release_available_cached_blocks."""
        conf = self.conf
        if conf.max_split_bytes == UNLIMITED or self._expandable is not None:
            return False
        cached, target = self.free_blocks.by_size(pool), max(need, conf.max_split_bytes)
        at = bisect_left(cached, target << SHIFT)
        if at < len(cached):
            self._release(pool, cached[at])
            return True
        released = 0
        while cached and released < target and cached[-1] >> SHIFT >= conf.max_split_bytes:
            released += cached[-1] >> SHIFT
            self._release(pool, cached.pop())
        return released >= target

    def _collect_garbage(self) -> None:
        """Release large free segments that have been free for longer than the average. Source: garbage_collect_cached_blocks."""
        threshold = int(self.conf.garbage_collection_threshold * self.driver.allowed_bytes)
        target = self.driver.reserved - threshold
        if target <= 0 or self._expandable is not None:
            return
        ages = self.free_blocks.ages
        left = [
            (pool, key, self.free_blocks.searches[1] - ages[key & ADDRESS])
            for pool in sorted(self.free_blocks.keys)
            for key in self.free_blocks.by_size(pool)
            if pool & 1 and self._is_whole(key)
        ]
        total_age, reclaimed, freed = sum(age for _, _, age in left), 0, True
        while reclaimed < target and freed and left:
            threshold_age, freed, kept = total_age / len(left), False, []
            for pool, key, age in left:
                if age >= threshold_age:
                    freed = True
                    reclaimed += key >> SHIFT
                    total_age -= age
                    self._release(pool, key)
                else:
                    kept.append((pool, key, age))
            left = kept

    def keep_pools(self, stream: int) -> None:
        """Keep the free blocks of a stream for good: nothing can use or release the pools of a captured graph."""
        for pool in (2 * stream, 2 * stream + 1):
            for key in self.free_blocks.by_size(pool):
                self.free_blocks.take(pool, key)

    # Snapshots

    def segments(self) -> Iterator[AllocatorSegment]:
        """Every segment, as in `snapshot`. An expandable segment yields each stretch of mapped memory."""
        in_use = {start: size for start, size in zip(self.address, self._block_bytes, strict=True) if size}
        expandable = self._expandable
        for start, (n_bytes, pool) in sorted((self._segments if expandable is None else expandable.segments).items()):
            unmapped = expandable.unmapped[pool] if expandable else {}
            for first, blocks in self._stretches(start, start + n_bytes, in_use, unmapped):
                yield AllocatorSegment(
                    stream=pool >> 1,
                    is_large=bool(pool & 1),
                    is_expandable=expandable is not None,
                    address=first,
                    blocks=blocks,
                )

    def _stretches(
        self, at: int, end: int, in_use: Mapping[int, int], unmapped: Mapping[int, int]
    ) -> Iterator[tuple[int, tuple[tuple[int, bool], ...]]]:
        """The start and the blocks (bytes, whether in use) of each stretch of mapped memory in a segment."""
        first, blocks = at, list[tuple[int, bool]]()
        while at < end:
            if at in unmapped:
                if blocks:
                    yield first, tuple(blocks)
                at += unmapped[at]
                first, blocks = at, []
            else:
                blocks.append((in_use.get(at) or self.free_blocks.starting_at(at), at in in_use))
                at += blocks[-1][0]
        if blocks:
            yield first, tuple(blocks)
