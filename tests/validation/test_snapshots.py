"""Comparing a snapshot in the form of `torch.cuda.memory_snapshot()` with predicted segments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdp_advisor.errors import MeasurementError
from fsdp_advisor.memory.allocator import AllocatorSegment
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


def predicted_segment(is_large: bool, *blocks: tuple[int, bool]) -> AllocatorSegment:
    return AllocatorSegment(stream=0, is_large=is_large, is_expandable=False, address=0, blocks=blocks)


PREDICTED = [
    predicted_segment(False, (512, True), (2 * MIB - 512, False)),
    predicted_segment(True, (5 * MIB, True), (3 * MIB, True), (12 * MIB, False)),
    predicted_segment(True, (30 * MIB, False)),
]


def test_equal_segments_are_matched_block_by_block() -> None:
    result = compare_snapshot(RECORDED, PREDICTED[::-1])
    assert result.equal == 3 and not result.only_recorded and not result.only_modelled
    assert result.recorded_bytes == result.modelled_bytes == 52 * MIB


def test_differing_segments_are_named() -> None:
    blocks = ((5 * MIB, True), (15 * MIB, False))
    predicted = [PREDICTED[0], replace(PREDICTED[1], blocks=blocks), PREDICTED[2]]
    result = compare_snapshot({"segments": RECORDED, "device_traces": []}, predicted)
    assert result.equal == 2
    assert result.only_modelled == (("large", False, blocks),)
    assert result.only_recorded == (("large", False, ((5 * MIB, True), (3 * MIB, True), (12 * MIB, False))),)
    kept = result.as_dict()
    assert (kept["equal_segments"], kept["segments"], kept["modelled_segments"]) == (2, 3, 3)
    assert kept["only_modelled"] == ["large, 20971520 bytes, 5242880 in use, 2 blocks"]


def test_snapshot_without_segments_is_refused() -> None:
    with pytest.raises(MeasurementError):
        compare_snapshot({"device_traces": []}, [])
