"""The accuracy page: estimates compared with the package's own measurements and with published runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from fsdp_advisor.render.svg import AccuracyPoint, accuracy, speed_errors
from fsdp_advisor.server.page_drawings import drawing
from fsdp_advisor.units import format_gib
from fsdp_advisor.validation import published, records, report

_PACKAGE = Path(__file__).parents[1]


def records_dir() -> Path:
    """The folder of the records: `fsdp_advisor/records` of an installed wheel, `tests/records` of a checkout."""
    installed = _PACKAGE / "records"
    return installed if installed.is_dir() else _PACKAGE.parent / "tests" / "records"


def view(folder: Path | None = None) -> dict[str, Any]:
    """The page's values: the records of a folder's .jsonl files with their errors, the published runs, and drawings."""
    folder = folder or records_dir()
    files = sorted(folder.rglob("*.jsonl")) if folder.is_dir() else []
    read = [(path, *records.read(path)) for path in files]
    found = [record for _, some, _ in read for record in report.latest(some)]
    known = [(record, figure) for record in found if (figure := report.main_figure(record)) and figure in record.errors]
    points = [
        AccuracyPoint(
            group=report.mode_and_device(record),
            measured_bytes=record.measured[figure],
            predicted_bytes=record.predicted[figure],
        )
        for record, figure in known
    ]
    return {
        "files": [path.name for path in files],
        "torn_lines": sum(len(notes) for _, _, notes in read),
        "cases": [
            {
                "case": record.label,
                "mode": report.mode_and_device(record),
                "figure": figure,
                "predicted": format_gib(record.predicted[figure]),
                "measured": format_gib(record.measured[figure]),
                "error": report.signed_percent(record.errors[figure]),
            }
            for record, figure in known
        ],
        "without_figure": len(found) - len(known),
        "without_kernels": sum(record.device == records.WITHOUT_KERNELS for record, _ in known),
        "spreads": [
            {
                "mode": s.mode,
                "strategy": s.strategy,
                "figure": s.figure,
                "cases": s.cases,
                "median": report.signed_percent(s.median),
                "p95": report.signed_percent(s.p95),
                "worst": report.signed_percent(s.worst),
            }
            for s in report.spreads(found)
            if s.figure in records.FIGURES
        ],
        "accuracy_drawing": Markup(accuracy(points, width=520)) if points else None,
        "bounds_percent": published.BOUNDS,
        "published": published.summaries(),
        "published_runs": published.runs(),
        "speed_errors_drawing": drawing(speed_errors, published.points(published.runs()), key="speed-errors"),
    }
