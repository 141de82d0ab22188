"""Each rule of the caching allocator by itself; the names are those of the functions of CUDACachingAllocator.cpp."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import examples

from fsdp_advisor.memory.allocator import AllocatorConf, CachingAllocator, OutOfMemory
from fsdp_advisor.memory.allocator.caching import FREE, FREE_LATER, MALLOC, WAIT, allocation_size, operation, round_size

MIB = 2**20
KIB = 2**10


class Device:
    """An allocator that is asked step by step: `malloc` gives the storage's number."""

    def __init__(self, conf: str = "", limit: int | None = None, device: int | None = None) -> None:
        self.requests: list[int] = []
        self.allocator = CachingAllocator([], AllocatorConf.parse(conf), limit_bytes=limit, device_bytes=device)

    def malloc(self, n_bytes: int, stream: int = 0) -> int:
        number = len(self.requests)
        self.requests.append(round_size(n_bytes, self.allocator.conf) | stream)
        self.allocator.extend(self.requests[-1:])
        self.allocator.run([operation(MALLOC, number)])
        return number

    def free(self, *numbers: int, later: bool = False) -> None:
        self.allocator.run([operation(FREE_LATER if later else FREE, number) for number in numbers])

    def address(self, number: int) -> int:
        return self.allocator.address[number]

    @property
    def reserved(self) -> int:
        return self.allocator.driver.reserved

    def layout(self) -> list[tuple[tuple[int, bool], ...]]:
        return [segment.blocks for segment in self.allocator.segments()]


@pytest.mark.parametrize(
    ("asked", "taken", "conf"),
    [
        (1, 512, ""),
        (512, 512, ""),
        (513, 1024, ""),
        (1200 * KIB, 1280 * KIB, "roundup_power2_divisions:4"),
        (1024 * KIB, 1024 * KIB, "roundup_power2_divisions:4"),
        (1537 * KIB, 1792 * KIB, "roundup_power2_divisions:4"),
        (2000, 2048, "roundup_power2_divisions:4"),  # not above 512 * divisions: multiples of 512
        (2100, 2560, "roundup_power2_divisions:4"),
        (1200 * KIB, 1200 * KIB, "roundup_power2_divisions:1"),
    ],
)
def test_requests_are_rounded_as_by_pytorch(asked: int, taken: int, conf: str) -> None:
    assert round_size(asked, AllocatorConf.parse(conf)) == taken


@pytest.mark.parametrize(
    ("need", "segment", "conf"),
    [
        (512, 2 * MIB, ""),
        (MIB, 2 * MIB, ""),
        (MIB + 512, 20 * MIB, ""),
        (10 * MIB - 512, 20 * MIB, ""),
        (10 * MIB, 10 * MIB, ""),
        (11 * MIB, 12 * MIB, ""),
        (9 * MIB, 32 * MIB, "large_segment_size_mb:32"),
    ],
)
def test_the_driver_is_asked_for_the_size_of_a_segment(need: int, segment: int, conf: str) -> None:
    assert allocation_size(need, AllocatorConf.parse(conf)) == segment


def test_get_pool_keeps_small_and_large_apart() -> None:
    device = Device()
    device.malloc(MIB)
    device.malloc(MIB + 1)
    assert [segment.is_large for segment in device.allocator.segments()] == [False, True]


def test_should_split_small_from_512_bytes() -> None:
    device = Device()
    device.malloc(MIB)
    device.malloc(MIB - 512)
    assert device.layout() == [((MIB, True), (MIB - 512, True), (512, False))]


def test_should_split_large_only_above_1_mib() -> None:
    """What remains is 1 MiB: the block is taken whole, and `allocated` counts all of it."""
    device = Device()
    device.malloc(19 * MIB + 512)
    assert device.layout() == [((20 * MIB, True),)]
    assert (device.allocator.allocated, device.allocator.requested) == (20 * MIB, 19 * MIB + 512)


