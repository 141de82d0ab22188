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


def _bytes(layouts: Counter[Layout]) -> int:
    return sum(count * sum(size for size, _ in blocks) for (_, _, blocks), count in layouts.items())
