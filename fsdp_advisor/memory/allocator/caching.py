"""PyTorch's CUDA caching allocator, rule by rule, over numbered storages.

The driver supplies segments, which are divided into blocks without gaps. The allocator keeps free blocks per stream and pool
(small: requests up to 1 MiB; large: all others), sorted by size and address.

Source: c10/cuda/CUDACachingAllocator.cpp, DeviceCachingAllocator (torch 2.13); each rule names its function there.
Not modelled: private pools other than those of one captured step (`keep_pools`), `MemPool`, callbacks that free memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp_advisor.memory.allocator.blocks import AgingBlocks, Driver, FreeBlocks
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


def takes_newest_first(torch_version: str) -> bool:
    """Whether a version of PyTorch takes, of free blocks of equal size, that of the newest segment. Later versions take that of the oldest.

    Until 2.11 the lower address decides, and CUDA's driver seems to give descending ones: with the newest first, the reserved peaks of 113
    of 150 jobs on an H100 and an H200 (`tests/records`) are predicted within 0.1 %, with the oldest first those of 102. Later the order of
    allocation decides, then the address. Source: pytorch/pytorch, pull requests 178362 and 183591, BlockComparatorSizeCounterAddress.

    >>> takes_newest_first("2.11.0+cu130"), takes_newest_first("2.13.0")
    (True, False)
    """
    return tuple(int(part) for part in torch_version.split(".")[:2]) < (2, 12)


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


_Need = tuple[FreeBlocks, int, int]
"""What a request needs: the free blocks that it may use, its bytes, and the least bytes of a block that is split."""
_NEVER = 1 << 80
"""More bytes than any block has. Requests that fit no GPU exceed 64 bits."""


class CachingAllocator:
    """One device's allocator. The driver supplies at most `limit_bytes`. `device_bytes`: the device's memory, to which
    fractions refer.

    `requests[storage]` is each storage's request: its size and stream. `run` executes operations on storages. `address` is each storage's
    address. `gpu_keeps_up`: whether other streams have finished with a freed block by the next malloc; if not, a WAIT
    operation says when. `newest_first`: see `takes_newest_first`.
    """

    def __init__(
        self,
        requests: Sequence[int],
        conf: AllocatorConf = DEFAULT_CONF,
        *,
        limit_bytes: int | None = None,
        device_bytes: int | None = None,
        gpu_keeps_up: bool = False,
        newest_first: bool = False,
    ) -> None:
        self.conf = conf
        device = device_bytes if device_bytes is not None else limit_bytes
        allowed = UNLIMITED if device is None else conf.allowed_bytes(device)
        self.driver = Driver(limit_bytes, allowed, descends=newest_first)
        self._pools: dict[tuple[int, bool], FreeBlocks] = {}  # by stream, and whether for large requests
        self._expandable: dict[FreeBlocks, ExpandableSegments] = {}  # of each pool, with that setting
        self._takes_first_fit = not conf.expandable_segments and conf.max_split_bytes == UNLIMITED
        self._collects = conf.collects_garbage and device is not None
        self._large_searches = 0  # get_free_blocks_call_count, which only garbage collection needs
        self.allocated = self.allocated_peak = self.requested = self.requested_peak = self.retries = 0
        self._segments: dict[
            int, tuple[int, FreeBlocks]
        ] = {}  # by address: bytes and pool; without expandable segments
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
        is_expandable = self.conf.expandable_segments
        least_rest = SMALL_SIZE + 1 if is_large and not is_expandable else ALIGNMENT
        stays_whole = is_large and not is_expandable and n_bytes >= self.conf.max_split_bytes
        return self._pool(stream, is_large), n_bytes, _NEVER if stays_whole else n_bytes + least_rest

    def _pool(self, stream: int, is_large: bool) -> FreeBlocks:
        pool = self._pools.get((stream, is_large))
        if pool is None:
            if self._collects and is_large:
                pool = AgingBlocks(stream, is_large, lambda: self._large_searches)
            else:
                pool = FreeBlocks(stream, is_large)
            self._pools[stream, is_large] = pool
            if self.conf.expandable_segments:
                self._expandable[pool] = ExpandableSegments(pool, self.driver, self.conf)
        return pool

    # Running operations

    def run(self, operations: Sequence[int]) -> None:
        """Execute operations in order. Raises OutOfMemory."""
        needs, address, block_bytes = self._needs, self.address, self._block_bytes
        malloc = self._malloc
        for operation in operations:
            kind = operation & 3
            number = operation >> 2
            if kind == MALLOC:
                malloc(number)
            elif kind == FREE:
                pool, need, _ = needs[number]
                n_bytes = block_bytes[number]
                block_bytes[number] = 0
                self.allocated -= n_bytes
                self.requested -= need
                pool.give_back(address[number], n_bytes)
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
        pool, need, split_from = self._needs[number]
        if self._collects and pool.is_large:
            self._large_searches += 1
        found = pool.take_smallest(need) if self._takes_first_fit else self._choose(pool, need)
        start, n_bytes = found or self._new_block(number, pool, need)
        if n_bytes >= split_from:
            pool.put(start + need, n_bytes - need)
            n_bytes = need
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
            pool, need, _ = self._needs[number]
            self.requested -= need
            pool.give_back(self.address[number], self._block_bytes[number])
            self._block_bytes[number] = 0

    # Cached blocks

    def _choose(self, pool: FreeBlocks, need: int) -> tuple[int, int] | None:
        """Take a free block that suits a request: its start and bytes. None if there is none. Source: get_free_block."""
        limit = self.conf.max_split_bytes
        found = self._expandable[pool].choose(need) if self._expandable else next(pool.by_size(need), None)
        if found is None:
            return None
        if need < limit <= found[1]:
            return None
        if need >= limit and found[1] >= need + self.conf.non_split_rounding_bytes:
            return None
        pool.take(*found)
        return found

    def _new_block(self, number: int, pool: FreeBlocks, need: int) -> tuple[int, int]:
        """The start and bytes of a block from the driver, after garbage collection. If the driver refuses, release the cache and
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

    def _alloc_block(self, pool: FreeBlocks, need: int, asked: int) -> tuple[int, int] | None:
        """The start and bytes of a block for a request of `need` bytes. Asks the driver for `asked` bytes; None if the driver refuses.

        Source: alloc_block.
        """
        if not self.driver.allows(asked):
            return None
        if self._expandable:
            return self._expandable[pool].allocate(need)
        if not self.driver.take(asked):
            return None
        start = self.driver.addresses(asked)
        self._segments[start] = (asked, pool)
        return start, asked

    # Giving back to the driver

    def release_cached(self) -> None:
        """Release every segment that is entirely free, and every free page of expandable ones. Source: release_cached_blocks."""
        self.synchronize()
        for pool in sorted(self._pools.values(), key=lambda pool: (not pool.is_large, pool.stream)):
            for block in list(pool.by_size()):
                if self._expandable:
                    self._expandable[pool].unmap(*block)
                elif self._is_whole(*block):
                    self._release(pool, *block)

    def _is_whole(self, start: int, n_bytes: int) -> bool:
        """Whether a free block is its entire segment: `!block->is_split()`."""
        return start in self._segments and self._segments[start][0] == n_bytes

    def _release(self, pool: FreeBlocks, start: int, n_bytes: int) -> None:
        """Return the segment of a free block to the driver. Source: release_block."""
        pool.take(start, n_bytes)
        self.driver.give(n_bytes)
        del self._segments[start]

    def _release_available(self, pool: FreeBlocks, need: int) -> bool:
        """Release oversize blocks of this stream, only as many as needed. Source: release_available_cached_blocks."""
        conf = self.conf
        if conf.max_split_bytes == UNLIMITED or self._expandable:
            return False
        cached, target = list(pool.by_size()), max(need, conf.max_split_bytes)
        for start, n_bytes in cached:
            if n_bytes >= target:
                self._release(pool, start, n_bytes)
                return True
        released = 0
        for start, n_bytes in reversed(cached):
            if released >= target or n_bytes < conf.max_split_bytes:
                break
            released += n_bytes
            self._release(pool, start, n_bytes)
        return released >= target

    def _collect_garbage(self) -> None:
        """Release large free segments that have been free for longer than the average. Source: garbage_collect_cached_blocks."""
        threshold = int(self.conf.garbage_collection_threshold * self.driver.allowed_bytes)
        target = self.driver.reserved - threshold
        if target <= 0 or self._expandable:
            return
        left = [
            (pool, block, self._large_searches - pool.freed_at[block[0]])
            for _, pool in sorted(self._pools.items())
            if isinstance(pool, AgingBlocks)
            for block in pool.by_size()
            if self._is_whole(*block)
        ]
        total_age, reclaimed, freed = sum(age for _, _, age in left), 0, True
        while reclaimed < target and freed and left:
            threshold_age, freed, kept = total_age / len(left), False, []
            for pool, block, age in left:
                if age >= threshold_age:
                    freed = True
                    reclaimed += block[1]
                    total_age -= age
                    self._release(pool, *block)
                else:
                    kept.append((pool, block, age))
            left = kept

    def keep_pools(self, stream: int) -> None:
        """Keep the free blocks of a stream for good: nothing can use or release the pools of a captured graph."""
        for pool in self._pools.values():
            if pool.stream == stream:
                for block in list(pool.by_size()):
                    pool.take(*block)

    # Snapshots

    def segments(self) -> Iterator[AllocatorSegment]:
        """Every segment, as in `snapshot`. An expandable segment yields each stretch of mapped memory."""
        in_use = {start: size for start, size in zip(self.address, self._block_bytes, strict=True) if size}
        segments = dict(self._segments)
        for pool, expandable in self._expandable.items():
            segments |= {start: (n_bytes, pool) for start, n_bytes in expandable.segments.items()}
        for start, (n_bytes, pool) in sorted(segments.items()):
            for first, blocks in self._stretches(start, start + n_bytes, pool, in_use):
                yield AllocatorSegment(
                    stream=pool.stream,
                    is_large=pool.is_large,
                    is_expandable=pool in self._expandable,
                    address=first,
                    blocks=blocks,
                )

    def _stretches(
        self, at: int, end: int, pool: FreeBlocks, in_use: Mapping[int, int]
    ) -> Iterator[tuple[int, tuple[tuple[int, bool], ...]]]:
        """The start and the blocks (bytes, whether in use) of each stretch of mapped memory in a segment."""
        unmapped = self._expandable[pool].unmapped if self._expandable else {}
        first, blocks = at, list[tuple[int, bool]]()
        while at < end:
            if at in unmapped:
                if blocks:
                    yield first, tuple(blocks)
                at += unmapped[at]
                first, blocks = at, []
            else:
                blocks.append((in_use.get(at) or pool.starting_at(at), at in in_use))
                at += blocks[-1][0]
        if blocks:
            yield first, tuple(blocks)
