"""PyTorch's CUDA caching allocator, rule by rule, over numbered storages.

The driver supplies segments, which are divided into blocks without gaps. The allocator keeps free blocks per stream and pool
(small: requests up to 1 MiB; large: all others), sorted by size and address.

Source: c10/cuda/CUDACachingAllocator.cpp, DeviceCachingAllocator (torch 2.13); each rule names its function there.
Not modelled: private pools of CUDA graphs, `MemPool`, callbacks that free memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_advisor.memory.allocator.blocks import ADDRESS, SHIFT, Blocks, Driver
from fsdp_advisor.memory.allocator.conf import (
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
instead of a storage."""

STREAM_MASK = ALIGNMENT - 1
"""A request is its size (a multiple of 512) with the stream's number in the lowest bits."""


def round_size(n_bytes: int, conf: AllocatorConf) -> int:
    """The bytes of a block that a request takes: a multiple of 512, or a step between two powers of two.

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
    """The driver refused a request, also after the allocator released its cache."""

    def __init__(self, storage: int, asked_bytes: int) -> None:
        super().__init__(storage, asked_bytes)
        self.storage, self.asked_bytes = storage, asked_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A segment as in `torch.cuda.memory_snapshot()`: its blocks in order, as (bytes, whether in use)."""

    stream: int
    is_large: bool
    is_expandable: bool
    address: int
    blocks: tuple[tuple[int, bool], ...]

    @property
    def n_bytes(self) -> int:
        return sum(size for size, _ in self.blocks)