@pytest.mark.parametrize(("newest_first", "order"), [(False, [0, 1, 2]), (True, [2, 1, 0])])
def test_of_equal_blocks_the_oldest_or_newest_segment_is_taken(newest_first: bool, order: list[int]) -> None:
    allocator = CachingAllocator([30 * MIB] * 6, newest_first=newest_first)
    allocator.run([operation(MALLOC, number) for number in (0, 1, 2)])
    allocator.run([operation(FREE, number) for number in (1, 0, 2)])
    allocator.run([operation(MALLOC, number) for number in (3, 4, 5)])
    assert [allocator.address.index(allocator.address[number]) for number in (3, 4, 5)] == order


def test_get_free_block_is_best_fit() -> None:
    device = Device()
    big, _, small, _ = (device.malloc(n * MIB) for n in (4, 2, 3, 2))
    device.free(big, small)
    assert device.address(device.malloc(3 * MIB)) == device.address(small)
    assert device.address(device.malloc(3 * MIB)) == device.address(big)


def test_get_free_block_at_the_lowest_address() -> None:
    device = Device()
    first, _, second, _ = (device.malloc(2 * MIB) for _ in range(4))
    device.free(second, first)
    assert device.address(device.malloc(2 * MIB)) == device.address(first)


def test_free_block_merges_with_both_neighbours() -> None:
    device = Device()
    a, b, c = (device.malloc(4 * MIB) for _ in range(3))
    device.free(a)
    device.free(c)
    assert device.layout() == [((4 * MIB, False), (4 * MIB, True), (12 * MIB, False))]
    device.free(b)
    assert device.layout() == [((20 * MIB, False),)]


def test_blocks_belong_to_a_stream() -> None:
    device = Device()
    a = device.malloc(16 * MIB, stream=1)
    device.free(a)
    device.malloc(16 * MIB, stream=0)
    assert device.reserved == 32 * MIB
    assert device.address(device.malloc(16 * MIB, stream=1)) == device.address(a)


def test_record_stream_holds_a_block_back_until_the_wait() -> None:
    """free, insert_events, process_events: off the books at once, given out again only when the other stream is done."""
    device = Device()
    a = device.malloc(16 * MIB)
    device.free(a, later=True)
    assert device.allocator.allocated == 0
    b = device.malloc(16 * MIB)
    assert device.address(b) != device.address(a)
    device.allocator.run([operation(WAIT, 1)])
    assert device.address(device.malloc(16 * MIB)) == device.address(a)


def test_release_cached_blocks_then_retry() -> None:
    device = Device(limit=32 * MIB)
    a = device.malloc(20 * MIB)
    device.free(a)
    device.malloc(30 * MIB)
    assert (device.allocator.retries, device.reserved) == (1, 30 * MIB)


def test_release_cached_blocks_waits_for_other_streams() -> None:
    device = Device(limit=32 * MIB)
    device.free(device.malloc(20 * MIB), later=True)
    device.malloc(30 * MIB)
    assert device.allocator.retries == 1


def test_out_of_memory_when_a_segment_is_still_split() -> None:
    device = Device(limit=40 * MIB)
    a = device.malloc(5 * MIB)
    device.malloc(2 * MIB)
    device.free(a)
    with pytest.raises(OutOfMemory) as error:
        device.malloc(30 * MIB)
    assert (error.value.storage, error.value.asked_bytes) == (2, 30 * MIB)


def test_per_process_memory_fraction_is_of_the_device() -> None:
    """setMemoryFraction, alloc_block."""
    device = Device("per_process_memory_fraction:0.5", limit=90 * MIB, device=100 * MIB)
    device.malloc(50 * MIB)
    with pytest.raises(OutOfMemory):
        device.malloc(2 * MIB)


def test_max_split_size_keeps_large_blocks_whole() -> None:
    """get_free_block and should_split: a small request takes no oversize block, a large one none much larger."""
    device = Device("max_split_size_mb:40")
    big = device.malloc(60 * MIB)
    device.free(big)
    device.malloc(30 * MIB)
    assert device.reserved == 90 * MIB
    assert device.address(device.malloc(41 * MIB)) == device.address(big)  # within max_non_split_rounding: whole
    assert device.allocator.allocated == 90 * MIB
    device.free(device.malloc(100 * MIB))
    device.malloc(70 * MIB)
    assert device.reserved == (60 + 30 + 100 + 70) * MIB


