"""Records drawn: predicted against measured over all of them, and one case's step from both sides. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdp_advisor.errors import UsageError
from fsdp_advisor.render.svg import AccuracyPoint, accuracy, stacked, two_timelines
from fsdp_advisor.validation.records import Record
from fsdp_advisor.validation.report import place

DRAWN = {"peak_tensor_bytes": "tensors", "peak_allocated_bytes": "allocated", "peak_reserved_bytes": "reserved"}
"""Figures with a point each, and their names in the legend."""


def points(records: Sequence[Record]) -> list[AccuracyPoint]:
    """One for each figure of each record that both sides know, grouped by rung and figure."""
    found = [
        AccuracyPoint(
            group=f"{place(record)}, {word}",
            measured_bytes=record.measured[figure],
            predicted_bytes=record.predicted[figure],
        )
        for record in records
        for figure, word in DRAWN.items()
        if figure in record.measured and figure in record.predicted
    ]
    return sorted(found, key=lambda point: point.group)


def drawing(records: Sequence[Record]) -> str:
    """An SVG document; the step is that of the last case with both timelines. Raises UsageError where nothing can be drawn."""
    found = points(records)
    if not found:
        raise UsageError("no record has a figure both predicted and measured", hint="run a campaign first")
    drawn = [accuracy(found)]
    timed = next((r for r in reversed(records) if r.measured.get("timeline") and r.predicted.get("timeline")), None)
    if timed is not None:
        drawn.append(two_timelines(timed.predicted["timeline"], timed.measured["timeline"], label=timed.label))
    return stacked(*drawn, title="Predictions against records")


def draw(records: Sequence[Record], path: Path) -> None:
    """Write the drawing to a file. Raises UsageError where it cannot be made or written."""
    if path.suffix != ".svg":
        raise UsageError(f"--plot draws SVG, not {path.suffix or 'a file without an ending'}", hint="name a .svg file")
    text = drawing(records)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="name a .svg file in a folder that exists"
        ) from None
