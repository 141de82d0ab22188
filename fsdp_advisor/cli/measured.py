"""`estimate --validate`: what a run found, beside what was predicted. The best rung this machine has is taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fsdp_advisor.cli.output import note
from fsdp_advisor.units import format_gib

if TYPE_CHECKING:
    from fsdp_advisor.report import Report
    from fsdp_advisor.validation.modes import Choice
    from fsdp_advisor.validation.records import Record

SHOWN = (
    ("peak_allocated_bytes", "allocated"),
    ("peak_reserved_bytes", "reserved"),
    ("peak_device_bytes", "device"),
    ("peak_tensor_bytes", "tensors"),
)
"""The figures a rung may find. A record's own prediction is of the GPU at hand, and of a stand-in without NCCL."""


def apart(answer: Callable[[], Report]) -> Report:
    """A report made in a process of its own: what has recorded a model has run autograd, and forks no worker that uses a GPU."""
    from fsdp_advisor.validation.child_process import forked

    ended = forked(lambda tell: tell("report", answer()), timeout_seconds=math.inf)
    if ended.outcome == "interrupted":
        raise KeyboardInterrupt
    if ended.outcome != "ok":
        raise ended.error()
    report: Report = ended.reported["report"]
    return report


def run_beside(report: Report, *, quiet: bool) -> list[Record]:
    """One record per estimate of the report, in its order. Raises MissingExtra without torch."""
    from fsdp_advisor.validation.modes import beside

    def began(index: int, total: int, choice: Choice) -> None:
        note(f"run {index + 1} of {total}: {choice.why}", quiet=quiet)

    return [record for record, _ in beside(report, began=began)]


def as_lines(report: Report, records: list[Record]) -> list[str]:
    """A small table of text: strategy, predicted, measured, error. What could not be run says why."""
    rows = [("strategy", "backend", "rung", "figure", "predicted", "measured", "error")]
    reasons = []
    for one, record in zip(report.estimates, records, strict=True):
        found = [(name, word) for name, word in SHOWN if record.measured.get(name) is not None]
        if record.outcome != "ok" or not found:
            what = "not run" if record.outcome == "error" else record.outcome
            rows.append((one.label, one.plan.backend, record.rung, what, "-", "-", "-"))
            reasons.append(f"{one.label}: {record.message or record.outcome}")
            continue
        for name, word in found:
            predicted, error = record.predicted.get(name), record.errors.get(name)
            rows.append(
                (
                    one.label, one.plan.backend, record.rung, word,
                    "-" if predicted is None else format_gib(predicted),
                    format_gib(record.measured[name]),
                    "-" if error is None else f"{error:+.3%}",
                )
            )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return ["predicted and found by a run:", *lines, *(f"not run: {reason}" for reason in reasons)]


def into_json(document: dict[str, Any], records: list[Record]) -> None:
    """Add `measured` to each of the document's estimates."""
    for row, record in zip(document["estimates"], records, strict=True):
        row["measured"] = {
            "rung": record.rung,
            "device": record.device,
            "outcome": record.outcome,
            "message": record.message,
            "figures": record.measured,
            "predicted": {name: record.predicted[name] for name, _ in SHOWN if name in record.predicted},
            "errors": record.errors,
            "versions": record.versions,
        }