def test_release_available_cached_blocks_frees_oversize_ones_first() -> None:
    device = Device("max_split_size_mb:40", limit=200 * MIB)
    a, b, c = device.malloc(50 * MIB), device.malloc(60 * MIB), device.malloc(30 * MIB)
    device.free(a, b, c)
    device.malloc(100 * MIB)  # no single one is large enough: from the largest down
    assert device.allocator.retries == 0
    assert device.reserved == (30 + 100) * MIB


def test_garbage_collection_frees_what_is_older_than_the_average() -> None:
    """garbage_collect_cached_blocks: above 60 % of what is allowed, before the driver is asked for more."""
    device = Device("garbage_collection_threshold:0.6,per_process_memory_fraction:0.75", device=400 * MIB)
    old, young = device.malloc(60 * MIB), device.malloc(50 * MIB)
    device.free(old)
    device.malloc(62 * MIB)
    device.free(young)
    device.malloc(64 * MIB)
    assert device.reserved == (60 + 50 + 62 + 64) * MIB
    device.malloc(66 * MIB)
    assert device.reserved == (50 + 62 + 64 + 66) * MIB
    assert device.allocator.retries == 0


def test_no_garbage_collection_below_the_threshold() -> None:
    device = Device("garbage_collection_threshold:0.9,per_process_memory_fraction:0.75", device=400 * MIB)
    device.free(device.malloc(60 * MIB))
    device.malloc(62 * MIB)
    device.malloc(64 * MIB)
    assert device.reserved == (60 + 62 + 64) * MIB


@pytest.mark.parametrize("fraction", ["", ",per_process_memory_fraction:1.0"])
def test_no_garbage_collection_unless_a_fraction_is_set(fraction: str) -> None:
    """malloc: `set_fraction && garbage_collection_threshold() > 0`."""
    device = Device("garbage_collection_threshold:0.1" + fraction, limit=300 * MIB)
    device.free(device.malloc(60 * MIB), device.malloc(62 * MIB))
    device.malloc(70 * MIB)
    assert device.reserved == (60 + 62 + 70) * MIB and device.allocator.retries == 0


def test_expandable_segments_grow_by_pages() -> None:
    """try_allocate_expandable_block, map_block: 2 MiB pages for the small pool, 20 MiB for the large."""
    device = Device("expandable_segments:True")
    a = device.malloc(MIB)
    device.malloc(15 * MIB)
    device.malloc(15 * MIB)
    assert device.reserved == (2 + 40) * MIB
    assert device.layout() == [
        ((MIB, True), (MIB, False)),
        ((15 * MIB, True), (15 * MIB, True), (10 * MIB, False)),
    ]
    assert all(segment.is_expandable for segment in device.allocator.segments())
    device.free(a)


def test_expandable_segments_split_from_512_bytes() -> None:
    device = Device("expandable_segments:True")
    device.malloc(20 * MIB - 512)
    assert device.layout() == [((20 * MIB - 512, True), (512, False))]


def test_expandable_segments_prefer_blocks_that_cannot_grow() -> None:
    """get_free_block, expandable_size: the end of the segment counts with all the space behind it."""
    device = Device("expandable_segments:True")
    a, b, last = device.malloc(12 * MIB), device.malloc(5 * MIB), device.malloc(13 * MIB)
    device.free(a)  # 12 MiB before b; 10 MiB at the end, which may grow
    del b, last
    assert device.address(device.malloc(9 * MIB)) == device.address(a)


def test_expandable_segments_join_what_is_free_with_what_is_new() -> None:
    device = Device("expandable_segments:True")
    device.malloc(15 * MIB)
    b = device.malloc(25 * MIB)
    assert device.reserved == 40 * MIB
    assert device.address(b) == device.address(0) + 15 * MIB


def test_unmap_block_gives_back_whole_pages_only() -> None:
    device = Device("expandable_segments:True", limit=80 * MIB)
    a = device.malloc(50 * MIB)
    b = device.malloc(10 * MIB)
    device.free(a)
    device.allocator.release_cached()
    assert device.reserved == 20 * MIB  # the page that b shares stays
    assert device.layout() == [((10 * MIB, False), (10 * MIB, True))]
    device.malloc(60 * MIB)
    assert device.reserved == 80 * MIB
    device.free(b)


