"""A drawing of records: predicted against measured figures, and the timeline of one case. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdp_advisor.errors import UsageError
from fsdp_advisor.render.svg import AccuracyPoint, accuracy, stacked, two_timelines
from fsdp_advisor.validation.records import Record
from fsdp_advisor.validation.report import mode_and_device

_DRAWN = {"peak_tensor_bytes": "tensors", "peak_allocated_bytes": "allocated", "peak_reserved_bytes": "reserved"}
"""The figures that are drawn, and their names in the legend."""


def _points(records: Sequence[Record]) -> list[AccuracyPoint]:
    """One point per record and figure that is predicted and measured, grouped by mode and figure."""
    found = [
        AccuracyPoint(
            group=f"{mode_and_device(record)}, {word}",
            measured_bytes=record.measured[figure],
            predicted_bytes=record.predicted[figure],
        )
        for record in records
        for figure, word in _DRAWN.items()
        if figure in record.measured and figure in record.predicted
    ]
    return sorted(found, key=lambda point: point.group)


def drawing(records: Sequence[Record]) -> str:
    """An SVG document. The timeline is that of the last case with two timelines. Raises UsageError if there is nothing to draw."""
    found = _points(records)
    if not found:
        raise UsageError("no record has a figure that is both predicted and measured", hint="run a campaign first")
    drawn = [accuracy(found)]
    timed = next((r for r in reversed(records) if r.measured.get("timeline") and r.predicted.get("timeline")), None)
    if timed is not None:
        drawn.append(two_timelines(timed.predicted["timeline"], timed.measured["timeline"], label=timed.label))
    return stacked(*drawn, title="Predictions against records")


def draw(records: Sequence[Record], path: Path) -> None:
    """Write the drawing to a file. Raises UsageError if it cannot be made or written."""
    if path.suffix != ".svg":
        raise UsageError(
            f"--plot draws SVG, not {path.suffix or 'a file without an extension'}", hint="name a .svg file"
        )
    text = drawing(records)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="name a .svg file in a folder that exists"
        ) from None
