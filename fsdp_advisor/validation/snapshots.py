"""Compare the segments of PyTorch's caching allocator with the predicted ones, block by block.

`torch.cuda.memory_snapshot()` at the end of a step is compared with the segments of the simulated allocator. Addresses and the order
of segments depend on the driver, so segments are matched by their pool, their kind and their blocks in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_advisor.errors import MeasurementError
from fsdp_advisor.memory.allocator import AllocatorSegment

_NAMED_SEGMENTS = 5
"""Differing segments of each side that a record names."""

Layout = tuple[str, bool, tuple[tuple[int, bool], ...]]
"""(`small` or `large`, expandable, blocks as (bytes, in use))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotComparison:
    """The number of segments that are equal to the byte, and those that exist only on one side."""

    equal: int
    only_recorded: tuple[Layout, ...]
    only_modelled: tuple[Layout, ...]
    recorded_bytes: int
    modelled_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """The comparison as a record keeps it, with the first differing segments in words."""
        return {
            "segments": self.equal + len(self.only_recorded),
            "modelled_segments": self.equal + len(self.only_modelled),
            "equal_segments": self.equal,
            "recorded_bytes": self.recorded_bytes,
            "modelled_bytes": self.modelled_bytes,
            "only_recorded": [_describe(layout) for layout in self.only_recorded[:_NAMED_SEGMENTS]],
            "only_modelled": [_describe(layout) for layout in self.only_modelled[:_NAMED_SEGMENTS]],
        }


def compare_snapshot(
    recorded: Sequence[Mapping[str, Any]] | Mapping[str, Any], modelled: Iterable[AllocatorSegment]
) -> SnapshotComparison:
    """Compare the result of `torch.cuda.memory_snapshot()` or `torch.cuda.memory._snapshot()` with predicted segments."""
    segments = recorded.get("segments") if isinstance(recorded, Mapping) else recorded
    if segments is None:
        raise MeasurementError("the snapshot has no segments", hint="record it with torch.cuda.memory_snapshot()")
    real = Counter(_recorded_layout(segment) for segment in segments)
    predicted = Counter(_modelled_layout(segment) for segment in modelled)
    return SnapshotComparison(
        equal=(real & predicted).total(),
        only_recorded=tuple(sorted((real - predicted).elements())),
        only_modelled=tuple(sorted((predicted - real).elements())),
        recorded_bytes=_total_bytes(real),
        modelled_bytes=_total_bytes(predicted),
    )


def _recorded_layout(segment: Mapping[str, Any]) -> Layout:
    blocks = tuple((int(b["size"]), b["state"] != "inactive") for b in segment["blocks"])
    return segment["segment_type"], bool(segment.get("is_expandable", False)), blocks


def _modelled_layout(segment: AllocatorSegment) -> Layout:
    return "large" if segment.is_large else "small", segment.is_expandable, segment.blocks


def _describe(layout: Layout) -> str:
    """A segment on one line: its pool, its size, the bytes in use, and the number of blocks.

    >>> _describe(("large", False, ((5 * 2**20, True), (15 * 2**20, False))))
    'large, 20971520 bytes, 5242880 in use, 2 blocks'
    """
    pool, expandable, blocks = layout
    n_bytes, used = sum(size for size, _ in blocks), sum(size for size, in_use in blocks if in_use)
    return f"{pool}{' expandable' if expandable else ''}, {n_bytes} bytes, {used} in use, {len(blocks)} blocks"


def _total_bytes(layouts: Counter[Layout]) -> int:
    return sum(count * sum(size for size, _ in blocks) for (_, _, blocks), count in layouts.items())
