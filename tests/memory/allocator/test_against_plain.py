"""The fast allocator and the plain one, side by side over random requests: the same segments, blocks and addresses."""

from __future__ import annotations

import random

import pytest
from matrix import of_today
from plain_allocator import ENDLESS, MIB, Block, PlainAllocator

from fsdp_advisor.memory.allocator import AllocatorConf, CachingAllocator, OutOfMemory
from fsdp_advisor.memory.allocator.caching import FREE, FREE_LATER, MALLOC, operation

SIZES = [512, 2048, 300 * 1024, MIB, MIB + 512, 3 * MIB, 5 * MIB, 9 * MIB, 12 * MIB, 21 * MIB, 41 * MIB, 55 * MIB]


@pytest.mark.parametrize("limit_mib", of_today([60, 120, 250, 2**30], days=2))
@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:40"])
def test_the_allocator_equals_the_plain_one_for_random_requests(conf: str, limit_mib: int) -> None:
    for seed in range(40):
        _compare(random.Random(f"{conf} {limit_mib} {seed}"), AllocatorConf.parse(conf), limit_mib * MIB)


def _compare(draw: random.Random, conf: AllocatorConf, limit: int) -> None:
    fast = CachingAllocator([], conf, limit_bytes=limit, device_bytes=2**52)
    max_split = ENDLESS if conf.max_split_bytes > 2**60 else conf.max_split_bytes
    plain = PlainAllocator(expandable=conf.expandable_segments, limit=limit, max_split=max_split)
    live: list[tuple[int, Block]] = []
    for _ in range(120):
        choice = draw.random()
        if choice < 0.55 or not live:
            size, stream, number = draw.choice(SIZES), draw.randrange(3), len(fast.address)
            fast.extend([size | stream])
            block = None
            try:
                block = plain.malloc(size, stream)
            except OutOfMemory:
                with pytest.raises(OutOfMemory):
                    fast.run([operation(MALLOC, number)])
            else:
                fast.run([operation(MALLOC, number)])
                assert fast.address[number] == block.ptr
                live.append((number, block))
        elif choice < 0.93:
            number, block = live.pop(draw.randrange(len(live)))
            later = draw.random() < 0.15
            fast.run([operation(FREE_LATER if later else FREE, number)])
            plain.free(block, later=later)
        elif choice < 0.97:
            fast.synchronize()
            plain.synchronize()
        else:
            fast.release_cached()
            plain.release_cached()
        assert (fast.driver.reserved, fast.retries) == (plain.reserved, plain.retries)
        assert [(segment.address, segment.blocks) for segment in fast.segments()] == plain.layout()