class CachingAllocator:
    """One device's allocator. The driver supplies at most `limit_bytes`. `device_bytes`: the device's memory, to which
    fractions refer.

    `requests[storage]` is the request of each storage. `run` executes operations on storages. `address` is each storage's
    address. `gpu_keeps_up`: whether other streams have finished with a freed block by the next malloc; if not, a WAIT
    operation says when.
    """

    def __init__(
        self,
        requests: Sequence[int],
        conf: AllocatorConf | None = None,
        *,
        limit_bytes: int | None = None,
        device_bytes: int | None = None,
        gpu_keeps_up: bool = False,
    ) -> None:
        self.conf = conf = conf or AllocatorConf()
        if any(conf.roundup_power2_divisions):
            requests = [round_size(r & ~STREAM_MASK, conf) | (r & STREAM_MASK) for r in requests]
        self._requests = requests
        device = device_bytes if device_bytes is not None else limit_bytes
        allowed = UNLIMITED if device is None else int(conf.per_process_memory_fraction * device)
        self.driver = Driver(limit_bytes, allowed)
        self.blocks = Blocks()
        self._expandable = ExpandableSegments(self.blocks, self.driver, conf) if conf.expandable_segments else None
        self._collects = conf.collects_garbage and device is not None
        if self._collects:
            self.blocks.ages = {}
        self.address = [0] * len(requests)
        self.allocated = self.allocated_peak = self.requested = self.requested_peak = self.retries = 0
        self._segments: dict[int, tuple[int, int]] = {}  # address -> (bytes, pool)
        self._late: deque[int] = deque()  # freed storages that another stream still uses
        self._late_over = 0
        self._gpu_keeps_up = gpu_keeps_up

    # Walking

    def run(self, operations: Sequence[int]) -> None:
        """Execute operations in order. Raises OutOfMemory."""
        requests, address, blocks, collects = self._requests, self.address, self.blocks, self._collects
        late, gpu_keeps_up = self._late, self._gpu_keeps_up
        size, before, free, give_back = blocks.size, blocks.before, blocks.free, blocks.give_back
        whole_from = UNLIMITED if self._expandable else self.conf.max_split_bytes
        split_above = ALIGNMENT - 1 if self._expandable else SMALL_SIZE
        plain = self._expandable is None and self.conf.max_split_bytes == UNLIMITED
        allocated, allocated_peak, requested, requested_peak = (
            self.allocated, self.allocated_peak, self.requested, self.requested_peak
        )  # fmt: skip
        try:
            for operation in operations:
                kind = operation & 3
                number = operation >> 2
                if kind == MALLOC:
                    if gpu_keeps_up and late:  # process_events
                        requested -= self._end_late(len(late))
                    request = requests[number]
                    stream = request & STREAM_MASK
                    need = request - stream
                    is_large = need > SMALL_SIZE  # get_pool
                    pool = 2 * stream + is_large
                    cached = free[pool]
                    if collects:
                        blocks.searches[is_large] += 1
                    # get_free_block: the smallest block that is large enough, at the lowest address
                    at = bisect_left(cached, need << SHIFT)
                    if at < len(cached) and (plain or (at := self._choose(pool, at, need)) >= 0):
                        key = cached.pop(at)
                        start = key & ADDRESS
                        have = key >> SHIFT
                    else:
                        self.requested = requested
                        start, have = self._new_block(number, pool, need)
                        requested = self.requested
                    # should_split, alloc_found_block: the front is used, the rest stays free
                    rest = have - need
                    if (rest > split_above and need < whole_from) if is_large else rest >= ALIGNMENT:
                        size[start] = have = need
                        tail = start + need
                        size[tail] = -rest
                        before[tail] = start
                        end = tail + rest
                        if end in before:
                            before[end] = tail
                        insort(cached, rest << SHIFT | tail)
                        if blocks.ages is not None:
                            blocks.ages[tail] = blocks.searches[is_large]
                    else:
                        size[start] = have
                    address[number] = start
                    allocated += have
                    requested += need
                    if allocated > allocated_peak:
                        allocated_peak = allocated
                    if requested > requested_peak:
                        requested_peak = requested
                elif kind == WAIT:
                    requested -= self._end_late(number - self._late_over)
                else:
                    request = requests[number]
                    stream = request & STREAM_MASK
                    need = request - stream
                    start = address[number]
                    have = size[start]
                    allocated -= have
                    if kind == FREE:
                        requested -= need
                        give_back(2 * stream + (need > SMALL_SIZE), start)
                    else:  # free, insert_events: another stream still uses it
                        late.append(number)
        finally:
            self.allocated, self.allocated_peak, self.requested, self.requested_peak = (
                allocated, allocated_peak, requested, requested_peak
            )  # fmt: skip

    def synchronize(self) -> None:
        """Free all blocks that another stream still uses; the host waits for the GPU. Source: synchronize_and_free_events."""
        self.requested -= self._end_late(len(self._late))

    def begin_step(self) -> None:
        """Begin a step: count late frees from zero."""
        self.synchronize()
        self._late_over = 0

    def _end_late(self, count: int) -> int:
        """End the first `count` late frees and return their requested bytes, which count as requested until now (free_block)."""
        n_bytes = 0
        for _ in range(count):
            number = self._late.popleft()
            self._late_over += 1
            request = self._requests[number]
            stream = request & STREAM_MASK
            n_bytes += request - stream
            self.blocks.give_back(2 * stream + (request - stream > SMALL_SIZE), self.address[number])
        return n_bytes

    # Cached blocks

    def _choose(self, pool: int, at: int, need: int) -> int:
        """The index of the free block to use, from `at` on; -1 if none is suitable. Source: get_free_block."""
        cached, conf, expandable = self.blocks.free[pool], self.conf, self._expandable
        if expandable is not None:
            sizes = (expandable.size_with_space(pool, key & ADDRESS, key >> SHIFT) for key in cached[at:])
            smallest = next(sizes)
            for size in sizes:
                if size >= smallest:
                    break
                smallest, at = size, at + 1
        have = cached[at] >> SHIFT
        if need < conf.max_split_bytes <= have:
            return -1
        if need >= conf.max_split_bytes and have >= need + conf.non_split_rounding_bytes:
            return -1
        return at

    def _new_block(self, number: int, pool: int, need: int) -> tuple[int, int]:
        """Get a block from the driver after garbage collection. If the driver refuses, release the cache and retry. Source:
        malloc.
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

    def _alloc_block(self, pool: int, need: int, asked: int) -> tuple[int, int] | None:
        """Source: alloc_block."""
        if self.driver.reserved + asked > self.driver.allowed_bytes:
            return None
        if self._expandable is not None:
            return self._expandable.allocate(pool, need)
        if not self.driver.take(asked):
            return None
        start = self.driver.addresses(asked)
        self._segments[start] = (asked, pool)
        return start, asked

    # Giving back to the driver

    def release_cached(self) -> None:
        """Release every segment that is entirely free, and every free page of expandable ones. Source: release_cached_blocks."""
        self.synchronize()
        for pool in sorted(self.blocks.free, key=lambda pool: (not pool & 1, pool)):
            for key in list(self.blocks.free[pool]):
                if self._expandable is not None:
                    self._expandable.unmap(pool, key & ADDRESS)
                elif self._is_whole(key):
                    self._release(pool, key)

    def _is_whole(self, key: int) -> bool:
        """Whether a free block is its entire segment: `!block->is_split()`."""
        return self._segments.get(key & ADDRESS, (0, 0))[0] == key >> SHIFT

    def _release(self, pool: int, key: int) -> None:
        """Source: release_block."""
        start = key & ADDRESS
        self.driver.give(self.blocks.take(pool, start))
        del self._segments[start]

    def _release_available(self, pool: int, need: int) -> bool:
        """Release oversize blocks of this stream, only as many as needed. Source: release_available_cached_blocks."""
        conf = self.conf
        if conf.max_split_bytes == UNLIMITED or self._expandable is not None:
            return False
        cached, target = self.blocks.free[pool], max(need, conf.max_split_bytes)
        at = bisect_left(cached, target << SHIFT)
        if at < len(cached):
            self._release(pool, cached[at])
            return True
        released = 0
        while cached and released < target and cached[-1] >> SHIFT >= conf.max_split_bytes:
            released += cached[-1] >> SHIFT
            self._release(pool, cached[-1])
        return released >= target

    def _collect_garbage(self) -> None:
        """Release large free segments that have been free for longer than the average. Source: garbage_collect_cached_blocks."""
        threshold = int(self.conf.garbage_collection_threshold * self.driver.allowed_bytes)
        target = self.driver.reserved - threshold
        ages = self.blocks.ages
        if target <= 0 or ages is None or self._expandable is not None:
            return
        left = [
            (pool, key, self.blocks.searches[1] - ages[key & ADDRESS])
            for pool in sorted(self.blocks.free)
            for key in self.blocks.free[pool]
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

    # What there is

    def segments(self) -> Iterator[Segment]:
        """Every segment, as in `snapshot`. An expandable segment yields each stretch of mapped memory."""
        expandable = self._expandable
        for start, (n_bytes, pool) in sorted((self._segments if expandable is None else expandable.segments).items()):
            yield from self._stretches(pool, start, start + n_bytes, expandable.unmapped[pool] if expandable else {})

    def _stretches(self, pool: int, at: int, end: int, unmapped: dict[int, int]) -> Iterator[Segment]:
        blocks: list[tuple[int, bool]] = []
        begin = at
        while at < end or blocks:
            if at >= end or at in unmapped:
                if blocks:
                    yield Segment(
                        stream=pool >> 1,
                        is_large=bool(pool & 1),
                        is_expandable=self._expandable is not None,
                        address=begin,
                        blocks=tuple(blocks),
                    )
                at += unmapped.get(at, 0)
                begin, blocks = at, []
            else:
                size = self.blocks.size[at]
                blocks.append((abs(size), size > 0))
                at += abs(size)
