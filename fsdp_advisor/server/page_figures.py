"""The page's table of every figure of every strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_advisor.memory.device import NON_TENSOR_PARTS
from fsdp_advisor.program.accounts import ACCOUNTS, PHASES
from fsdp_advisor.render.explanation import share_text
from fsdp_advisor.render.sizes import UNKNOWN
from fsdp_advisor.render.view import ReportView
from fsdp_advisor.report import Report
from fsdp_advisor.units import format_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRow:
    """One figure of every strategy."""

    name: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureGroup:
    """Figures that belong together."""

    name: str
    rows: tuple[FigureRow, ...]


def figure_groups(report: Report, view: ReportView) -> list[FigureGroup]:
    """Every figure of every strategy. A figure that is unknown in all rows is omitted."""
    rows = [estimate.as_dict() for estimate in report.estimates]
    groups = [
        FigureGroup(name="Memory of one GPU", rows=_memory(rows)),
        FigureGroup(name="Tensor peak by phase", rows=_members(rows, "phase_peaks", PHASES)),
        FigureGroup(name="Needed at the peak", rows=_members(rows, "needed_breakdown", (*ACCOUNTS, *NON_TENSOR_PARTS))),
        FigureGroup(name="Kept between steps", rows=_members(rows, "states", _keys(rows, "states"))),
        FigureGroup(name="Host memory per node", rows=_host(rows)),
        FigureGroup(name="Speed", rows=_speed(rows, view)),
        FigureGroup(
            name="Seconds of a step, by cause",
            rows=_members(rows, "step_breakdown", _keys(rows, "step_breakdown"), _seconds),
        ),
    ]
    return [group for group in groups if group.rows]


Rows = Sequence[dict[str, Any]]


def _memory(rows: Rows) -> tuple[FigureRow, ...]:
    names = {
        "needed_bytes": "needed",
        "headroom_bytes": "left free",
        "peak_reserved_bytes": "reserved by PyTorch",
        "peak_allocated_bytes": "allocated by PyTorch",
        "peak_tensor_bytes": "tensors",
        "fused_loss_peak_bytes": "tensors with a fused loss",
    }
    return _known((name, [row[key] for row in rows], _size) for key, name in names.items())


def _host(rows: Rows) -> tuple[FigureRow, ...]:
    steady = [row["host_bytes_per_node"] for row in rows]
    return _known(
        [
            *([("while training", steady, _size)] if any(steady) else []),
            ("loading one copy", _member(rows, "host_loading_bytes_per_node", "one_copy"), _size),
            ("loading a copy per rank", _member(rows, "host_loading_bytes_per_node", "every_rank"), _size),
        ]
    )


def _speed(rows: Rows, view: ReportView) -> tuple[FigureRow, ...]:
    rates: Sequence[object] = [row.throughput_text if row.throughput is not None else None for row in view.rows]
    return _known(
        [
            (f"{view.throughput_unit} per GPU", rates, str),
            ("seconds per step", [row["step_seconds"] for row in rows], _seconds),
            ("at least", [(row["step_seconds_range"] or (None, None))[0] for row in rows], _seconds),
            ("at most", [(row["step_seconds_range"] or (None, None))[1] for row in rows], _seconds),
            ("model FLOPs utilization", [row["mfu"] for row in rows], share_text),
            ("exposed communication", [row["exposed_communication_share"] for row in rows], share_text),
        ]
    )


def _members(rows: Rows, of: str, keys: Iterable[str], write: Callable[[Any], str] | None = None) -> tuple[FigureRow, ...]:  # fmt: skip
    """The members of one JSON object that are not zero in every row."""
    found = ((key, _member(rows, of, key)) for key in keys)
    return _known((key.replace("_", " "), values, write or _size) for key, values in found if any(values))


def _member(rows: Rows, of: str, key: str) -> list[object]:
    return [(row[of] or {}).get(key) for row in rows]


def _keys(rows: Rows, of: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key for row in rows for key in row[of] or ()))


def _known(figures: Iterable[tuple[str, Sequence[object], Callable[[Any], str]]]) -> tuple[FigureRow, ...]:
    """Rows of the table from (name, value in each row of the report, function that formats it). Figures that are unknown everywhere are
    omitted.
    """
    return tuple(
        FigureRow(name=name, cells=tuple(UNKNOWN if value is None else write(value) for value in values))
        for name, values, write in figures
        if any(value is not None for value in values)
    )


def _size(n_bytes: int) -> str:
    return format_gib(n_bytes).removesuffix(" GiB")


def _seconds(seconds: float) -> str:
    return f"{seconds:,.3f}"