@pytest.mark.parametrize("gpu_keeps_up", [False, True])
def test_what_another_stream_uses_is_requested_until_it_is_done(gpu_keeps_up: bool) -> None:
    """free lowers what is allocated, free_block what is requested; malloc looks which events are over (process_events)."""
    requests = [4 * MIB, 4 * MIB]
    allocator = CachingAllocator(requests, gpu_keeps_up=gpu_keeps_up)
    allocator.run([MALLOC, FREE_LATER])
    assert (allocator.allocated, allocator.requested) == (0, 4 * MIB)
    allocator.run([4 + MALLOC])
    assert allocator.requested == (4 if gpu_keeps_up else 8) * MIB
    assert (allocator.address[1] == allocator.address[0]) is gpu_keeps_up
    allocator.synchronize()
    assert allocator.requested == allocator.allocated == 4 * MIB


def test_releasing_the_cache_waits_for_other_streams() -> None:
    allocator = CachingAllocator([12 * MIB, 14 * MIB], limit_bytes=14 * MIB)
    allocator.run([MALLOC, FREE_LATER, 4 + MALLOC])
    assert (allocator.retries, allocator.requested, allocator.driver.reserved) == (1, 14 * MIB, 14 * MIB)


SIZES = st.sampled_from([512, 3 * KIB, 700 * KIB, MIB, MIB + 512, 3 * MIB, 9 * MIB, 10 * MIB, 21 * MIB, 64 * MIB])
CONFS = st.sampled_from(
    ["", "expandable_segments:True", "max_split_size_mb:40", "roundup_power2_divisions:4", "large_segment_size_mb:32"]
)


@settings(max_examples=examples(150), deadline=None)
@given(conf=CONFS, steps=st.lists(st.tuples(SIZES, st.integers(0, 2), st.integers(0, 3)), max_size=60), data=st.data())
def test_blocks_tile_segments(conf: str, steps: Sequence[tuple[int, int, int]], data: st.DataObject) -> None:
    device = Device(conf)
    live: list[int] = []
    for size, stream, frees in steps:
        live.append(device.malloc(size, stream))
        for _ in range(min(frees, len(live) - 1)):
            device.free(live.pop(data.draw(st.integers(0, len(live) - 1))), later=data.draw(st.booleans()))
        allocator = device.allocator
        segments = list(allocator.segments())
        assert sum(segment.n_bytes for segment in segments) == allocator.driver.reserved
        assert max(allocator.requested, allocator.allocated) <= allocator.driver.reserved
        in_use: dict[int, int] = {}
        for segment in segments:
            start = segment.address
            for n_bytes, is_used in segment.blocks:
                in_use |= {start: n_bytes} if is_used else {}
                start += n_bytes
        assert len({device.address(number) for number in live}) == len(live)
        for number in live:
            assert in_use[device.address(number)] >= device.requests[number] // 512 * 512
    device.free(*live)
    device.allocator.synchronize()
    assert device.allocator.allocated == device.allocator.requested == 0
    for segment in device.allocator.segments():
        assert len(segment.blocks) == 1 and not segment.blocks[0][1]
    device.allocator.release_cached()
    assert device.reserved == 0 and not list(device.allocator.segments())


@settings(max_examples=examples(60), deadline=None)
@given(
    conf=CONFS,
    limit=st.integers(40, 200),
    sizes=st.lists(SIZES, min_size=1, max_size=40),
    data=st.data(),
)
def test_never_above_the_limit(conf: str, limit: int, sizes: list[int], data: st.DataObject) -> None:
    device = Device(conf, limit=limit * MIB)
    live: list[int] = []
    for size in sizes:
        try:
            live.append(device.malloc(size))
        except OutOfMemory:
            break
        if data.draw(st.booleans()):
            device.free(live.pop(data.draw(st.integers(0, len(live) - 1))))
        assert device.reserved <= limit * MIB
        assert sum(segment.n_bytes for segment in device.allocator.segments()) == device.reserved


def test_one_request_may_be_larger_than_an_expandable_segments_usual_space() -> None:
    allocator = CachingAllocator([3 * 2**40], AllocatorConf(expandable_segments=True))
    allocator.run([MALLOC])
    assert 3 * 2**40 <= allocator.driver.peak < 3.001 * 2**40
