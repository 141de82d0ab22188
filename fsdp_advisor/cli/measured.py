"""`estimate --validate`: run each strategy in the best mode of this machine, and show the result with the prediction."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fsdp_advisor.cli.output import note
from fsdp_advisor.errors import UsageError
from fsdp_advisor.units import format_gib

if TYPE_CHECKING:
    from fsdp_advisor.report import Report
    from fsdp_advisor.validation.records import Record

_FIGURES = (
    ("peak_allocated_bytes", "allocated"),
    ("peak_reserved_bytes", "reserved"),
    ("peak_device_bytes", "device"),
    ("peak_tensor_bytes", "tensors"),
)
"""Figures that a mode may measure. The prediction in a record is for the attached GPU; for a stand-in it is without NCCL."""


def estimate_in_subprocess(estimate: Callable[[], Report]) -> Report:
    """The report of `estimate()`, made in a child process.

    Recording a model runs autograd, after which a process cannot fork children that use a GPU.
    """
    from fsdp_advisor.validation.child_process import run_in_child

    result = run_in_child(lambda send: send("report", estimate()), timeout_seconds=math.inf)
    if result.outcome == "interrupted":
        raise KeyboardInterrupt
    if result.outcome != "ok":
        raise result.to_error()
    report: Report = result.reported["report"]
    return report


def run_validation(report: Report, *, quiet: bool) -> list[Record]:
    """One record per estimate of the report, in its order. A case that cannot run has its error as message.

    Raises MissingExtra without torch.
    """
    from fsdp_advisor.validation import machine
    from fsdp_advisor.validation.case import Case
    from fsdp_advisor.validation.external_launcher import external_rank
    from fsdp_advisor.validation.modes import choose_mode, one_request_per_strategy
    from fsdp_advisor.validation.worker import run_or_record_error

    machine.require_torch()
    if external_rank() is not None:
        raise UsageError(
            "torchrun or srun has started several processes, and each of them would run every strategy",
            hint="fsdp-advisor validate --strategy S runs one strategy on these ranks",
        )
    requests = one_request_per_strategy(report.request, report.seq_len)
    records = []
    for number, (request, row) in enumerate(zip(requests, report.estimates, strict=True), 1):
        choice = choose_mode(row.plan)
        note(f"run {number} of {len(requests)}: {choice.reason}", quiet=quiet)
        record, _ = run_or_record_error(Case(request=request, mode=choice.mode, device=choice.device))
        if record.outcome == "interrupted":
            raise KeyboardInterrupt
        records.append(record)
    return records


def comparison_lines(report: Report, records: list[Record]) -> list[str]:
    """A text table with one row per measured figure, and a line for each case that was not run."""
    rows = [("strategy", "backend", "mode", "figure", "predicted", "measured", "error")]
    reasons = []
    for one, record in zip(report.estimates, records, strict=True):
        found = [(name, word) for name, word in _FIGURES if record.measured.get(name) is not None]
        if record.outcome != "ok" or not found:
            what = "not run" if record.outcome == "error" else record.outcome
            rows.append((one.label, one.plan.backend, record.mode, what, "-", "-", "-"))
            reasons.append(f"{one.label}: {record.message or record.outcome}")
            continue
        for name, word in found:
            predicted, error = record.predicted.get(name), record.errors.get(name)
            rows.append(
                (
                    one.label, one.plan.backend, record.mode, word,
                    "-" if predicted is None else format_gib(predicted),
                    format_gib(record.measured[name]),
                    "-" if error is None else f"{error:+.3%}",
                )
            )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return ["predicted and measured:", *lines, *(f"not run: {reason}" for reason in reasons)]


def add_to_json(document: dict[str, Any], records: list[Record]) -> None:
    """Add `measured` to each estimate of the document."""
    for row, record in zip(document["estimates"], records, strict=True):
        row["measured"] = {
            "mode": record.mode,
            "device": record.device,
            "outcome": record.outcome,
            "message": record.message,
            "figures": record.measured,
            "predicted": {name: record.predicted[name] for name, _ in _FIGURES if name in record.predicted},
            "errors": record.errors,
            "versions": record.versions,
        }
