"""A recorded snapshot against the model's segments, on one made by hand in the form of `torch.cuda.memory_snapshot()`."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_advisor.errors import MeasurementError
from fsdp_advisor.memory.allocator import CachingAllocator
from fsdp_advisor.validation.snapshots import compare_snapshot

MIB = 2**20


def segment(kind: str, *blocks: tuple[int, str]) -> dict[str, Any]:
    return {
        "address": 0x7F0000000000, "total_size": sum(size for size, _ in blocks), "stream": 0, "segment_type": kind,
        "is_expandable": False, "blocks": [{"size": size, "requested_size": size, "state": state} for size, state in blocks],
    }  # fmt: skip


RECORDED = [
    segment("small", (512, "active_allocated"), (2 * MIB - 512, "inactive")),
    segment("large", (5 * MIB, "active_allocated"), (3 * MIB, "active_pending_free"), (12 * MIB, "inactive")),
    segment("large", (30 * MIB, "inactive")),
]


def modelled() -> CachingAllocator:
    allocator = CachingAllocator([5 * MIB, 512, 3 * MIB, 30 * MIB])
    allocator.run([0, 4, 8, 12, 13])
    return allocator


def test_equal_block_by_block() -> None:
    result = compare_snapshot(RECORDED, modelled().segments())
    assert result.equal and result.alike == 3
    assert result.recorded_bytes == result.modelled_bytes == 52 * MIB and result.error == 0


def test_what_differs_is_named() -> None:
    allocator = modelled()
    allocator.run([2 * 4 + 1])
    result = compare_snapshot({"segments": RECORDED, "device_traces": []}, allocator.segments())
    assert (result.alike, result.equal) == (2, False)
    assert result.only_modelled == (("large", False, ((5 * MIB, True), (15 * MIB, False))),)
    assert result.only_recorded == (("large", False, ((5 * MIB, True), (3 * MIB, True), (12 * MIB, False))),)
    assert result.error == 0


def test_signed_error() -> None:
    allocator = modelled()
    allocator.release_cached()
    assert compare_snapshot(RECORDED, allocator.segments()).error == pytest.approx(-30 / 52)


def test_not_a_snapshot() -> None:
    with pytest.raises(MeasurementError):
        compare_snapshot({"device_traces": []}, [])
