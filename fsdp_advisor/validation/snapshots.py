"""What PyTorch's caching allocator really holds against what the model of it says, block by block.

On a GPU: ``torch.cuda.memory_snapshot()`` at the end of a step, against `memory.allocator.reserve(...).segments`. Addresses
and the order of segments are the driver's, so segments are matched by what they are: pool, kind, and their blocks in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_advisor.errors import MeasurementError
from fsdp_advisor.memory.allocator import Segment

KEPT = 5
"""Segments of each side that a record names."""

Layout = tuple[str, bool, tuple[tuple[int, bool], ...]]
"""(``small`` or ``large``, expandable, blocks as (bytes, in use))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotComparison:
    """How many segments are alike to the byte, and those that are not."""

    alike: int
    only_recorded: tuple[Layout, ...]
    only_modelled: tuple[Layout, ...]
    recorded_bytes: int
    modelled_bytes: int

    @property
    def equal(self) -> bool:
        return not self.only_recorded and not self.only_modelled

    def as_dict(self) -> dict[str, Any]:
        """What a record keeps: how many segments are alike, both sums, and the first of those that differ, in words."""
        return {
            "segments": self.alike + len(self.only_recorded),
            "modelled_segments": self.alike + len(self.only_modelled),
            "alike": self.alike,
            "recorded_bytes": self.recorded_bytes,
            "modelled_bytes": self.modelled_bytes,
            "only_recorded": [_in_words(layout) for layout in self.only_recorded[:KEPT]],
            "only_modelled": [_in_words(layout) for layout in self.only_modelled[:KEPT]],
        }

    @property
    def error(self) -> float:
        """Signed, of the reserved bytes."""
        return self.modelled_bytes / self.recorded_bytes - 1 if self.recorded_bytes else 0.0


def compare_snapshot(
    recorded: Sequence[Mapping[str, Any]] | Mapping[str, Any], modelled: Iterable[Segment]
) -> SnapshotComparison:
    """`recorded` is what `torch.cuda.memory_snapshot()` or `torch.cuda.memory._snapshot()` returned."""
    segments = recorded.get("segments") if isinstance(recorded, Mapping) else recorded
    if segments is None:
        raise MeasurementError("the snapshot has no segments", hint="record it with torch.cuda.memory_snapshot()")
    real = Counter(_recorded_layout(segment) for segment in segments)
    ours = Counter(_modelled_layout(segment) for segment in modelled)
    return SnapshotComparison(
        alike=(real & ours).total(),
        only_recorded=tuple(sorted((real - ours).elements())),
        only_modelled=tuple(sorted((ours - real).elements())),
        recorded_bytes=_bytes(real),
        modelled_bytes=_bytes(ours),
    )


def _recorded_layout(segment: Mapping[str, Any]) -> Layout:
    blocks = tuple((int(b["size"]), b["state"] != "inactive") for b in segment["blocks"])
    return segment["segment_type"], bool(segment.get("is_expandable", False)), blocks


def _modelled_layout(segment: Segment) -> Layout:
    return "large" if segment.is_large else "small", segment.is_expandable, segment.blocks


def _in_words(layout: Layout) -> str:
    """A segment on one line: its pool, its size, and what is in use of how many blocks.

    >>> _in_words(("large", False, ((5 * 2**20, True), (15 * 2**20, False))))
    'large, 20971520 bytes, 5242880 in use, 2 blocks'
    """
    pool, expandable, blocks = layout
    n_bytes, used = sum(size for size, _ in blocks), sum(size for size, in_use in blocks if in_use)
    return f"{pool}{' expandable' if expandable else ''}, {n_bytes} bytes, {used} in use, {len(blocks)} blocks"


def _bytes(layouts: Counter[Layout]) -> int:
    return sum(count * sum(size for size, _ in blocks) for (_, _, blocks), count in layouts.items())
